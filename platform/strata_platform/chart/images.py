"""The images that rendered manifests need, one on a line: `helm template ... | python -m strata_platform.chart.images`.

With `--to HOST` each line has two: where the image comes from, and where it is in the registry HOST. Images are in
pods and in what controllers make pods from: an `image` in the YAML of a config map or a secret, and arguments such as
`--init-container-image=...`. An image that is only named inside another image is not found.
"""

from __future__ import annotations

import argparse
import re
import sys
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import yaml

_HUB = "docker.io"
_ARGUMENT = re.compile(r"^--[a-z-]*image=(?P<image>\S+)$")
# In the pod templates of Strata's chart: Flyte puts the image of the task in its place.
_PLACEHOLDER = "set-by-flyte"
# Of a config map or a secret, what is worth reading as YAML.
_NAMES_AN_IMAGE = re.compile(r"\bimage[\"']?\s*:")


def images_of(manifests: str) -> list[str]:
    """The images in a stream of manifests, sorted, each once, with its registry.

    Raises:
        ValueError: the text is no YAML, or names no image at all.
    """
    try:
        documents = list(yaml.safe_load_all(manifests))
    except yaml.YAMLError as error:
        raise ValueError(f"the manifests are not valid YAML: {error}") from error
    found = {qualified(image) for document in documents for image in _images(document) if image != _PLACEHOLDER}
    if not found:
        raise ValueError("the manifests name no image; pipe the output of 'helm template' into this program")
    return sorted(found)


def _images(value: Any) -> Iterator[str]:
    match value:
        case {"kind": "ConfigMap" | "Secret" as kind}:
            encoded = value.get("data") or {} if kind == "Secret" else {}
            plain = value.get("stringData") if kind == "Secret" else value.get("data")
            texts = [*(plain or {}).values(), *(b64decode(text).decode(errors="replace") for text in encoded.values())]
            for text in texts:
                yield from _in_text(text)
        case dict():
            for key, inner in value.items():
                if key == "image" and isinstance(inner, str) and inner:
                    yield inner
                else:
                    yield from _images(inner)
        case list():
            for inner in value:
                yield from _images(inner)
        case str():
            if argument := _ARGUMENT.match(value):
                yield argument["image"]


def _in_text(text: str) -> Iterator[str]:
    if not _NAMES_AN_IMAGE.search(text):
        return
    try:
        yield from _images(yaml.safe_load(text))
    except yaml.YAMLError:
        # A program's own format.
        return


def qualified(image: str) -> str:
    """An image with its registry, as containerd completes it.

    >>> qualified("postgres:15"), qualified("registry.k8s.io/kueue/kueue:v0.19.0")
    ('docker.io/library/postgres:15', 'registry.k8s.io/kueue/kueue:v0.19.0')
    """
    first, slash, _ = image.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return image
    return f"{_HUB}/{image}" if slash else f"{_HUB}/library/{image}"


def copied(image: str, registry: str) -> str:
    """Where the copy of an image is in `registry`. The original host is part of the path: two hosts may have one path.

    >>> copied("registry.k8s.io/kueue/kueue:v0.19.0", "registry.internal:5000")
    'registry.internal:5000/registry.k8s.io/kueue/kueue:v0.19.0'
    """
    return f"{registry.rstrip('/')}/{image}"


def main() -> int:
    """Read manifests from standard input and print their images; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", help="registry that the images are to be copied to, such as registry.internal:5000")
    registry = parser.parse_args().to
    try:
        found = images_of(sys.stdin.read())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for image in found:
        print(f"{image} {copied(image, registry)}" if registry else image)
    return 0


if __name__ == "__main__":
    sys.exit(main())
