"""From the hidden states of a text to one vector, and what is done with vectors: length, likeness.

On the host, in numpy: knows neither models nor graphs.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from minfer_jax.errors import UsageError

Pooling = Literal["none", "mean", "cls", "last", "rank"]
POOLINGS: tuple[Pooling, ...] = ("none", "mean", "cls", "last", "rank")
"""In the order of their numbers in `{arch}.pooling_type`."""

MAX_NORM = (1 << 31) - 1
_INT16 = 32760.0  # what the largest value of a vector becomes with `normalize(_, 0)`


def pool(hidden: np.ndarray, kind: Pooling) -> np.ndarray:
    """One vector [n_embd] of the rows [n, n_embd] of one text, or with "none" the rows as they are.

    "mean" of all rows, "cls" the first, "last" the last. float32 in and out.
    """
    if kind == "none":
        return hidden
    if kind == "mean":
        return hidden.mean(axis=0, dtype=np.float64).astype(np.float32)
    if kind in ("cls", "last"):
        return hidden[0 if kind == "cls" else -1]
    raise UsageError(f"pooling {kind!r} does not make a vector; allowed: none, mean, cls, last")


def check_norm(p: int, what: str = "normalize") -> int:
    """`p` if `normalize` takes it; raises `UsageError` that names `what`."""
    if isinstance(p, bool) or not isinstance(p, int | np.integer) or not -1 <= p <= MAX_NORM:
        raise UsageError(f"{what} is {p!r}; allowed: -1 (none), 0 (int16), 1 or more (p-norm)")
    return int(p)


def normalize(vectors: np.ndarray, p: int = 2) -> np.ndarray:
    """Each vector [..., n] divided by its p-norm: 1 sum of magnitudes, 2 euclidean, and so on.

    As llama.cpp's `--embd-normalize`, -1 leaves it as it is and 0 makes its largest magnitude
    32760. A vector of zeros stays one. float32 in and out.
    """
    check_norm(p)
    if p == -1:
        return vectors
    size = np.abs(vectors.astype(np.float64))
    largest = size.max(axis=-1, keepdims=True)
    # Relative to the largest, so that no power underflows; a vector of zeros is divided by 1.
    largest[largest == 0.0] = 1.0
    if p == 0:
        norm = largest / _INT16
    else:
        norm = largest * ((size / largest) ** p).sum(axis=-1, keepdims=True) ** (1.0 / p)
        norm[norm == 0.0] = 1.0
    return (vectors / norm).astype(np.float32)


def cosine_similarity(vectors: np.ndarray) -> np.ndarray:
    """Cosines of the angles between k vectors [k, n]: float64 [k, k].

    Zeros are like zeros (1) and unlike everything else (0).
    """
    wide = vectors.astype(np.float64)
    length = np.sqrt((wide * wide).sum(axis=-1))
    zero = length == 0.0
    unit = wide / np.where(zero, 1.0, length)[:, None]
    return np.clip(unit @ unit.T + np.outer(zero, zero), -1.0, 1.0)
