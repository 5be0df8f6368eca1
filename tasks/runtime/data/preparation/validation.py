"""The validation split: which documents are held out."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def hold_out(samples: Ints, lengths: Ints, *, fraction: float, seed: int, divisible: bool) -> tuple[Mask, bool]:
    """Mask of the documents to hold out, and whether these are the ends of samples rather than whole samples.

    samples, lengths: sample number and tokens of each document, [D], int64, in order.
    divisible: samples are texts, split into documents of a row. If whole samples would hold out none, or more than
    twice `fraction` of the tokens, as with one long file or few, the last rows of each long sample are held out.
    """
    used, sample_of = np.unique(samples, return_inverse=True)
    whole = sample_mask(used, fraction=fraction, seed=seed)[sample_of]
    if not divisible or fraction == 0 or 0 < lengths[whole].sum() <= 2 * fraction * lengths.sum():
        return whole, False
    counts = np.bincount(sample_of)
    # At least a half is left, as the fraction is at most a half.
    kept = counts - np.floor(counts * fraction + 0.5).astype(np.int64)
    if (kept == counts).all():
        kept[np.argmax(counts)] -= 1
    position = np.arange(samples.size) - (np.cumsum(counts) - counts)[sample_of]
    ends = position >= kept[sample_of]
    return (ends, True) if counts.max() > 1 else (whole, False)


def sample_mask(samples: Ints, *, fraction: float, seed: int) -> Mask:
    """Mask of the validation samples: those whose random number is below the fraction; at least one, never all.

    The number depends only on the seed and the sample's index, so rows that are appended to a source move no other
    sample between the splits.
    """
    draws = np.array([uniform(seed, int(sample)) for sample in samples])
    in_validation = draws < fraction
    if fraction > 0 and draws.size >= 2:
        in_validation[np.argmin(draws)] = True
        in_validation[np.argmax(draws)] = False
    return in_validation if draws.size >= 2 else np.zeros(draws.size, dtype=np.bool_)


def uniform(seed: int, number: int) -> float:
    """A uniform random number in [0, 1), the same on every machine."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=7).digest()) / 2**56
