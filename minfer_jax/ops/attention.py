"""Attention of a few rows over a KV region, in two forms that agree.

A region is [n_head_kv, n_cells, d]: one head's keys lie together, so a block of cells is a
contiguous read. Each row sees one run of cells, `first[i] <= cell <= last[i]`; both ends are
data. A padding row has last < first, sees nothing, and its output is finite and unread.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from minfer_jax.ops.activation import softcap

BLOCK = 256
"""Cells per step of the blocked form; regions are rounded up to it."""

# Scores of cells outside a row's run. Finite, so that a row that sees nothing stays finite.
_HIDDEN = -1e30


def attend_blocked(
    q: Array,
    k: Array,
    v: Array,
    first: Array,
    last: Array,
    *,
    scale: float,
    cap: float = 0.0,
    precision: lax.Precision = lax.Precision.DEFAULT,
) -> Array:
    """Online softmax over the blocks of cells that some row sees (Dao et al. 2022, algorithm 1).

    q [n, h, d] float32, k [h_kv, c, d], v [h_kv, c, d_v] in any float type, first and last int32
    [n]; returns float32 [n, h, d_v]. The trip count is data: the cost follows the cells in use,
    not the region. No reverse-mode gradient: `attend_masked` has one.
    """
    n, n_head, d = q.shape
    n_kv, _, d_v = v.shape
    heads = jnp.transpose(q.reshape(n, n_kv, n_head // n_kv, d), (1, 0, 2, 3)) * scale  # h n g d
    used = last >= first
    lowest = jnp.min(jnp.where(used, first, k.shape[1]))
    highest = jnp.max(jnp.where(used, last, -1))
    begin, end = lowest // BLOCK, (highest + BLOCK) // BLOCK

    def step(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        i, best, total, acc = carry
        zero = jnp.zeros_like(i)
        k_i = lax.dynamic_slice(k, (zero, i * BLOCK, zero), (n_kv, BLOCK, d))
        v_i = lax.dynamic_slice(v, (zero, i * BLOCK, zero), (n_kv, BLOCK, d_v))
        scores = _scores(heads, k_i, first, last, i * BLOCK, cap, precision)
        new_best = jnp.maximum(best, jnp.max(scores, axis=-1))
        p = jnp.exp(scores - new_best[..., None])
        decay = jnp.exp(best - new_best)
        pv = jnp.einsum(
            "hngc,hcd->hngd", p, _live(v_i, lowest, highest, i * BLOCK), precision=precision
        )
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
    *,
    scale: float,
    cap: float = 0.0,
    precision: lax.Precision = lax.Precision.DEFAULT,
) -> Array:
    """The same over the whole region under a mask: memory [n, h, c], and differentiable."""
    n, n_head, d = q.shape
    n_kv, _, d_v = v.shape
    heads = jnp.transpose(q.reshape(n, n_kv, n_head // n_kv, d), (1, 0, 2, 3)) * scale
    scores = _scores(heads, k, first, last, jnp.int32(0), cap, precision)
    p = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    p = p / jnp.sum(p, axis=-1, keepdims=True)
    used = last >= first
    lowest = jnp.min(jnp.where(used, first, k.shape[1]))
    highest = jnp.max(jnp.where(used, last, -1))
    v = _live(v, lowest, highest, jnp.int32(0))
    out = jnp.einsum("hngc,hcd->hngd", p, v, precision=precision)
    return jnp.transpose(out, (1, 0, 2, 3)).reshape(n, n_head, d_v)


def _scores(
    heads: Array,
    k: Array,
    first: Array,
    last: Array,
    offset: Array,
    cap: float,
    precision: lax.Precision,
) -> Array:
    """Scores [h_kv, n, g, c] of heads [h_kv, n, g, d] on cells from `offset` on."""
    scores = jnp.einsum("hngd,hcd->hngc", heads, k.astype(jnp.float32), precision=precision)
    cell = offset + jnp.arange(k.shape[1], dtype=jnp.int32)
    seen = (cell[None, :] >= first[:, None]) & (cell[None, :] <= last[:, None])  # [n, c]
    return jnp.where(seen[None, :, None, :], softcap(scores, cap), _HIDDEN)


def _live(v: Array, lowest: Array, highest: Array, offset: Array) -> Array:
    """Values [h_kv, c, d] as float32, zero in cells that no row sees.

    Such cells hold whatever was there before, perhaps an infinity, and 0 * inf is not 0.
    """
    cell = offset + jnp.arange(v.shape[1], dtype=jnp.int32)
    live = (cell >= lowest) & (cell <= highest)
    return jnp.where(live[None, :, None], v.astype(jnp.float32), 0.0)
