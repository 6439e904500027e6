"""The recurrences of RWKV-6 and RWKV-7: a matrix per head, decayed channel by channel.

A state is [key, value]: what was written under a key is read back by multiplying from the left.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from minfer_jax.ops.recurrent.chunks import (
    decayed_scores,
    dot,
    join,
    leaf_size,
    matmul,
    split,
    transpose,
    unit_lower_inverse,
    with_diagonal,
)

_CHUNK = 32


def wkv6(
    r: Array, k: Array, v: Array, log_w: Array, bonus: Array, state: Array, real: Array
) -> tuple[Array, Array]:
    """RWKV-6 (Peng et al. 2024, "Eagle and Finch"): (y [s, t, h, d], new state [s, h, d, d]).

    y_t = r_t (S + diag(bonus) k_t v_t^T), then S <- diag(w_t) S + k_t v_t^T, with w = exp(log_w).

    r, k, v and log_w (never above 0) are float32 [s, t, h, d], `bonus` [h, d], the state S
    [s, h, key, value], `real` bool [s, t]: the rows that are not real come last and leave the
    state alone.
    """
    k, log_w = _only_real(real, k, log_w)
    # A row's own key and value, which it reads past the state.
    own = dot(r * bonus[None, None, :, :], k) * v
    if r.shape[1] == 1:
        y = _read(state, r[:, 0])
        state = jnp.exp(log_w[:, 0])[..., None] * state + _outer(k[:, 0], v[:, 0])
        return y[:, None] + own, state
    y, state = _wkv6_chunks(*[split(x, _CHUNK) for x in (r, k, v, log_w)], state=state)
    return join(y, r.shape[1]) + own, state


def _wkv6_chunks(r: Array, k: Array, v: Array, log_w: Array, state: Array) -> tuple[Array, Array]:
    """All of [chunks, s, h, c, d]: y of the same shape, without what a row reads of itself."""
    decayed = decayed_scores(r[..., None, :, :], k[..., None, :, :], log_w)
    within = matmul(decayed.scores[..., 0, 0, :, :], v)
    written = matmul(transpose(k * jnp.exp(decayed.behind)), v)
    kept = _through(log_w)

    def step(state: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        kept, written = chunk
        return kept * state + written, state

    state, states = lax.scan(step, state, (kept, written))
    return within + matmul(r * jnp.exp(decayed.before), states), state


def wkv7(
    r: Array,
    log_w: Array,
    k: Array,
    v: Array,
    a: Array,
    b: Array,
    state: Array,
    real: Array,
    *,
    log_w_min: float = -np.inf,
) -> tuple[Array, Array]:
    """RWKV-7 (Peng et al. 2025, "Goose"): (y [s, t, h, d], new state [s, h, d, d]).

    S <- diag(w_t) S + b_t (a_t S) + k_t v_t^T, then y_t = r_t S, with w = exp(log_w).

    r, log_w (never above 0), k, v, a and b are float32 [s, t, h, d], the state S [s, h, key,
    value], `real` bool [s, t]: the rows that are not real come last and leave the state alone.
    `log_w_min` is a bound that no log_w goes below, if there is one: it makes long inputs cheaper.
    """
    k, b, log_w = _only_real(real, k, b, log_w)
    if r.shape[1] == 1:
        read = _read(state, a[:, 0])
        state = jnp.exp(log_w[:, 0])[..., None] * state + _outer(k[:, 0], v[:, 0])
        state = state + _outer(b[:, 0], read)
        return _read(state, r[:, 0])[:, None], state
    rows = [split(x, _CHUNK) for x in (r, log_w, k, v, a, b)]
    y, state = _wkv7_chunks(*rows, state=state, leaf=leaf_size(log_w_min, _CHUNK))
    return join(y, r.shape[1]), state


def _wkv7_chunks(
    r: Array, log_w: Array, k: Array, v: Array, a: Array, b: Array, state: Array, leaf: int
) -> tuple[Array, Array]:
    """All of [chunks, s, h, c, d]: y of the same shape.

    With u_t = a_t S_t-1, what row t reads before it writes, S is a sum over the rows of b u^T and
    k v^T, each decayed since; so u is a linear function of the u before it, and solved for.
    """
    # What is read is read after the row's own decay, and before its own write.
    r_decayed = r * jnp.exp(log_w)
    rows, columns = jnp.stack([a, r_decayed], axis=-3), jnp.stack([b, k], axis=-3)
    scores, before, behind = decayed_scores(rows, columns, log_w, leaf)
    solved = unit_lower_inverse(scores[..., 0, 0, :, :])
    # What is read is linear in the state that the chunk begins with: an offset and a matrix.
    u_offset = matmul(solved, matmul(scores[..., 0, 1, :, :], v))
    u_state = matmul(solved, a * jnp.exp(before))
    # A row is read after it is written.
    read_b = with_diagonal(scores[..., 1, 0, :, :], dot(r, b))
    read_k = with_diagonal(scores[..., 1, 1, :, :], dot(r, k))
    y_offset = matmul(read_k, v) + matmul(read_b, u_offset)
    y_state = r_decayed * jnp.exp(before) + matmul(read_b, u_state)
    b, k = (transpose(x * jnp.exp(behind)) for x in (b, k))
    written = matmul(k, v) + matmul(b, u_offset)
    kept = _through(log_w)

    def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        kept, written, b, u_state = chunk
        return kept * state + written + matmul(b, matmul(u_state, state)), state

    state, states = lax.scan(step, state, (kept, written, b, u_state))
    return y_offset + matmul(y_state, states), state


def _only_real(real: Array, *xs: Array) -> tuple[Array, ...]:
    """Each x [s, t, h, d] with zeros in the rows that are padding."""
    return tuple(jnp.where(real[:, :, None, None], x, np.float32(0.0)) for x in xs)


def _through(log_w: Array) -> Array:
    """What is left of a state behind all rows of a chunk [..., c, d]: [..., d, 1]."""
    return jnp.exp(jnp.sum(log_w, axis=-2))[..., None]


def _read(state: Array, row: Array) -> Array:
    """row [s, h, key] times state [s, h, key, value]: [s, h, value]."""
    return matmul(row[..., None, :], state)[..., 0, :]


def _outer(key: Array, value: Array) -> Array:
    """[s, h, key] and [s, h, value]: [s, h, key, value]."""
    return key[..., None] * value[..., None, :]
