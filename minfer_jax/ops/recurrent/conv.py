"""The short causal convolution in front of state-space and gated convolution layers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax


def causal_conv(
    x: Array, state: Array, weight: Array, bias: Array | None, real: Array
) -> tuple[Array, Array]:
    """Each channel convolved with its own kernel: (y float32 [s, t, c], new state [s, k-1, c]).

    x [s, t, c] are t inputs of s sequences, `state` [s, k-1, c] the inputs before them, `weight`
    [c, k] with the newest input's factor last, `bias` [c]. `real` bool [s, t] is False for the
    padding behind a sequence's inputs; the new state is the last k-1 inputs before it.
    """
    t, k = x.shape[1], weight.shape[1]
    inputs = jnp.concatenate([state, x], axis=1)
    factors = weight.T[:, None, None, :]
    y = inputs[:, :t] * factors[0]
    for j in range(1, k):
        y = y + inputs[:, j : j + t] * factors[j]
    if bias is not None:
        y = y + bias[None, None, :]
    n_real = jnp.sum(real, axis=1, dtype=np.int32)
    return y, _last(inputs, n_real, k - 1)


def _last(inputs: Array, n_real: Array, n: int) -> Array:
    """The n inputs before the padding: `inputs` [s, n + t, c] -> [s, n, c]."""
    if inputs.shape[1] == n + 1:  # one input a sequence: no gather
        return jnp.where(n_real[:, None, None] == 1, inputs[:, 1:], inputs[:, :-1])
    rows = n_real[:, None] + lax.iota(np.int32, n)[None, :]
    return jnp.take_along_axis(inputs, rows[:, :, None], axis=1, mode="clip")
