"""Normalization over the last axis."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Root mean square norm (Zhang and Sennrich 2019): x [..., k], weight [k], both float32.

    GGUF files of Gemma store `1 + weight`, so there is one form for all families.
    """
    scale = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale * weight.reshape((1,) * (x.ndim - 1) + (-1,))
