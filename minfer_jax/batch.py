"""Batches and how they are cut: what a caller hands over -> checked rows -> ubatches -> buckets.

Knows neither the model nor the memory: only numbers of rows, positions and sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from minfer_jax.errors import BatchError

DECODE_BUCKETS = (1, 4, 8, 16)
PREFILL_BUCKETS = (32, 128, 512)
OUT_BUCKETS = (1, 16)
"""Rows that reach the head, where not all do: the last ones of one or of several prompts."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows that continue one or several sequences, in any order of the sequences.

    A row is a token id or an embedding: `token` or `embd` (float32 [n, n_embd]), not both.
    `seq_id[i]` is the sequence of row i, or all sequences that share it (default: 0), `pos[i]` its
    position, which must be the next one of each of them (default: that), and `logits[i]` says
    whether its output is wanted (default: the last row's only).
    """

    token: Sequence[int] | None = None
    embd: np.ndarray | None = None
    pos: Sequence[int] | None = None
    seq_id: Sequence[int | Sequence[int]] | None = None
    logits: Sequence[bool] | None = None


@dataclass(frozen=True)
class CheckedBatch:
    """A batch without gaps in what it says."""

    token: np.ndarray
    """int32 [n]; zeros where the rows are embeddings."""
    embd: np.ndarray | None
    """float32 [n, n_embd]"""
    pos: np.ndarray
    """int32 [n]"""
    seqs: tuple[tuple[int, ...], ...]
    """The sequences of each row, ascending; rows attend to what the first of them holds."""
    wanted: np.ndarray
    """bool [n]"""

    def __len__(self) -> int:
        return len(self.pos)


@dataclass(frozen=True)
class Ubatch:
    """Rows of a batch that one call of one graph runs."""

    index: np.ndarray
    """Which rows of the batch: int32 [n], as `token`, `pos` and `seq_id`."""
    token: np.ndarray
    embd: np.ndarray | None
    pos: np.ndarray
    seqs: tuple[tuple[int, ...], ...]
    out: np.ndarray
    """Rows of the ubatch whose output is wanted, int32, ascending."""

    def __len__(self) -> int:
        return len(self.pos)

    @property
    def seq_id(self) -> np.ndarray:
        """The first sequence of each row."""
        return np.array([row[0] for row in self.seqs], np.int32)

    @property
    def one_row_each(self) -> bool:
        """Whether no sequence has more than one of these rows: a decode step."""
        if len(self.seqs) == 1:
            return True
        named = [seq for row in self.seqs for seq in row]
        return len(set(named)) == len(named)


def check_batch(
    batch: Batch,
    *,
    n_vocab: int,
    n_embd: int,
    n_past: Sequence[int] = (0,),
    n_batch: int | None = None,
    alike: Callable[[int, int], bool] | None = None,
) -> CheckedBatch:
    """Fill in what the batch leaves out; raises `BatchError` for a bad one.

    `n_past` is the next position of every sequence that there is. `alike` says of two sequences
    whether they hold the same, so that they can share a row; None: no two can. Numbers are checked
    as Python ints: an index that is out of range would clamp silently later.
    """
    if (batch.token is None) == (batch.embd is None):
        raise BatchError("a batch has either token ids or embeddings: give one of the two")
    embd = None if batch.embd is None else _checked_embd(batch.embd, n_embd)
    tokens = () if batch.token is None else batch.token
    n = len(tokens) if embd is None else len(embd)
    if n == 0:
        raise BatchError("the batch has no tokens")
    if n_batch is not None and n > n_batch:
        raise BatchError(f"the batch has {n} tokens; at most n_batch = {n_batch} go into one")
    for i, token in enumerate(tokens):
        _check_int(token, f"token {i} of the batch", n_vocab)
    seqs = _checked_seqs(_of_length(batch.seq_id, n, "sequence ids"), n, len(n_past))
    pos = _next_positions(seqs, _of_length(batch.pos, n, "positions"), n_past)
    _check_shared(seqs, alike)
    flags = _of_length(batch.logits, n, "logits flags")
    if flags is None:
        wanted = np.zeros(n, bool)
        wanted[-1] = True
    else:
        wanted = np.asarray(flags, bool)
    token = np.zeros(n, np.int32) if batch.token is None else np.asarray(batch.token, np.int32)
    return CheckedBatch(token, embd, np.asarray(pos, np.int32), seqs, wanted)


def _checked_embd(embd: object, n_embd: int) -> np.ndarray:
    try:
        with np.errstate(over="ignore"):  # what float32 cannot hold is refused below
            rows = np.array(embd, np.float32)
    except (TypeError, ValueError):
        raise BatchError(f"the embeddings are no array of numbers [n, {n_embd}]") from None
    if rows.ndim != 2 or rows.shape[1] != n_embd:
        raise BatchError(f"the embeddings have shape {list(rows.shape)}, expected [n, {n_embd}]")
    if not np.isfinite(rows).all():
        raise BatchError("the embeddings have a value that is not a finite number")
    return rows


def _checked_seqs(
    seq_id: Sequence[int | Sequence[int]] | None, n: int, n_seq: int
) -> tuple[tuple[int, ...], ...]:
    """The sequences of every row, ascending."""
    if seq_id is None:
        return ((0,),) * n
    rows = []
    for i, named in enumerate(seq_id):
        row = (named,) if not isinstance(named, Sequence | np.ndarray) else tuple(named)
        if not row:
            raise BatchError(f"token {i} of the batch belongs to no sequence")
        for seq in row:
            _check_int(seq, f"sequence id {i} of the batch", n_seq)
        if len(set(row)) < len(row):
            raise BatchError(f"token {i} of the batch names a sequence twice")
        rows.append(tuple(sorted(int(seq) for seq in row)))
    return tuple(rows)


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
    seqs: Sequence[Sequence[int]], given: Sequence[int] | None, n_past: Sequence[int]
) -> list[int]:
    """Every row's position: each sequence goes on where it ends, without gap or repetition."""
    following = list(n_past)
    pos = []
    for i, row in enumerate(seqs):
        expected = following[row[0]]
        for seq in row[1:]:
            if following[seq] != expected:
                raise BatchError(
                    f"token {i} of the batch is shared by sequence {row[0]}, which goes on at"
                    f" {expected}, and by sequence {seq}, which goes on at {following[seq]}"
                )
        if given is not None:
            at = given[i]
            if isinstance(at, bool) or not isinstance(at, int | np.integer):
                raise BatchError(f"position {i} of the batch is {at!r}, not an integer")
            if at != expected:
                fault = "leaves a gap" if at > expected else "is taken already"
                raise BatchError(
                    f"position {i} of the batch is {at}, which {fault}: sequence {row[0]} goes on"
                    f" at {expected}"
                )
        pos.append(expected)
        for seq in row:
            following[seq] += 1
    return pos


def _check_shared(seqs: Sequence[Sequence[int]], alike: Callable[[int, int], bool] | None) -> None:
    """Refuse rows of several sequences that do not hold the same before them."""
    newest: dict[int, int] = {}  # the row of this batch that a sequence ends with
    for i, row in enumerate(seqs):
        for seq in row[1:]:
            if alike is None:
                raise BatchError(
                    f"token {i} of the batch belongs to sequences {row[0]} and {seq}, which keep"
                    " their cells apart: use kv_unified"
                )
            ends = newest.get(row[0]), newest.get(seq)
            if ends[0] != ends[1] or (ends[0] is None and not alike(row[0], seq)):
                raise BatchError(
                    f"token {i} of the batch belongs to sequences {row[0]} and {seq}, which do not"
                    " hold the same before it"
                )
        newest.update(dict.fromkeys(row, i))


def split_simple(batch: CheckedBatch, n_ubatch: int) -> list[Ubatch]:
    """Consecutive ubatches of at most `n_ubatch` rows, of any sequences."""
    n = len(batch)
    return [_cut(batch, np.arange(i, min(i + n_ubatch, n))) for i in range(0, n, n_ubatch)]


def split_seq(batch: CheckedBatch, n_ubatch: int) -> list[Ubatch]:
    """Ubatches of at most `n_ubatch` rows of the same sequences each."""
    ubatches = []
    left = list(range(len(batch)))
    while left:
        rows = next(iter(_leading(batch, left).values()))[:n_ubatch]
        ubatches.append(_cut(batch, np.array(rows)))
        done = set(rows)
        left = [i for i in left if i not in done]
    return ubatches


def split_equal(batch: CheckedBatch, n_ubatch: int) -> list[Ubatch]:
    """Ubatches in which every sequence has as many rows as any other: what states can be fed.

    Either they are of one sequence, as `split_seq` cuts them, or every sequence has one row.
    """
    ubatches = []
    left = list(range(len(batch)))
    while left:
        leading = list(_leading(batch, left).values())
        several = [rows for rows in leading if len(rows) > 1]
        rows = several[0] if several else [row for (row,) in leading]
        rows = rows[:n_ubatch]
        ubatches.append(_cut(batch, np.array(rows)))
        done = set(rows)
        left = [i for i in left if i not in done]
    return ubatches


def _leading(batch: CheckedBatch, left: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
    """Of the rows `left`, those that none of another set of sequences has to come before, by set.

    A row that several sequences share comes before and after rows of each of them.
    """
    leading: dict[tuple[int, ...], list[int]] = {}
    ended: set[int] = set()
    for i in left:
        row = batch.seqs[i]
        if row in leading and not ended.intersection(row):
            leading[row].append(i)
            continue
        if not ended.intersection(row) and not any(
            set(row).intersection(other) for other in leading
        ):
            leading[row] = [i]
            continue
        ended.update(row)
    return leading


def _cut(batch: CheckedBatch, index: np.ndarray) -> Ubatch:
    """The rows `index` of a batch."""
    return Ubatch(
        index.astype(np.int32),
        batch.token[index],
        None if batch.embd is None else batch.embd[index],
        batch.pos[index],
        tuple(batch.seqs[i] for i in index.tolist()),
        np.flatnonzero(batch.wanted[index]).astype(np.int32),
    )


def describe(ubatches: Sequence[Ubatch]) -> str:
    """One line a ubatch: its rows, and the sequences and positions that they are of."""
    lines = []
    for i, ubatch in enumerate(ubatches):
        spans: dict[tuple[int, ...], list[int]] = {}
        for row, pos in zip(ubatch.seqs, ubatch.pos.tolist(), strict=True):
            spans.setdefault(row, []).append(pos)
        parts = [f"{'+'.join(map(str, row))}:{min(pos)}..{max(pos)}" for row, pos in spans.items()]
        lines.append(
            f"ubatch {i}: {len(ubatch)} rows, {len(ubatch.out)} outputs, sequence:positions"
            f" {' '.join(parts)}"
        )
    return "\n".join(lines)


def bucket(n: int, n_ubatch: int, *, decode: bool) -> int:
    """Rows of the graph that runs `n` rows: the smallest bucket that holds them, or `n_ubatch`.

    `decode` says that no sequence has more than one of them.
    """
    if n == 1:
        return 1
    sizes = (*DECODE_BUCKETS, *PREFILL_BUCKETS) if decode else PREFILL_BUCKETS
    return next((size for size in sizes if n <= size <= n_ubatch), n_ubatch)


def encode_bucket(n: int, n_ubatch: int) -> int:
    """The same for rows that all have to be in one ubatch: powers of two, from 32 on."""
    return min(max(32, 1 << (n - 1).bit_length()), n_ubatch)


def out_bucket(n: int, n_tokens: int) -> int:
    """Rows that reach the head of a graph of `n_tokens` rows, of which `n` outputs are wanted."""
    return next((size for size in OUT_BUCKETS if n <= size < n_tokens), n_tokens)
