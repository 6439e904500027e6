"""Types of KV regions: how the values of a cell are stored and read back.

A region of a type is a tuple of arrays [heads, cells, ...]. The native kernels store the same bits
as `encode`; for finite values in a type's range they are also those of ggml's reference
quantization. Larger values saturate: a finite region cannot turn a weight of zero into NaN. NaN
stays NaN, of quantized types for its whole block, so that it is found where it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

BLOCK = 32
"""Values of a quantized type that share a scale."""

_F16_MAX = 65504.0
# Typed constants: a plain number would be traced as int64 or float64 where x64 is enabled.
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_SMALLEST = np.float32(2.0**-126)
"""Scales below it, which float16 cannot hold by far, are zero: they have no finite reciprocal."""


@dataclass(frozen=True)
class KVType:
    """A type; all of it is topology.

    `planes` says of every array of a region how many values one of its elements stands for, and
    its dtype.
    """

    name: str
    planes: tuple[tuple[int, type[np.generic]], ...]
    _encode: Callable[[Array], tuple[Array, ...]]
    _decode: Callable[..., Array]

    @property
    def multiple(self) -> int:
        """What the width of a head must be a multiple of."""
        return max(values for values, _ in self.planes)

    def arrays(
        self, heads: int, cells: int, d: int
    ) -> tuple[tuple[tuple[int, int, int], type[np.generic]], ...]:
        """Shape and dtype of every array of a region of heads of `d` values."""
        assert d % self.multiple == 0
        return tuple(((heads, cells, d // values), dtype) for values, dtype in self.planes)

    def bytes(self, d: int) -> int:
        """Bytes per head and cell."""
        return sum(d // values * np.dtype(dtype).itemsize for values, dtype in self.planes)

    def encode(self, x: Array) -> tuple[Array, ...]:
        """x float32 [..., d] as it is stored: an array [..., d / values] for each plane."""
        return self._encode(x)

    def decode(self, arrays: Sequence[Array]) -> Array:
        """What is stored, exactly: float32 [..., d]."""
        return self._decode(*arrays)


def _to_f32(x: Array) -> tuple[Array, ...]:
    return (x,)


def _to_f16(x: Array) -> tuple[Array, ...]:
    return (_clip(x, _F16_MAX).astype(jnp.float16),)


def _widen(x: Array) -> Array:
    return x.astype(jnp.float32)


def _to_bf16(x: Array) -> tuple[Array, ...]:
    """The upper halves of floats, rounded to the nearest even. Bits: XLA may not round a bfloat16
    that it converts back at once."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    upper = bits >> np.uint32(16)
    rounded = (bits + (np.uint32(0x7FFF) + (upper & np.uint32(1)))) >> np.uint32(16)
    # What would be infinity is the largest number.
    infinite = (rounded & np.uint32(0x7FFF)) == np.uint32(0x7F80)
    rounded = jnp.where(infinite, rounded - np.uint32(1), rounded)
    quiet = upper | np.uint32(0x40)
    return (jnp.where(jnp.isnan(x), quiet, rounded).astype(jnp.uint16),)


def _from_bf16(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) << np.uint32(16), jnp.float32)


def _to_q8_0(x: Array) -> tuple[Array, ...]:
    blocks = _clip(x, 127 * _F16_MAX).reshape(*x.shape[:-1], -1, BLOCK)
    scale = _divided(jnp.max(jnp.abs(blocks), axis=-1, keepdims=True), 127.0)
    quants = lax.round(_scaled(blocks, scale, 128.0), lax.RoundingMethod.AWAY_FROM_ZERO)
    return quants.astype(jnp.int8).reshape(x.shape), _stored(scale)


def _from_q8_0(quants: Array, scales: Array) -> Array:
    blocks = quants.reshape(*scales.shape, BLOCK).astype(jnp.float32)
    return (blocks * scales.astype(jnp.float32)[..., None]).reshape(quants.shape)


def _to_q4_0(x: Array) -> tuple[Array, ...]:
    blocks = _clip(x, 8 * _F16_MAX).reshape(*x.shape[:-1], -1, BLOCK)
    largest = lax.argmax(jnp.abs(blocks), blocks.ndim - 1, np.int32)[..., None]
    at = lax.broadcasted_iota(np.int32, blocks.shape, blocks.ndim - 1)
    value = jnp.sum(jnp.where(at == largest, blocks, _ZERO), axis=-1, keepdims=True)
    scale = value / np.float32(-8.0)
    quants = (_scaled(blocks, scale, 9.0) + np.float32(8.5)).astype(jnp.uint8)
    low, high = jnp.split(jnp.minimum(quants, np.uint8(15)), 2, axis=-1)
    packed = low | (high << np.uint8(4))
    return packed.reshape(*x.shape[:-1], x.shape[-1] // 2), _stored(scale)


def _from_q4_0(packed: Array, scales: Array) -> Array:
    packed = packed.reshape(*scales.shape, BLOCK // 2)
    quants = jnp.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    blocks = quants.astype(jnp.float32) - np.float32(8.0)
    out = blocks * scales.astype(jnp.float32)[..., None]
    return out.reshape(*scales.shape[:-1], -1)


def _clip(x: Array, limit: float) -> Array:
    """x within -limit..limit; NaN stays NaN."""
    return jnp.clip(x, np.float32(-limit), np.float32(limit))


def _divided(x: Array, by: float) -> Array:
    """x / by: behind the barrier, XLA does not see a constant, whose reciprocal is not exact."""
    return x / lax.optimization_barrier(jnp.full_like(x, np.float32(by)))


def _scaled(blocks: Array, scale: Array, limit: float) -> Array:
    """Blocks [..., 32] over their scales [..., 1]; zeros if a scale is NaN.

    The limit is never reached. It stands between the product and a sum that would otherwise be
    one instruction with it, which rounds differently.
    """
    tiny = jnp.abs(scale) < _SMALLEST
    inverse = jnp.where(tiny, _ZERO, _ONE / jnp.where(tiny, _ONE, scale))
    y = _clip(blocks * inverse, limit)
    return jnp.where(jnp.isnan(scale), _ZERO, y)


def _stored(scale: Array) -> Array:
    """Scales [..., 1] as float16 [...], every NaN with the same bits."""
    scale = jnp.where(jnp.isnan(scale), np.float32(np.nan), scale)
    return scale.astype(jnp.float16)[..., 0]


KV_TYPES: dict[str, KVType] = {
    kind.name: kind
    for kind in (
        KVType("f32", ((1, np.float32),), _to_f32, _widen),
        KVType("f16", ((1, np.float16),), _to_f16, _widen),
        KVType("bf16", ((1, np.uint16),), _to_bf16, _from_bf16),
        KVType("q8_0", ((1, np.int8), (BLOCK, np.float16)), _to_q8_0, _from_q8_0),
        KVType("q4_0", ((2, np.uint8), (BLOCK, np.float16)), _to_q4_0, _from_q4_0),
    )
}
"""The types of regions, by the name that the command line knows them by."""
