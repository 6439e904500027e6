"""The gated delta rule: a matrix per head that forgets as a whole and corrects what it holds."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from minfer_jax.ops.recurrent.chunks import (
    dot,
    join,
    lower,
    matmul,
    split,
    transpose,
    unit_lower_inverse,
)

_CHUNK = 32


def gated_delta(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array, real: Array
) -> tuple[Array, Array]:
    """Gated delta rule (Yang et al. 2025): (y [s, t, h, d_v], new state [s, h, d_k, d_v]).

    S <- exp(log_decay_t) S, then S <- S + k_t beta_t (v_t - k_t S), then y_t = q_t S.

    q and k are float32 [s, t, h, d_k], v [s, t, h, d_v], log_decay (never above 0) and beta
    [s, t, h], the state S [s, h, d_k, d_v], `real` bool [s, t]: the rows that are not real come
    last and leave the state alone.
    """
    log_decay, beta = (jnp.where(real[:, :, None], x, np.float32(0.0)) for x in (log_decay, beta))
    rows, t = (q, k, v, log_decay, beta), q.shape[1]
    if t == 1:
        y, state = _step(*[x[:, 0] for x in rows], state=state)
        return y[:, None], state
    y, state = _chunks(*[split(x, _CHUNK) for x in rows], state=state)
    return join(y, t), state


def _step(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array
) -> tuple[Array, Array]:
    """One row a sequence: q, k [s, h, d_k], v [s, h, d_v], log_decay, beta [s, h]."""
    decay = jnp.exp(log_decay)[..., None]
    # Both reads are of the state as it was, in one product.
    reads = matmul(jnp.stack([k, q], axis=-2), state) * decay[..., None]
    read_k, read_q = reads[..., 0, :], reads[..., 1, :]
    written = beta[..., None] * (v - read_k)
    y = read_q + dot(q, k) * written
    return y, decay[..., None] * state + k[..., None] * written[..., None, :]


def _chunks(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array
) -> tuple[Array, Array]:
    """q, k, v [chunks, s, h, c, d], log_decay and beta [chunks, s, h, c]: y like v.

    What a row writes is linear in what the rows of the chunk before it wrote, and solved for.
    """
    since = jnp.exp(_sums_since(log_decay))
    keys = transpose(k)
    reads = lower(matmul(k, keys) * since, -1)
    solved = unit_lower_inverse(reads * -beta[..., None]) * beta[..., None, :]
    scores = lower(matmul(q, keys) * since)
    from_start = jnp.exp(jnp.cumsum(log_decay, axis=-1))[..., None]
    kept = from_start[..., -1:, :]
    k_written = keys * since[..., -1:, :]

    def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, solved, scores, k_written, kept = chunk
        written = matmul(solved, v - matmul(k, state))
        y = matmul(q, state) + matmul(scores, written)
        return kept * state + matmul(k_written, written), y

    chunks = (q * from_start, k * from_start, v, solved, scores, k_written, kept)
    state, y = lax.scan(step, state, chunks)
    return y, state


def _sums_since(log_decay: Array) -> Array:
    """[..., c] -> [..., c, c]: for rows t and r the sum over r < u <= t, and 0 if t < r.

    Sums, because in differences of running sums a strong decay would swamp weak ones.
    """
    c = log_decay.shape[-1]
    later = lower(jnp.broadcast_to(log_decay[..., :, None], (*log_decay.shape, c)), -1)
    upto = jnp.broadcast_to(np.tri(c, dtype=np.float32), later.shape)
    return matmul(upto, later)
