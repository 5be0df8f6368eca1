"""What a GPU does, as far as training a language model asks for it: by data sheet, and as measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Dense bfloat16, FLOP/s, by the makers' data sheets. The longest beginning of a device's name that is here counts.
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
# Share of a GPU's memory that an allocator can use.
USABLE = 0.97


@dataclass(frozen=True)
class Gpu:
    """Rates that training reaches, not those of the data sheet.

    Attributes:
        memory: bytes that a process may allocate: what the driver shows less the context's.
        peak: FLOP/s, dense bf16, of the data sheet: what MFU is a share of.
        products: FLOP/s of large bf16 matrix products.
        causal, masked: FLOP/s of attention forward and backward, over the pairs that it computes: with a causal mask by
            half of the square, with packed documents' mask by all of it.
        stream: bytes/s that elementwise kernels move.
        update: bytes/s that the fused AdamW moves.
        link: bytes/s that a process sends to others of its machine in a collective.
        layer: seconds that the host needs to launch a layer's forward and backward pass.
        measured: whether the rates were; else they are scaled from the H200's by data sheets.
    """

    name: str
    memory: float
    peak: float
    products: float
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
    causal=400e12,
    masked=240e12,
    stream=3.6e12,
    update=2.6e12,
    link=300e9,
    layer=1.2e-3,
    measured=True,
)


def _scaled(name: str, memory: float, peak: float, bandwidth: float, link: float) -> Gpu:
    """By data sheet: GiB, FLOP/s, bytes/s of its memory (an H200's: 4.8e12), bytes/s of its links."""
    compute, memory_rate = peak / _H200.peak, bandwidth / 4.8e12
    return replace(
        _H200,
        name=name,
        memory=memory * _GIB,
        peak=peak,
        products=_H200.products * compute,
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
    "a100-80gb": _scaled("A100 80 GB", 78.5, PEAKS["NVIDIA A100"], 2.0e12, 200e9),
    "a100-40gb": _scaled("A100 40 GB", 38.8, PEAKS["NVIDIA A100"], 1.55e12, 200e9),
    "l40s": _scaled("L40S", 43.9, PEAKS["NVIDIA L40S"], 0.864e12, 20e9),
    "b200": _scaled("B200", 177.0, PEAKS["NVIDIA B200"], 8.0e12, 600e9),
}


def gpu_by_name(name: str) -> Gpu | None:
    """The kind that a driver or a node's label calls `name`; None of one that is not in GPUS, or a part of one."""
    kind = gpu_kind(name)
    return None if kind is None else GPUS[kind]


def gpu_kind(name: str) -> str | None:
    """Its key in GPUS.

    >>> gpu_kind("NVIDIA-H100-80GB-HBM3")
    'h100'
    """
    plain = name.lower().replace(" ", "-")
    if "mig" in plain:
        return None
    words = plain.split("-")
    return next((key for key in GPUS if all(part in words for part in key.split("-"))), None)
