"""JobSet's controller in the cluster of `local_cluster`, and the names of its pods, which that cluster's DNS lacks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# The version that Kueue 0.19 is built with, so its packages are compiled already.
PACKAGE, VERSION = "sigs.k8s.io/jobset", "v0.12.0"
MODULE = f"{PACKAGE}@{VERSION}"
_BUILD_SECONDS = 900


def build(scripts: Path, state: Path) -> None:
    """The controller's program, unless it is there, and its image."""
    program = state / "bin" / "jobset"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        if not program.exists():
            # The module of Kubernetes and Kueue names every package that this one needs.
            sources = Path(folder) / "sources"
            shutil.copytree(scripts / "tools" / "kubernetes", sources, copy_function=shutil.copyfile)
            sources.chmod(0o755)
            command = ["nice", "go", "build", "-ldflags", "-s -w", "-o", str(program), PACKAGE]
            settings = os.environ | {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "-buildvcs=false"}
            subprocess.run(command, cwd=sources, env=settings, check=True, timeout=_BUILD_SECONDS)
        (root / "tmp").mkdir(parents=True)
        root.chmod(0o755)
        (root / "tmp").chmod(0o1777)
        shutil.copy2(program, root / "manager")
        made = ["registry.local/jobset:1", str(state / "images" / "jobset.tar"), "65532", "/manager"]
        subprocess.run(["python3", str(scripts / "mkimage.py"), str(root), *made], check=True, timeout=60)


def start_names(scripts: Path, state: Path) -> None:
    """Keep the names of pods' hosts in the cluster's DNS, until `down.sh` removes the DNS server's folder."""
    command = [str(scripts / "ns.sh"), sys.executable, str(Path(__file__)), str(state / "run" / "dns")]
    subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def _names() -> str:
    """The lines of a hosts file for every pod of a headless service that has a name of its own."""
    asked = ["kubectl", "get", "endpointslices", "--all-namespaces", "--output", "json"]
    found = json.loads(subprocess.run(asked, capture_output=True, check=True, timeout=10).stdout)
    lines = {
        f"{address} {endpoint['hostname']}.{service}.{item['metadata']['namespace']}.svc.cluster.local"
        for item in found["items"]
        if (service := item["metadata"].get("labels", {}).get("kubernetes.io/service-name"))
        for endpoint in item["endpoints"] or []
        if "hostname" in endpoint
        for address in endpoint["addresses"]
    }
    return "\n".join(sorted(lines)) + "\n"


def main(folder: Path) -> None:
    """Write the names to a file of `folder`, as long as that is there."""
    last = ""
    while folder.is_dir():
        try:
            if (names := _names()) != last:
                (folder / ".pods").write_text(names)
                (folder / ".pods").replace(folder / "pods")
                last = names
        except (OSError, subprocess.SubprocessError):
            # The API server is away for a moment, or for good.
            pass
        time.sleep(0.5)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
