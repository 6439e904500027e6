"""A weight in the native kernels' layout, and the kernels as jax functions.

A kernel runs on the CPU alone, and a graph that calls one is compiled for the CPU alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from minfer_jax.gguf import GGMLType
from minfer_jax.ops.cpu.library import (
    TILE_ROWS,
    library,
    n_tiles,
    register_targets,
    target,
    type_code,
)

_GATES = {"silu": 1, "gelu": 2}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["tiles"],
    meta_fields=["type", "shape", "offset", "split"],
)
@dataclass(frozen=True)
class TiledTensor:
    """A matrix [out, in] in tiles of 16 rows, which begin at byte `offset` of `tiles`.

    `tiles` (uint8 [bytes]) is data, everything else is static. The lower bits of a `split` matrix
    lie behind its upper ones, so that `linear` need not read them all.
    """

    tiles: Array
    type: GGMLType
    shape: tuple[int, int]
    offset: int = 0
    split: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of this matrix's tiles, both parts if it is split."""
        return n_tiles(self.shape[0]) * sum(self._tile_bytes())

    @property
    def lower_nbytes(self) -> int:
        """Bytes of the lower part: 0 unless it is split."""
        return n_tiles(self.shape[0]) * self._tile_bytes()[1]

    def _tile_bytes(self) -> tuple[int, int]:
        kernels = library()
        assert kernels is not None
        return kernels.tile_parts(self.type, self.shape[1], split=self.split)

    def rows(self, start: int, stop: int) -> TiledTensor:
        """The rows start..stop; `start` begins a tile. Of a split matrix, all."""
        assert start % TILE_ROWS == 0
        whole = start == 0 and n_tiles(stop) == n_tiles(self.shape[0])
        assert whole or not self.split
        offset = self.offset + start // TILE_ROWS * sum(self._tile_bytes())
        return replace(self, shape=(stop - start, self.shape[1]), offset=offset)

    def take(self, ids: Array) -> Array:
        """Rows `ids` int32 [n], dequantized: float32 [n, in]. The caller has checked the ids."""
        register_targets()
        call = jax.ffi.ffi_call(target("take"), _f32(ids.shape[0], self.shape[1]))
        return call(
            ids,
            self.tiles,
            type=np.int32(type_code(self.type, self.split)),
            offset=np.int64(self.offset),
            rows=np.int64(self.shape[0]),
        )


@dataclass(frozen=True)
class Normed:
    """The RMS norm of x [n, k] with weights [k], not computed yet: `linear` does both at once."""

    x: Array
    weight: Array
    eps: float


def linear(
    x: Array | Normed,
    parts: Sequence[TiledTensor],
    *,
    gate: Literal["silu", "gelu"] | None = None,
    margin: float = 0.0,
) -> Array:
    """x [n, in] times each part [out_i, in] transposed, side by side: float32 [n, sum of out_i].

    Activations are rounded to int8, a scale per 16 of them, unless the weights are floats. With
    `gate` the first half of the columns, activated, is multiplied with the second.

    With a `margin` (whole, at least 1) and a single part that is split, outputs further than that
    below their row's largest may be made of the upper five bits of each weight (`refine.inc`).
    """
    x, norm, eps = (x.x, [x.weight], x.eps) if isinstance(x, Normed) else (x, [], -1.0)
    register_targets()
    assert all(part.shape[1] == x.shape[1] for part in parts)
    arrays: list[Array] = []
    index = []
    for part in parts:
        known = [i for i, array in enumerate(arrays) if array is part.tiles]
        index.append(known[0] if known else len(arrays))
        if not known:
            arrays.append(part.tiles)
    columns = sum(part.shape[0] for part in parts) // (2 if gate else 1)
    call = jax.ffi.ffi_call(target("linear"), _f32(x.shape[0], columns))
    return call(
        x,
        *arrays,
        *norm,
        part_array=np.array(index, np.int32),
        part_type=np.array([type_code(part.type, part.split) for part in parts], np.int32),
        part_offset=np.array([part.offset for part in parts], np.int64),
        part_rows=np.array([part.shape[0] for part in parts], np.int64),
        gate=np.int32(_GATES[gate] if gate else 0),
        eps=np.float32(eps),
        margin=np.float32(margin),
    )


def add_normed(x: Array, y: Normed) -> Array:
    """x plus the norm: float32 [n, k]."""
    register_targets()
    call = jax.ffi.ffi_call(target("add_normed"), _f32(*x.shape))
    return call(x, y.x, y.weight, eps=np.float32(y.eps))


def attend(
    qkv: Array,
    rope: tuple[Array, Array],
    rows: tuple[Array, Array, Array],
    regions: tuple[Array, Array],
    norms: Sequence[Array],
    *,
    layer: int,
    n_head: int,
    n_head_kv: int,
    interleaved: bool,
    eps: float,
    scale: float,
    window: int,
    cap: float,
) -> tuple[Array, Array, Array]:
    """Attention of one layer from the joined projections on; see `KVView.attend_joined`.

    `rows` are cell, first and last of each row, int32 [n]; `regions` K and V, float16 or float32
    [layers * n_head_kv, n_cells, d], updated in place where they are donated. Returns float32
    [n, n_head * d_v] and the regions.
    """
    register_targets()
    k, v = regions
    results = (
        _f32(qkv.shape[0], n_head * v.shape[2]),
        jax.ShapeDtypeStruct(k.shape, k.dtype),
        jax.ShapeDtypeStruct(v.shape, v.dtype),
    )
    first_region = 1 + len(rope) + len(rows)
    aliases = {first_region: 1, first_region + 1: 2}
    call = jax.ffi.ffi_call(target("attend"), results, input_output_aliases=aliases)
    out, k, v = call(
        qkv,
        *rope,
        *rows,
        *regions,
        *norms,
        layer=np.int64(layer),
        n_head=np.int64(n_head),
        n_head_kv=np.int64(n_head_kv),
        interleaved=interleaved,
        window=np.int64(window),
        scale=np.float32(scale),
        cap=np.float32(cap),
        eps=np.float32(eps),
    )
    return out, k, v


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
