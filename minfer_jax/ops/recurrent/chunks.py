"""Sequences cut into chunks, and the matrices within a chunk that linear attention is made of.

Within a chunk a recurrence is written as products of matrices, so that only the chunks follow one
another. Decays are handled as logarithms.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_SAFE_EXPONENT = 60.0  # exp of it, and of twice its negative, are numbers that float32 can hold
_SUBSTITUTED = 16  # rows of an inverse that are made one after another


def matmul(x: Array, y: Array) -> Array:
    """x [..., a, b] times y [..., b, c], in full float32 on every device: a state keeps whatever
    error it is given."""
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


def dot(x: Array, y: Array) -> Array:
    """[..., d] and [..., d] -> [..., 1]. As a product, because XLA on the CPU may sum along the
    last of many axes value by value, 30 times slower."""
    return matmul(x[..., None, :], y[..., None])[..., 0]


def transpose(x: Array) -> Array:
    """[..., a, b] -> [..., b, a]."""
    return jnp.swapaxes(x, -1, -2)


def split(x: Array, size: int) -> Array:
    """[s, t, h, ...] -> [chunks, s, h, size, ...]; zeros fill up the last chunk."""
    s, t, *rest = x.shape
    n = -(-t // size)
    fill = [(0, 0, 0), (0, n * size - t, 0), *((0, 0, 0) for _ in rest)]
    x = lax.pad(x, np.float32(0.0), fill)
    x = x.reshape(s, n, size, *rest)
    return x.transpose(1, 0, 3, 2, *range(4, x.ndim))


def join(x: Array, t: int) -> Array:
    """[chunks, s, h, size, d] -> [s, t, h, d]: undoes `split`."""
    n, s, h, size, d = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(s, n * size, h, d)[:, :t]


def leaf_size(log_decay_min: float, size: int) -> int:
    """How many rows, a power of two up to `size`, can be decayed without any underflow if no
    row's decay is below exp(`log_decay_min`)."""
    rows = 1
    while 2 * rows <= size and 2 * rows * -log_decay_min <= _SAFE_EXPONENT:
        rows *= 2
    return rows


def lower(x: Array, diagonal: int = 0) -> Array:
    """x [..., c, c] with zeros above the diagonal; with `diagonal` -1, on it too."""
    kept = _matrix(np.tri(x.shape[-1], k=diagonal, dtype=bool), x.ndim)
    return jnp.where(kept, x, np.float32(0.0))


def with_diagonal(x: Array, diagonal: Array) -> Array:
    """x [..., c, c] with the values of `diagonal` [..., c, 1] on its diagonal."""
    return jnp.where(_matrix(np.eye(x.shape[-1], dtype=bool), x.ndim), diagonal, x)


class Decayed(NamedTuple):
    """How the rows of a chunk see one another and its ends, through their decays."""

    scores: Array
    """[..., m, n, c, c]: each of m rows t with each of n earlier rows, decayed in between."""
    before: Array
    """Sum of the log decays of the rows before each row: [..., c, d]."""
    behind: Array
    """The same of the rows behind it."""


def decayed_scores(p: Array, q: Array, log_w: Array, leaf: int = 1) -> Decayed:
    """sum_i p[t, i] q[r, i] exp(sum of log_w[u, i] over r < u < t) for r < t, else 0.

    p [..., m, c, d] and q [..., n, c, d] are m and n sets of the rows of a chunk, `log_w`
    [..., c, d] (not above 0) the log decays of the rows; c is a power of two.

    Blocks are joined in pairs. The rows of the second meet those of the first at the boundary, so
    that a decay is a product of two, each at most 1, and each the exp of a sum and never of a
    difference, in which strong decays would swamp weak ones. Only within blocks of `leaf` rows
    (see `leaf_size`) is one decay divided by another.
    """
    *outer, c, d = log_w.shape
    blocks = log_w.reshape(*outer, c // leaf, leaf, d)
    before, behind = _sums_around(blocks)
    total = before[..., -1:, :] + blocks[..., -1:, :]
    scores = _leaf_scores(p, q, before, before + blocks)
    while leaf < c:
        leaf *= 2
        (first, second), (sum_first, sum_second) = _pairs(before), _pairs(total)
        first_behind, second_behind = _pairs(behind)
        late = _pairs(p.reshape(*p.shape[:-2], *before.shape[-3:]))[1]
        early = _pairs(q.reshape(*q.shape[:-2], *before.shape[-3:]))[0]
        across = _products(
            late * jnp.exp(second)[..., None, :, :, :],
            early * jnp.exp(first_behind)[..., None, :, :, :],
        )
        scores = _join(scores, across)
        before = jnp.concatenate([first, sum_first + second], axis=-2)
        behind = jnp.concatenate([first_behind + sum_second, second_behind], axis=-2)
        total = sum_first + sum_second
    return Decayed(scores[..., 0, :, :], before[..., 0, :, :], behind[..., 0, :, :])


def unit_lower_inverse(x: Array) -> Array:
    """(I - x)^-1 of x [..., c, c], whose values on and above the diagonal are 0; c is a power of
    two.

    By substitution in blocks on the diagonal, which are then joined in pairs. Sums of powers of x
    would be the same in theory; but powers can be large where their sum is small.
    """
    c = x.shape[-1]
    b = min(c, _SUBSTITUTED)
    inverse = _substitute(_diagonal(x, b))
    while b < c:
        first, second = _pairs(inverse)
        below = _diagonal(x, 2 * b)[..., b:, :b]
        inverse = _join(inverse, matmul(matmul(second, below), first))
        b *= 2
    return inverse[..., 0, :, :]


def _leaf_scores(p: Array, q: Array, before: Array, after: Array) -> Array:
    """The scores within blocks [..., blocks, leaf, d]: [..., m, n, blocks, leaf, leaf]."""
    *outer, n_blocks, leaf, _ = before.shape
    m, n = p.shape[-3], q.shape[-3]
    if leaf == 1:  # no row is earlier than itself
        return jnp.zeros((*outer, m, n, n_blocks, 1, 1), p.dtype)
    scores = _products(
        p.reshape(*p.shape[:-2], *before.shape[-3:]) * jnp.exp(before)[..., None, :, :, :],
        q.reshape(*q.shape[:-2], *before.shape[-3:]) * jnp.exp(-after)[..., None, :, :, :],
    )
    return lower(scores, -1)


def _products(p: Array, q: Array) -> Array:
    """Rows of p [..., m, blocks, b, d] times rows of q [..., n, blocks, b, d], block by block:
    [..., m, n, blocks, b, b]. All sets are multiplied as one matrix."""
    *outer, m, blocks, b, d = p.shape
    n = q.shape[-4]
    rows = jnp.moveaxis(p, -4, -3).reshape(*outer, blocks, m * b, d)
    columns = jnp.moveaxis(q, -4, -3).reshape(*outer, blocks, n * b, d)
    scores = matmul(rows, transpose(columns)).reshape(*outer, blocks, m, b, n, b)
    o = len(outer)
    return scores.transpose(*range(o), o + 1, o + 3, o, o + 2, o + 4)


def _sums_around(blocks: Array) -> tuple[Array, Array]:
    """For each row of [..., rows, d] the sums of the rows before and of those behind it."""
    axis = blocks.ndim - 2
    outer, last = [(0, 0, 0)] * axis, (0, 0, 0)
    earlier = lax.pad(blocks, np.float32(0.0), [*outer, (1, -1, 0), last])
    later = lax.pad(blocks, np.float32(0.0), [*outer, (-1, 1, 0), last])
    return lax.cumsum(earlier, axis), lax.cumsum(later, axis, reverse=True)


def _pairs(blocks: Array) -> tuple[Array, Array]:
    """Blocks [..., 2 * k, a, b]: the first and the second of each pair, [..., k, a, b]."""
    *outer, n, a, b = blocks.shape
    pairs = blocks.reshape(*outer, n // 2, 2, a, b)
    return pairs[..., 0, :, :], pairs[..., 1, :, :]


def _join(blocks: Array, across: Array) -> Array:
    """Blocks [..., 2 * k, b, b] in pairs, each pair with the block of `across` [..., k, b, b] that
    stands below the first and left of the second: [..., k, 2 * b, 2 * b]."""
    first, second = _pairs(blocks)
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([across, second], axis=-1)], axis=-2)


def _diagonal(x: Array, b: int) -> Array:
    """The blocks on the diagonal of x [..., c, c]: [..., c / b, b, b]."""
    starts = range(0, x.shape[-1], b)
    return jnp.stack([x[..., i : i + b, i : i + b] for i in starts], axis=-3)


def _substitute(x: Array) -> Array:
    """(I - x)^-1 row by row: row t is that of I plus x[t] times the rows before it."""
    b = x.shape[-1]

    def step(rows: Array, t: Array) -> tuple[Array, None]:
        earlier = matmul(lax.dynamic_slice_in_dim(x, t, 1, axis=-2), rows)
        row = lax.dynamic_slice_in_dim(rows, t, 1, axis=-2) + earlier
        return lax.dynamic_update_slice_in_dim(rows, row, t, axis=-2), None

    unit = jnp.broadcast_to(np.eye(b, dtype=np.float32), x.shape)
    return lax.scan(step, unit, jnp.asarray(np.arange(1, b, dtype=np.int32)))[0]


def _matrix(x: np.ndarray, ndim: int) -> np.ndarray:
    """x [c, c] with as many axes before it as make `ndim`."""
    return x.reshape((1,) * (ndim - 2) + x.shape)
