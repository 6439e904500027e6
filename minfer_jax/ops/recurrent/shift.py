"""Token shift: what the previous token had where this one is."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array


def token_shift(x: Array, state: Array, real: Array) -> tuple[Array, Array]:
    """Every row's predecessor in its sequence: (previous [s, t, c], new state [s, c]).

    x float32 [s, t, c], `state` [s, c] the row before the first one, `real` bool [s, t] False for
    padding, which comes last. The new state is the last real row, or `state` if there is none.
    """
    if x.shape[1] == 1:
        return state[:, None], jnp.where(real, x[:, 0], state)
    rows = jnp.concatenate([state[:, None], x], axis=1)
    n_real = jnp.sum(real, axis=1, dtype=np.int32)
    last = jnp.take_along_axis(rows, n_real[:, None, None], axis=1, mode="clip")
    return rows[:, :-1], last[:, 0]
