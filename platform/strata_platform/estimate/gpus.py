"""GPU models: the rates that training a language model depends on, from data sheets and measurements."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Dense bfloat16, FLOP/s, by the vendors' data sheets. The longest key that a device's name begins with applies.
PEAKS = {
    "NVIDIA A100": 312e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA L40S": 362e12,
    "AMD Instinct MI300X": 1307.4e12,
}
# Share of a GPU's memory that an allocator can use; the rest is lost to fragmentation.
USABLE = 0.97


@dataclass(frozen=True)
class Gpu:
    """A GPU model with the rates that training reaches, which are below those of the data sheet.

    Attributes:
        memory: bytes that a process may allocate: what the driver reports minus the CUDA context.
        peak: dense bf16 FLOP/s of the data sheet, the denominator of MFU.
        products: FLOP/s of large bf16 matrix multiplications.
        float8: FLOP/s of large FP8 matrix multiplications; 0 for a GPU without them.
        causal, masked: FLOP/s of attention, forward and backward, over the computed pairs: half of the square with a
            causal mask, all of it with the mask of packed documents.
        stream: bytes/s of elementwise kernels.
        update: bytes/s of the fused AdamW step.
        link: bytes/s that a process sends to others of its node in a collective.
        layer: seconds of host time to launch a layer's forward and backward pass.
        measured: whether the rates are measured; otherwise they are scaled from the H200's by data sheets.
    """

    name: str
    memory: float
    peak: float
    products: float
    float8: float
    causal: float
    masked: float
    stream: float
    update: float
    link: float
    layer: float
    measured: bool = False


_GIB = 2**30
_H200 = Gpu(
    name="H200",
    memory=138.5 * _GIB,
    peak=PEAKS["NVIDIA H200"],
    products=680e12,
    float8=1250e12,
    causal=400e12,
    masked=240e12,
    stream=3.6e12,
    update=3.9e12,
    link=300e9,
    layer=1.2e-3,
    measured=True,
)


def _scaled(name: str, memory: float, peak: float, bandwidth: float, link: float, *, float8: bool = True) -> Gpu:
    """A GPU scaled from the H200 by data sheets: GiB, FLOP/s, bytes/s of memory (H200: 4.8e12), bytes/s of links."""
    compute, memory_rate = peak / _H200.peak, bandwidth / 4.8e12
    return replace(
        _H200,
        name=name,
        memory=memory * _GIB,
        peak=peak,
        products=_H200.products * compute,
        float8=_H200.float8 * compute if float8 else 0.0,
        causal=_H200.causal * compute,
        masked=_H200.masked * compute,
        stream=_H200.stream * memory_rate,
        update=_H200.update * memory_rate,
        link=link,
        measured=False,
    )


GPUS: dict[str, Gpu] = {
    "h200": _H200,
    "h100": _scaled("H100 SXM", 78.5, PEAKS["NVIDIA H100"], 3.35e12, 300e9),
    "a100-80gb": _scaled("A100 80 GB", 78.5, PEAKS["NVIDIA A100"], 2.0e12, 200e9, float8=False),
    "a100-40gb": _scaled("A100 40 GB", 38.8, PEAKS["NVIDIA A100"], 1.55e12, 200e9, float8=False),
    "l40s": _scaled("L40S", 43.9, PEAKS["NVIDIA L40S"], 0.864e12, 20e9),
    "b200": _scaled("B200", 177.0, PEAKS["NVIDIA B200"], 8.0e12, 600e9),
}


def gpu_by_name(name: str) -> Gpu | None:
    """The GPU model that a driver or a node's label names; None for one that is not in GPUS, or for a MIG slice."""
    kind = gpu_kind(name)
    return None if kind is None else GPUS[kind]


def gpu_kind(name: str) -> str | None:
    """The key in GPUS of a GPU model's name.

    >>> gpu_kind("NVIDIA-H100-80GB-HBM3")
    'h100'
    """
    plain = name.lower().replace(" ", "-")
    if "mig" in plain:
        return None
    words = plain.split("-")
    return next((key for key in GPUS if all(part in words for part in key.split("-"))), None)
