"""Batches and how they are cut: rows of a prompt -> ubatches -> buckets.

Knows neither the model nor the memory: only numbers of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minfer_jax.errors import BatchError

PREFILL_BUCKETS = (32, 128, 512)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tokens that continue the sequence.

    `logits[i]` says whether token i's logits are wanted; None means the last token's only.
    """

    token: Sequence[int]
    logits: Sequence[bool] | None = None


@dataclass(frozen=True)
class Ubatch:
    """Rows start..start+n of a batch, run by one call of one graph."""

    start: int
    token: np.ndarray
    """int32 [n]"""
    out: np.ndarray
    """Indices within the ubatch whose logits are wanted, int32, ascending."""


def check_batch(batch: Batch, n_vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids int32 [n] and output flags bool [n]; raises `BatchError` for a bad batch.

    Ids are checked as Python ints: an index that is out of range would clamp silently later.
    """
    n = len(batch.token)
    if n == 0:
        raise BatchError("the batch has no tokens")
    for i, token in enumerate(batch.token):
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise BatchError(f"token {i} of the batch is {token!r}, not an integer")
        if not 0 <= token < n_vocab:
            raise BatchError(f"token {i} of the batch is {token}; allowed: 0 to {n_vocab - 1}")
    if batch.logits is None:
        wanted = np.zeros(n, bool)
        wanted[-1] = True
    elif len(batch.logits) != n:
        raise BatchError(f"the batch has {n} tokens but {len(batch.logits)} logits flags")
    else:
        wanted = np.asarray(batch.logits, bool)
    return np.asarray(batch.token, np.int32), wanted


def split_simple(token: np.ndarray, wanted: np.ndarray, n_ubatch: int) -> list[Ubatch]:
    """Consecutive ubatches of at most `n_ubatch` rows."""
    return [
        Ubatch(
            start,
            token[start : start + n_ubatch],
            np.flatnonzero(wanted[start : start + n_ubatch]).astype(np.int32),
        )
        for start in range(0, len(token), n_ubatch)
    ]


def bucket(n: int, n_ubatch: int) -> int:
    """Rows of the graph that runs `n` rows: the smallest bucket that holds them.

    One row is a decode step; more are padded to a prefill bucket, the largest being `n_ubatch`.
    """
    if n == 1:
        return 1
    return next((size for size in PREFILL_BUCKETS if n <= size <= n_ubatch), n_ubatch)
