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


def layer_norm(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    """Layer norm (Ba et al. 2016): x [..., k], weight and bias [k], all float32."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    scale = lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    shape = (1,) * (x.ndim - 1) + (-1,)
    out = centred * scale * weight.reshape(shape)
    return out if bias is None else out + bias.reshape(shape)
