"""Maxima, sums and places of long traced rows, in forms that cost little on a CPU as well.

XLA's CPU code is fast where it vectorizes, and neither an `argmax` nor a selection does: so
neighbours form blocks, and only the blocks that matter are looked at one by one.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_BLOCK = 32  # neighbours that are represented by their maximum
_LANES = 16
_SUMS = 512  # neighbours that are represented by their sum

ZERO, INF = np.float32(0.0), np.float32(np.inf)


def has_nan(values: Array) -> Array:
    """Whether a row has a NaN: [n, m] -> [n, 1]. The maximum does not tell: XLA's may lose it."""
    return jnp.any(jnp.isnan(values), axis=1, keepdims=True)


def first_highest(values: Array) -> tuple[Array, Array]:
    """The maximum of each row without a NaN, and its first place: [n, m] -> [n, 1] each."""
    blocks = _blocks(values, _BLOCK, -INF)
    maxima = _maxima(blocks)
    top = jnp.max(maxima, axis=1, keepdims=True)
    block = _first(maxima == top)
    inside = _first(_block(blocks, block) == top)
    return top, block * np.int32(_BLOCK) + inside


def highest(values: Array, k: int) -> tuple[Array, Array]:
    """The k <= m highest of each row and their places, the first one first among equals: [n, k].

    The k best lie in the k blocks with the best maxima, the first ones among equals. The row has no
    negative zeros: a selection takes them for less than zero.
    """
    blocks = _blocks(values, _BLOCK, -INF)
    if blocks.shape[1] < 4 * k:
        values, place = lax.top_k(values, k)
        return values, place.astype(jnp.int32)
    _, best = lax.top_k(_maxima(blocks), k)
    best = jnp.sort(best.astype(jnp.int32), axis=1)  # places must ascend among equals below
    few = jnp.take_along_axis(blocks, best[:, :, None], 1, mode="clip")
    values, place = lax.top_k(few.reshape(few.shape[0], -1), k)
    place = place.astype(jnp.int32)
    block = jnp.take_along_axis(best, place // np.int32(_BLOCK), 1, mode="clip")
    return values, block * np.int32(_BLOCK) + place % np.int32(_BLOCK)


def row_sum(values: Array) -> Array:
    """[n, m] -> [n, 1], in two stages: that is faster than one, and rounds less."""
    return _blocks(values, _SUMS, ZERO).sum(axis=2).sum(axis=1, keepdims=True)


def inverted(weights: Array, u: Array) -> Array:
    """The first place where the cumulative weight exceeds the part `u` [n, 1] of a row's sum.

    `weights` [n, m], at least 0, and `u` in [0, 1) -> places [n, 1]. The weight there is not 0,
    unless the whole row's is.
    """
    if weights.shape[1] <= 2 * _SUMS:
        return _crossing(weights, u * row_sum(weights))[0]
    blocks = _blocks(weights, _SUMS, ZERO)
    sums = blocks.sum(axis=2)
    goal = u * sums.sum(axis=1, keepdims=True)
    block, before = _crossing(sums, goal)
    inside, _ = _crossing(_block(blocks, block), goal - before)
    return block * np.int32(_SUMS) + inside


def places(values: Array) -> Array:
    """The place of each value in its row: int32 [n, m]."""
    return lax.broadcasted_iota(jnp.int32, values.shape, 1)


def _crossing(weights: Array, goal: Array) -> tuple[Array, Array]:
    """The first place whose cumulative weight exceeds `goal` [n, 1], and the weight before it."""
    mass = jnp.cumsum(weights, axis=1)
    # Rounded, a cumulative sum may move where nothing is added: look at places with weight only.
    place, some = places(weights), weights > ZERO
    over = jnp.where((mass > goal) & some, place, np.int32(weights.shape[1]))
    last = jnp.max(jnp.where(some, place, np.int32(0)), axis=1, keepdims=True)
    first = jnp.minimum(jnp.min(over, axis=1, keepdims=True), last)
    before = jnp.take_along_axis(
        mass, jnp.maximum(first - np.int32(1), np.int32(0)), 1, mode="clip"
    )
    return first, jnp.where(first > np.int32(0), before, ZERO)


def _first(mask: Array) -> Array:
    """The first place that is true, or 0: [n, m] -> [n, 1]."""
    return lax.argmax(mask, 1, np.int32)[:, None]


def _maxima(blocks: Array) -> Array:
    """[n, blocks, _BLOCK] -> [n, blocks]. Its first half, over whole vectors, is the fast one."""
    n, count, size = blocks.shape
    return jnp.max(jnp.max(blocks.reshape(n, count, size // _LANES, _LANES), axis=2), axis=2)


def _block(blocks: Array, at: Array) -> Array:
    """One block of each row: [n, blocks, size] at [n, 1] -> [n, size]."""
    return jnp.take_along_axis(blocks, at[:, :, None], 1, mode="clip")[:, 0]


def _blocks(values: Array, size: int, fill: np.float32) -> Array:
    """[n, m] -> [n, blocks, size], filled up at the end."""
    n, m = values.shape
    count = -(-m // size)
    if count * size > m:
        values = jnp.pad(values, ((0, 0), (0, count * size - m)), constant_values=fill)
    return values.reshape(n, count, size)
