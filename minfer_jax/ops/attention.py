"""Attention of a few rows over a KV region, in two forms that agree.

A region is [n_head_kv, n_cells, d]: one head's keys lie together, so a block of cells is a
contiguous read. Each row sees one run of cells, `first[i] <= cell <= last[i]`; both ends are
data. A padding row has last < first, sees nothing, and its output is finite and unread.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from minfer_jax.ops.activation import softcap

BLOCK = 256
"""Cells per step of the blocked form; regions are rounded up to it."""

# Typed constants: a plain number would be traced as int64 or float64 where x64 is enabled.
_BLOCK = np.int32(BLOCK)
_NO_CELL = np.int32(-1)
_ZERO = np.float32(0.0)
_FIRST = np.int32(0)
# Scores of cells outside a row's run. Finite, so that a row that sees nothing stays finite.
_HIDDEN = np.float32(-1e30)


def attend_blocked(
    q: Array,
    k: Array,
    v: Array,
    first: Array,
    last: Array,
    head: Array | np.int32 = _FIRST,
    *,
    n_kv: int | None = None,
    scale: float,
    cap: float = 0.0,
    precision: lax.Precision = lax.Precision.DEFAULT,
) -> Array:
    """Online softmax over the blocks of cells that some row sees (Dao et al. 2022, algorithm 1).

    q [n, h, d] float32, k [all heads, c, d], v [all heads, c, d_v] in any float type, first and
    last int32 [n]; returns float32 [n, h, d_v]. Of the heads only `n_kv` (all of them unless given)
    from `head` on are read, which is data. So is the trip count: the cost follows the cells in
    use, not the region. No reverse-mode gradient: `attend_masked` has one.
    """
    n, n_head, d = q.shape
    n_kv, d_v = n_kv or v.shape[0], v.shape[2]
    heads = jnp.transpose(q.reshape(n, n_kv, n_head // n_kv, d), (1, 0, 2, 3)) * scale  # h n g d
    lowest, highest = _extent(k, first, last)
    begin, end = lowest // _BLOCK, (highest + _BLOCK) // _BLOCK

    def step(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        i, best, total, acc = carry
        zero = jnp.zeros_like(i)
        k_i = lax.dynamic_slice(k, (head, i * _BLOCK, zero), (n_kv, BLOCK, d))
        v_i = lax.dynamic_slice(v, (head, i * _BLOCK, zero), (n_kv, BLOCK, d_v))
        seen = _seen(first, last, i * _BLOCK + jnp.arange(BLOCK, dtype=jnp.int32))
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
    k: Array,
    v: Array,
    first: Array,
    last: Array,
    head: Array | np.int32 = _FIRST,
    *,
    n_kv: int | None = None,
    scale: float,
    cap: float = 0.0,
    precision: lax.Precision = lax.Precision.DEFAULT,
) -> Array:
    """The same over the whole region under a mask: memory [n, h, c], and differentiable."""
    n, n_head, d = q.shape
    n_kv, d_v = n_kv or v.shape[0], v.shape[2]
    k, v = (lax.dynamic_slice_in_dim(x, head, n_kv) for x in (k, v))
    heads = jnp.transpose(q.reshape(n, n_kv, n_head // n_kv, d), (1, 0, 2, 3)) * scale
    seen = _seen(first, last, jnp.arange(k.shape[1], dtype=jnp.int32))
    scores = _scores(heads, k, seen, cap, precision)
    p = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    p = p / jnp.sum(p, axis=-1, keepdims=True)
    out = jnp.einsum("hngc,hcd->hngd", p, _live(v, seen), precision=precision)
    return jnp.transpose(out, (1, 0, 2, 3)).reshape(n, n_head, d_v)


def _seen(first: Array, last: Array, cell: Array) -> Array:
    """Which rows see which of the cells `cell` [c]: bool [n, c]."""
    return (cell[None, :] >= first[:, None]) & (cell[None, :] <= last[:, None])


def _scores(heads: Array, k: Array, seen: Array, cap: float, precision: lax.Precision) -> Array:
    """Scores [h_kv, n, g, c] of heads [h_kv, n, g, d] on the cells of k [h_kv, c, d]."""
    scores = jnp.einsum("hngd,hcd->hngc", heads, k.astype(jnp.float32), precision=precision)
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
