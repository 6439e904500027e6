"""Point-wise functions between the matrix products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def silu(x: Array) -> Array:
    """x * sigmoid(x), of any shape."""
    return x * jax.nn.sigmoid(x)


def gelu(x: Array) -> Array:
    """GELU in its tanh form (Hendrycks and Gimpel 2016), which is what llama.cpp computes for every
    model, whatever it was trained with."""
    return jax.nn.gelu(x, approximate=True)


def softcap(x: Array, cap: float) -> Array:
    """cap * tanh(x / cap): bounds logits to +-cap (Gemma 2, section 2). cap 0 leaves x as it is."""
    return x if cap == 0.0 else jnp.tanh(x / cap) * cap
