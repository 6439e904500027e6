"""Attention of a few rows over a KV region, in two forms that agree, and of rows to each other.

A region is [n_head_kv, n_cells, d]: one head's keys lie together, so a block of cells is a
contiguous read. Each row sees one run of cells, `first[i] <= cell <= last[i]`, or of those the
ones that a map says are of its sequence; all of it is data. A padding row has last < first, sees
nothing, and its output is finite and unread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from minfer_jax.ops.activation import softcap
from minfer_jax.ops.kv_types import KV_TYPES

BLOCK = 256
"""Cells per step of the blocked form; regions are rounded up to it."""

# Typed constants: a plain number would be traced as int64 or float64 where x64 is enabled.
_BLOCK = np.int32(BLOCK)
_NO_CELL = np.int32(-1)
_ZERO = np.float32(0.0)
_FIRST = np.int32(0)
# Scores of cells outside a row's run. Finite, so that a row that sees nothing stays finite.
_HIDDEN = np.float32(-1e30)
# Query rows at a time where nothing is cached: the scores of 8192 rows at once would be gigabytes.
_ROWS = 512


class Mapped(NamedTuple):
    """Rows whose cells are no run: each sees those of its sequence up to its own position."""

    pos: Array
    """int32 [n], as `seq`"""
    seq: Array
    cells: Array
    """int32 [1 + words, n_cells]: positions (-1: empty), then bit masks of 32 sequences each."""


def attend_blocked(
    q: Array,
    k: Sequence[Array],
    v: Sequence[Array],
    first: Array,
    last: Array,
    head: Array | np.int32 = _FIRST,
    mapped: Mapped | None = None,
    *,
    n_kv: int,
    d_v: int,
    scale: float,
    types: tuple[str, str] = ("f32", "f32"),
    window: int = 0,
    cap: float = 0.0,
    precision: lax.Precision = lax.Precision.DEFAULT,
) -> Array:
    """Online softmax over the blocks of cells that some row sees (Dao et al. 2022, algorithm 1).

    q [n, h, d] float32, k and v the arrays of regions of `types` (no v: a value is the first d_v of
    its key), first and last int32 [n]; returns float32 [n, h, d_v]. Of the heads only `n_kv` from
    `head` on are read, which is data. So is the trip count: the cost follows the cells in use, not
    the region. `window` is for mapped rows: positions that a row sees, or 0 for all. No
    reverse-mode gradient: `attend_masked` has one.
    """
    n, n_head, d = q.shape
    heads = jnp.transpose(q.reshape(n, n_kv, n_head // n_kv, d), (1, 0, 2, 3)) * scale  # h n g d
    lowest, highest = _extent(k[0], first, last)
    begin, end = lowest // _BLOCK, (highest + _BLOCK) // _BLOCK

    def block(arrays: Sequence[Array], kind: str, start: Array) -> Array:
        zero = jnp.zeros_like(start)
        parts = [
            lax.dynamic_slice(a, (head, start, zero), (n_kv, BLOCK, a.shape[2])) for a in arrays
        ]
        return KV_TYPES[kind].decode(parts)

    def step(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        i, best, total, acc = carry
        start = i * _BLOCK
        k_i = block(k, types[0], start)
        v_i = block(v, types[1], start) if v else k_i[..., :d_v]
        cells = None if mapped is None else _cells_at(mapped.cells, start)
        seen = _seen(first, last, start + jnp.arange(BLOCK, dtype=jnp.int32), mapped, cells, window)
        scores = _scores(heads, k_i, seen, cap, precision)
        new_best = jnp.maximum(best, jnp.max(scores, axis=-1))
        p = jnp.exp(scores - new_best[..., None])
        decay = jnp.exp(best - new_best)
        pv = jnp.einsum("hngc,hcd->hngd", p, _live(v_i, seen), precision=precision)
        return i + 1, new_best, total * decay + jnp.sum(p, -1), acc * decay[..., None] + pv

    shape = heads.shape[:-1]
    f32 = jnp.float32
    start = (
        begin,
        jnp.full(shape, _HIDDEN, f32),
        jnp.zeros(shape, f32),
        jnp.zeros((*shape, d_v), f32),
    )
    _, _, total, acc = lax.while_loop(lambda carry: carry[0] < end, step, start)
    out = acc / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    return jnp.transpose(out, (1, 0, 2, 3)).reshape(n, n_head, d_v)


def attend_masked(
    q: Array,
    k: Sequence[Array],
    v: Sequence[Array],
    first: Array,
    last: Array,
    head: Array | np.int32 = _FIRST,
    mapped: Mapped | None = None,
    *,
    n_kv: int,
    d_v: int,
    scale: float,
    types: tuple[str, str] = ("f32", "f32"),
    window: int = 0,
    cap: float = 0.0,
    precision: lax.Precision = lax.Precision.DEFAULT,
) -> Array:
    """The same over the whole region under a mask: memory [n, h, c], and differentiable."""
    n, n_head, d = q.shape

    def region(arrays: Sequence[Array], kind: str) -> Array:
        return KV_TYPES[kind].decode([lax.dynamic_slice_in_dim(a, head, n_kv) for a in arrays])

    keys = region(k, types[0])
    values = region(v, types[1]) if v else keys[..., :d_v]
    heads = jnp.transpose(q.reshape(n, n_kv, n_head // n_kv, d), (1, 0, 2, 3)) * scale
    cell = jnp.arange(keys.shape[1], dtype=jnp.int32)
    seen = _seen(first, last, cell, mapped, None if mapped is None else mapped.cells, window)
    scores = _scores(heads, keys, seen, cap, precision)
    p = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    p = p / jnp.sum(p, axis=-1, keepdims=True)
    out = jnp.einsum("hngc,hcd->hngd", p, _live(values, seen), precision=precision)
    return jnp.transpose(out, (1, 0, 2, 3)).reshape(n, n_head, d_v)


def _cells_at(cells: Array, start: Array) -> Array:
    """The block of cells [1 + words, BLOCK] that begins at `start`."""
    return lax.dynamic_slice(cells, (jnp.zeros_like(start), start), (cells.shape[0], BLOCK))


def _seen(
    first: Array,
    last: Array,
    cell: Array,
    mapped: Mapped | None,
    cells: Array | None,
    window: int,
) -> Array:
    """Which rows see which of the cells `cell` [c]: bool [n, c]. `cells` is the map of these."""
    seen = (cell[None, :] >= first[:, None]) & (cell[None, :] <= last[:, None])
    if mapped is None or cells is None:
        return seen
    pos, held_at = mapped.pos[:, None], cells[0][None, :]
    seen = seen & (held_at <= pos)
    if window:
        seen = seen & (held_at > pos - np.int32(window))
    masks = cells[1:] if len(cells) == 2 else cells[1:][mapped.seq // np.int32(32)]
    bit = jnp.maximum(mapped.seq, np.int32(0)) % np.int32(32)
    return seen & ((lax.shift_right_logical(*jnp.broadcast_arrays(masks, bit[:, None])) & 1) == 1)


def _scores(heads: Array, k: Array, seen: Array, cap: float, precision: lax.Precision) -> Array:
    """Scores [h_kv, n, g, c] of heads [h_kv, n, g, d] on the cells of k [h_kv, c, d]."""
    scores = jnp.einsum("hngd,hcd->hngc", heads, k, precision=precision)
    return jnp.where(seen[None, :, None, :], softcap(scores, cap), _HIDDEN)


def _extent(k: Array, first: Array, last: Array) -> tuple[Array, Array]:
    """The lowest and the highest cell that any row sees."""
    used = last >= first
    lowest = jnp.min(jnp.where(used, first, np.int32(k.shape[1])))
    return lowest, jnp.max(jnp.where(used, last, _NO_CELL))


def _live(v: Array, seen: Array) -> Array:
    """Values [h_kv, c, d] as float32, zero in cells that no row sees.

    Such cells hold whatever was there before, perhaps an infinity, and 0 * inf is not 0.
    """
    live = jnp.any(seen, axis=0)
    return jnp.where(live[None, :, None], v.astype(jnp.float32), _ZERO)


def alibi_slopes(n_head: int, max_bias: float) -> tuple[float, ...]:
    """What each head's scores lose by a token of distance (Press et al. 2022, section 3).

    A geometric sequence down to 2^-max_bias; heads past the largest power of two take every other
    step of one that is twice as fine.
    """
    even = 1 << (n_head.bit_length() - 1)
    steps = [2 * (h + 1) for h in range(even)] + [2 * h + 1 for h in range(n_head - even)]
    return tuple(2.0 ** (-max_bias * step / (2 * even)) for step in steps)


def attend_rows(
    q: Array,
    k: Array,
    v: Array,
    pos: Array,
    seq: Array,
    real: Array,
    *,
    scale: float,
    alibi: Sequence[float] | None = None,
    causal: bool,
    precision: lax.Precision = lax.Precision.DEFAULT,
) -> Array:
    """Attention of rows to the rows of the same sequence, without a region: float32 [n, h, d_v].

    q [n, h, d], k [n, h_kv, d], v [n, h_kv, d_v] float32, pos and seq int32 [n], real bool [n]:
    False for padding, which nobody sees. `alibi` has a slope per head; with `causal` a row sees no
    later position. A row that sees nothing gets something finite. Memory: [h, 512, n].
    """
    n, n_head, d = q.shape
    n_kv, d_v = v.shape[1:]
    group = n_head // n_kv
    slopes = None if alibi is None else np.asarray(alibi, np.float32).reshape(n_kv, 1, group, 1)
    keys = jnp.swapaxes(k, 0, 1)
    values = _live(jnp.swapaxes(v, 0, 1), real[None, :])

    def some(q: Array, q_pos: Array, q_seq: Array) -> Array:
        heads = jnp.transpose(q.reshape(-1, n_kv, group, d), (1, 0, 2, 3)) * scale  # h n g d
        seen = (q_seq[:, None] == seq[None, :]) & real[None, :]
        distance = q_pos[:, None] - pos[None, :]
        if causal:
            seen = seen & (distance >= _FIRST)
        scores = jnp.einsum("hngd,hcd->hngc", heads, keys, precision=precision)
        if slopes is not None:
            scores = scores - slopes * jnp.abs(distance).astype(jnp.float32)[None, :, None, :]
        p = jax.nn.softmax(jnp.where(seen[None, :, None, :], scores, _HIDDEN), axis=-1)
        out = jnp.einsum("hngc,hcd->hngd", p, values, precision=precision)
        return jnp.transpose(out, (1, 0, 2, 3)).reshape(-1, n_head, d_v)

    if n <= _ROWS:
        return some(q, pos, seq)
    n_blocks = -(-n // _ROWS)
    fill = n_blocks * _ROWS - n

    def cut(x: Array) -> Array:
        ends = ((0, fill, 0), *((0, 0, 0),) * (x.ndim - 1))
        return lax.pad(x, np.zeros((), x.dtype), ends).reshape(n_blocks, _ROWS, *x.shape[1:])

    blocks = lax.map(lambda rows: some(*rows), (cut(q), cut(pos), cut(seq)))
    return blocks.reshape(-1, n_head, d_v)[:n]
