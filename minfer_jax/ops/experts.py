"""Mixtures of experts (Shazeer et al. 2017): who answers which row, and products grouped by that.

Shapes: `n` rows, `k` experts that each of them has chosen, `m = n * k` choices. A matrix of experts
is [n_expert * out, in], one expert below the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from minfer_jax.ops.qtensor import QTensor
from minfer_jax.ops.unrolled import UnrolledTensor

_LEAST_SUM = np.float32(6.103515625e-5)  # the smallest normal float16: what llama.cpp divides by
_GROUP_SCORES = 2  # experts whose scores make that of their group
_NEVER = np.float32(-np.inf)


def choose_experts(
    logits: Array,
    bias: Array | None,
    *,
    n_used: int,
    gating: Literal["softmax", "sigmoid"],
    normalize: bool,
    scale: float,
    n_group: int = 1,
    n_group_used: int = 1,
) -> tuple[Array, Array]:
    """The experts of each row and the weights of their answers: int32 and float32 [n, n_used].

    logits [n, n_expert]; `bias` [n_expert] counts for the choice alone (DeepSeek-V3, section 2.1).
    Of `n_group` groups of neighbouring experts only those `n_group_used` are looked at whose two
    best experts score highest together. `normalize` makes a row's weights sum up to `scale`.
    """
    probs = jax.nn.softmax(logits, axis=-1) if gating == "softmax" else jax.nn.sigmoid(logits)
    scores = probs if bias is None else probs + bias[None, :]
    if n_group > 1:
        scores = _within_groups(scores, n_group, n_group_used)
    _, ids = lax.top_k(scores, n_used)
    weights = jnp.take_along_axis(probs, ids, axis=-1)
    if normalize:
        weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), _LEAST_SUM)
    return ids, weights if scale == 1.0 else weights * scale


def _within_groups(scores: Array, n_group: int, n_used: int) -> Array:
    """Scores [n, n_expert], minus infinity outside of the `n_used` best groups."""
    n, n_expert = scores.shape
    groups = scores.reshape(n, n_group, n_expert // n_group)
    best, _ = lax.top_k(groups, min(_GROUP_SCORES, groups.shape[-1]))
    _, kept = lax.top_k(jnp.sum(best, axis=-1), n_used)
    group = np.arange(n_group, dtype=np.int32)
    keep = jnp.any(kept[:, :, None] == group[None, None, :], axis=1)
    return jnp.where(keep[:, :, None], groups, _NEVER).reshape(n, n_expert)


def by_expert(
    x: Array, ids: Array, n_expert: int, answer: Callable[[Array, Array], Array]
) -> Array:
    """What the chosen experts answer: float32 [n, k, out].

    x [n, k, in], or [n, 1, in] where all of a row's experts see the same; ids int32 [n, k], where
    an id past the last expert asks nobody and is answered with arbitrary finite numbers.
    `answer(x [rows, in], expert)` is called with rows of one expert, which is int32 and traced.

    The choices are sorted by expert and go through in blocks of one expert each, so that the cost
    follows the experts in use and the rows that chose them. No reverse-mode gradient.
    """
    n, k = ids.shape
    m, share = n * k, k // x.shape[1]
    flat = ids.reshape(m)
    expert, order = lax.sort((flat, jnp.arange(m, dtype=jnp.int32)), num_keys=1)
    rows = block_rows(m, n_expert)
    # Room for the last block, which may reach past the end.
    at = lax.pad(lax.div(order, np.int32(share)), np.int32(0), ((0, rows, 0),))
    sorted_x = x.reshape(-1, x.shape[-1])[at]
    starts, blocks = _ranges(expert, n_expert, rows)

    def step(i: Array, y: Array) -> Array:
        e = jnp.sum(blocks <= i, dtype=np.int32)
        before = jnp.where(e > 0, blocks[e - np.int32(1)], np.int32(0))
        start = starts[e] + (i - before) * np.int32(rows)
        zero = jnp.zeros_like(start)
        part = lax.dynamic_slice(sorted_x, (start, zero), (rows, sorted_x.shape[1]))
        # Rows that belong to the next expert are overwritten by its blocks, which come later.
        return lax.dynamic_update_slice(y, answer(part, e), (start, zero))

    n_out = jax.eval_shape(answer, sorted_x[:rows], starts[0]).shape[1]
    # Plain zeros would depend on nothing, and XLA would make those of all layers first.
    y = lax.pad(sorted_x[:, :1], np.float32(0.0), ((0, 0, 0), (0, n_out - 1, 0)))
    y = lax.fori_loop(np.int32(0), blocks[-1], step, y)
    _, back = lax.sort((order, jnp.arange(m, dtype=jnp.int32)), num_keys=1)
    return y[back].reshape(n, k, n_out)


def expert_ffn(
    x: Array,
    ids: Array,
    matrices: Sequence[QTensor | UnrolledTensor],
    n_expert: int,
    *,
    activation: Callable[[Array], Array],
    multiply: Callable[[Array, Any], Array],
) -> Array:
    """Gated feed-forward of each row's experts: x [n, n_embd], ids [n, k] -> float32 [n, k, out].

    `matrices` are the experts' gate, up and down, or the first two as one with the gates' rows
    first; `multiply` makes x [n, in] and a matrix [out, in] into [n, out].
    """

    def answer(rows: Array, expert: Array) -> Array:
        sizes = [w.shape[0] // n_expert for w in matrices]
        *gate_up, down = [
            w.dynamic_rows(expert * np.int32(n), n) for w, n in zip(matrices, sizes, strict=True)
        ]
        parts = [multiply(rows, w) for w in gate_up]
        gate, up = parts if len(parts) == 2 else jnp.split(parts[0], 2, axis=1)
        return multiply(activation(gate) * up, down)

    return by_expert(x[:, None], ids, n_expert, answer)


def each_matrix(
    x: Array, matrices: QTensor | UnrolledTensor, multiply: Callable[[Array, Any], Array]
) -> Array:
    """x[:, i] times the i-th of g matrices [g * out, in]: x [n, g, in] -> float32 [n, g, out]."""
    n_group = x.shape[1]
    rows = matrices.shape[0] // n_group

    def one(group: tuple[Array, Array]) -> Array:
        i, part = group
        return multiply(part, matrices.dynamic_rows(i * np.int32(rows), rows))

    y = lax.map(one, (np.arange(n_group, dtype=np.int32), jnp.swapaxes(x, 0, 1)))
    return jnp.swapaxes(y, 0, 1)


def block_rows(m: int, n_expert: int) -> int:
    """Rows of a block: what an expert gets on average, rounded up to a power of two.

    With half or twice as many, a mixture of 64 experts took a third longer for 512 rows. Products
    with one row do without dequantized weights in memory, and are faster up to two of them.
    """
    average = -(-m // n_expert)
    return 1 if average <= 2 else min(m, 1 << (average - 1).bit_length())


def _ranges(expert: Array, n_expert: int, rows: int) -> tuple[Array, Array]:
    """Of the sorted choices [m]: where each expert's begin, and how many blocks of `rows` end with
    its own, int32 [n_expert] each."""
    ids = np.arange(n_expert, dtype=np.int32)
    before = expert[None, :] < ids[:, None]
    own = expert[None, :] == ids[:, None]
    count = jnp.sum(own, axis=1, dtype=np.int32)
    blocks = lax.div(count + np.int32(rows - 1), np.int32(rows))
    return jnp.sum(before, axis=1, dtype=np.int32), jnp.cumsum(blocks, dtype=np.int32)
