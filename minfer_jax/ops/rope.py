"""Rotary position embeddings (Su et al. 2021): tables of angles, and the rotation."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from minfer_jax.ops.rope_spec import RopeSpec


def rope_tables(spec: RopeSpec, pos: Array, factors: Array | None = None) -> tuple[Array, Array]:
    """Cosines and sines for positions `pos` int32 [n]: two float32 [n, n_rot / 2].

    `factors` float32 [n_rot / 2] divides the frequencies (Llama 3's `rope_freqs.weight`).
    """
    freq = jnp.asarray(spec.frequencies().astype(np.float32))
    if factors is not None:
        freq = freq / factors
    angle = pos.astype(jnp.float32)[:, None] * freq[None, :]
    magnitude = spec.magnitude()
    return jnp.cos(angle) * magnitude, jnp.sin(angle) * magnitude


def apply_rope(spec: RopeSpec, x: Array, tables: tuple[Array, Array]) -> Array:
    """Rotate the heads x [n, heads, d] by the tables of their rows."""
    cos, sin = (t[:, None, :] for t in tables)  # [n, 1, n_rot / 2]
    rot, rest = x[..., : spec.n_rot], x[..., spec.n_rot :]
    if spec.style == "interleaved":
        a, b = rot[..., 0::2], rot[..., 1::2]
        out = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(rot.shape)
    else:
        a, b = jnp.split(rot, 2, axis=-1)
        out = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return jnp.concatenate([out, rest], axis=-1) if rest.shape[-1] else out
