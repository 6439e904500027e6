"""Batches and how they are cut: rows of a prompt -> ubatches -> buckets.

Knows neither the model nor the memory: only numbers of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minfer_jax.errors import BatchError

DECODE_BUCKETS = (1, 4, 8, 16)
PREFILL_BUCKETS = (32, 128, 512)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tokens that continue one or several sequences, in any order of the sequences.

    `seq_id[i]` is the sequence of token i (default: 0), `pos[i]` its position, which must be the
    sequence's next one (default: that), and `logits[i]` says whether its logits are wanted
    (default: the last token's only).
    """

    token: Sequence[int]
    pos: Sequence[int] | None = None
    seq_id: Sequence[int] | None = None
    logits: Sequence[bool] | None = None


@dataclass(frozen=True)
class CheckedBatch:
    """A batch without gaps in what it says: int32 [n] each, and bool [n]."""

    token: np.ndarray
    pos: np.ndarray
    seq_id: np.ndarray
    wanted: np.ndarray


@dataclass(frozen=True)
class Ubatch:
    """Rows start..start+n of a batch, run by one call of one graph."""

    start: int
    token: np.ndarray
    """int32 [n], as `pos` and `seq_id`"""
    pos: np.ndarray
    seq_id: np.ndarray
    out: np.ndarray
    """Indices within the ubatch whose logits are wanted, int32, ascending."""


def check_batch(batch: Batch, n_vocab: int, n_past: Sequence[int] = (0,)) -> CheckedBatch:
    """Fill in what the batch leaves out; raises `BatchError` for a bad one.

    `n_past` is the next position of every sequence that there is. Numbers are checked as Python
    ints: an index that is out of range would clamp silently later.
    """
    n = len(batch.token)
    if n == 0:
        raise BatchError("the batch has no tokens")
    for i, token in enumerate(batch.token):
        _check_int(token, f"token {i} of the batch", n_vocab)
    seq_id = _of_length(batch.seq_id, n, "sequence ids")
    if seq_id is None:
        seq_id = [0] * n
    for i, seq in enumerate(seq_id):
        _check_int(seq, f"sequence id {i} of the batch", len(n_past))
    pos = _next_positions(seq_id, _of_length(batch.pos, n, "positions"), n_past)
    flags = _of_length(batch.logits, n, "logits flags")
    if flags is None:
        wanted = np.zeros(n, bool)
        wanted[-1] = True
    else:
        wanted = np.asarray(flags, bool)
    return CheckedBatch(
        np.asarray(batch.token, np.int32),
        np.asarray(pos, np.int32),
        np.asarray(seq_id, np.int32),
        wanted,
    )


def _check_int(value: object, what: str, bound: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise BatchError(f"{what} is {value!r}, not an integer")
    if not 0 <= value < bound:
        raise BatchError(f"{what} is {value}; allowed: 0 to {bound - 1}")


def _of_length(values: Sequence | None, n: int, what: str) -> Sequence | None:
    if values is not None and len(values) != n:
        raise BatchError(f"the batch has {n} tokens but {len(values)} {what}")
    return values


def _next_positions(
    seq_id: Sequence[int], given: Sequence[int] | None, n_past: Sequence[int]
) -> list[int]:
    """Every token's position: each sequence goes on where it ends, without gap or repetition."""
    following = list(n_past)
    pos = []
    for i, seq in enumerate(seq_id):
        expected = following[seq]
        if given is not None:
            at = given[i]
            if isinstance(at, bool) or not isinstance(at, int | np.integer):
                raise BatchError(f"position {i} of the batch is {at!r}, not an integer")
            if at != expected:
                fault = "leaves a gap" if at > expected else "is taken already"
                raise BatchError(
                    f"position {i} of the batch is {at}, which {fault}: sequence {seq} goes on at"
                    f" {expected}"
                )
        pos.append(expected)
        following[seq] += 1
    return pos


def split_simple(batch: CheckedBatch, n_ubatch: int) -> list[Ubatch]:
    """Consecutive ubatches of at most `n_ubatch` rows."""

    def cut(start: int) -> Ubatch:
        rows = slice(start, start + n_ubatch)
        out = np.flatnonzero(batch.wanted[rows]).astype(np.int32)
        return Ubatch(start, batch.token[rows], batch.pos[rows], batch.seq_id[rows], out)

    return [cut(start) for start in range(0, len(batch.token), n_ubatch)]


def one_row_each(seq_id: np.ndarray) -> bool:
    """Whether no sequence has more than one of these rows: a decode step."""
    return len(seq_id) == 1 or len(set(seq_id.tolist())) == len(seq_id)


def bucket(n: int, n_ubatch: int, *, decode: bool) -> int:
    """Rows of the graph that runs `n` rows: the smallest bucket that holds them, or `n_ubatch`.

    `decode` says that no sequence has more than one of them.
    """
    if n == 1:
        return 1
    sizes = (*DECODE_BUCKETS, *PREFILL_BUCKETS) if decode else PREFILL_BUCKETS
    return next((size for size in sizes if n <= size <= n_ubatch), n_ubatch)
