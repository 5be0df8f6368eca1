"""Makes `helm uninstall` keep Kueue's kinds: `python -m strata_platform.chart.keep_kinds charts/strata-stack`.

Kueue's chart has its CustomResourceDefinitions among its templates and no value that keeps them, so they would go with
the release, and every object of Kueue in the cluster with them. Helm keeps what has an annotation in the release's
manifests; one on the live object is too late. So this writes the annotation into the chart that
`helm dependency update` has fetched, an archive or a folder. Done twice, it changes nothing.
"""

from __future__ import annotations

import gzip
import io
import re
import sys
import tarfile
from pathlib import Path

KEEP = {"helm.sh/resource-policy": "keep"}
_LINE = "".join(f"    {name}: {value}\n" for name, value in KEEP.items())
_CRD = re.compile(r"(^|/)kueue/templates/crd/[^/]+\.yaml$")
_ANNOTATIONS = re.compile(r"^  annotations:\n", re.MULTILINE)


def keep(stack: Path) -> int:
    """Annotate the kinds of the Kueue in a chart's dependencies; returns their number.

    Raises:
        ValueError: there is no Kueue, or none with kinds as this knows them.
    """
    archives = sorted((stack / "charts").glob("kueue-*.tgz"))
    folder = stack / "charts" / "kueue"
    if not archives and not folder.is_dir():
        raise ValueError(f"{stack}/charts has no Kueue: run 'helm dependency update {stack}' first")
    found = sum(map(_in_archive, archives)) + (_in_folder(folder) if folder.is_dir() else 0)
    if not found:
        raise ValueError(f"the Kueue in {stack}/charts has no CRDs in templates/crd: this is not Kueue's chart 0.19")
    return found


def _in_folder(chart: Path) -> int:
    files = sorted((chart / "templates" / "crd").glob("*.yaml"))
    for file in files:
        file.write_text(_annotated(file.read_text(), file.name))
    return len(files)


def _in_archive(archive: Path) -> int:
    """The archive is written anew, in one go: a half-written one would be no chart."""
    count, out = 0, io.BytesIO()
    # Without a time of its own, the same chart gives the same archive.
    with (
        tarfile.open(archive) as source,
        gzip.GzipFile(fileobj=out, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as target,
    ):
        for member in source:
            content = source.extractfile(member)
            data = content.read() if content else b""
            if _CRD.search(member.name):
                count += 1
                data = _annotated(data.decode(), member.name).encode()
                member.size = len(data)
            target.addfile(member, io.BytesIO(data) if content else None)
    new = archive.with_name(f".{archive.name}.new")
    new.write_bytes(out.getvalue())
    new.replace(archive)
    return count


def _annotated(text: str, name: str) -> str:
    if _LINE in text:
        return text
    # The kind's own metadata come first; fields called annotations in its schema are deeper.
    if not (found := _ANNOTATIONS.search(text)):
        raise ValueError(f"{name} has no annotations in its metadata: this is not the chart of Kueue 0.19")
    return text[: found.end()] + _LINE + text[found.end() :]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m strata_platform.chart.keep_kinds charts/strata-stack")
    try:
        print(f"'helm uninstall' will keep {keep(Path(sys.argv[1]))} kinds of Kueue")
    except ValueError as error:
        sys.exit(str(error))
