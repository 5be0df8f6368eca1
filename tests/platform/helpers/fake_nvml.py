"""Machines with GPUs that are none: NVML as a library of its own, and the file that it reads."""

import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
HEALTHY = {
    "ecc": 0, "pending": 0, "failed": 0, "slowdown": 0, "width": 16, "width_max": 16, "links": 18, "recoveries": 0,
}  # fmt: skip


def build(folder, name="libnvidia-ml.so.1", *options):
    """The library in a folder."""
    library = Path(folder) / name
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", *options, "-o", library, SOURCE], check=True)
    return library


def describe(file, *, gpus=2, healthy=HEALTHY, **changes):
    """Write what the library tells: of `gpus` healthy GPUs, but for changes such as `ecc__1=3` or `init=9`."""
    numbers = {f"{name}.{gpu}": number for gpu in range(gpus) for name, number in healthy.items()}
    numbers |= {name.replace("__", "."): number for name, number in changes.items()} | {"gpus": gpus}
    lines = [f"{name} {number}" for name, number in numbers.items() if number is not None]
    # In one step: another process may be reading it.
    fresh = Path(file).with_suffix(".fresh")
    fresh.write_text("\n".join(lines) + "\n")
    fresh.replace(file)
