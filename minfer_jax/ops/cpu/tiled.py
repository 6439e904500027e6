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
from minfer_jax.ops.kv_types import KV_TYPES

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
    arrays, index = _distinct(parts)
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


def experts(
    x: Array,
    ids: Array,
    parts: Sequence[TiledTensor],
    n_expert: int,
    stride: int,
    *,
    gate: Literal["silu", "gelu"] | None = None,
) -> Array:
    """Row i of x [n or n / s, in] times the matrices of expert `ids[i]`: float32 [n, out].

    `parts` are those of expert 0, one matrix, or two of equal size with a `gate` (see `linear`);
    another's lie `stride` rows further for each expert before it. ids int32 [n]; the result is
    zero where it names no expert. With fewer rows of x than ids, each serves s ids in turn. Only
    the experts named are read, each of them once.
    """
    register_targets()
    rows, n_in = parts[0].shape
    assert n_in == x.shape[1] and all(part.shape == parts[0].shape for part in parts)
    assert stride % TILE_ROWS == 0 and not any(part.split for part in parts)
    arrays, index = _distinct(parts)
    call = jax.ffi.ffi_call(target("experts"), _f32(ids.shape[0], rows))
    strides = [stride // TILE_ROWS * part.nbytes // n_tiles(rows) for part in parts]
    return call(
        x,
        ids,
        *arrays,
        part_array=np.array(index, np.int32),
        part_type=np.array([type_code(part.type, part.split) for part in parts], np.int32),
        part_offset=np.array([part.offset for part in parts], np.int64),
        part_stride=np.array(strides, np.int64),
        rows=np.int64(rows),
        n_experts=np.int64(n_expert),
        gate=np.int32(_GATES[gate] if gate else 0),
    )


def _distinct(parts: Sequence[TiledTensor]) -> tuple[list[Array], list[int]]:
    """The arrays that the parts lie in, each once, and which of them is each part's."""
    arrays: list[Array] = []
    index = []
    for part in parts:
        known = [i for i, array in enumerate(arrays) if array is part.tiles]
        index.append(known[0] if known else len(arrays))
        if not known:
            arrays.append(part.tiles)
    return arrays, index


def add_normed(x: Array, y: Normed) -> Array:
    """x plus the norm: float32 [n, k]."""
    register_targets()
    call = jax.ffi.ffi_call(target("add_normed"), _f32(*x.shape))
    return call(x, y.x, y.weight, eps=np.float32(y.eps))


def attend(
    qkv: Array,
    rope: tuple[Array, Array],
    rows: tuple[Array, Array, Array],
    regions: tuple[tuple[Array, ...], tuple[Array, ...]],
    norms: Sequence[Array],
    *,
    kv_types: tuple[str, str],
    layer: int,
    n_head: int,
    n_head_kv: int,
    interleaved: bool,
    eps: float,
    scale: float,
    window: int,
    cap: float,
    mapped: tuple[Array, Array, Array] | None = None,
) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
    """Attention of one layer from the joined projections on; see `KVView.attend_joined`.

    `rows` are cell, first and last of each row, int32 [n]; `regions` the arrays of K and of V, of
    types `kv_types`, [layers * n_head_kv, n_cells, ...], updated in place where they are donated.

    A row sees the cells from first to last, or the last `window` of them. With `mapped` it sees
    those that belong to its sequence, at positions up to its own and within `window` of it: the
    position and the sequence of each row, int32 [n], and the cells, int32 [1 + words, n_cells],
    which are their positions and then words of 32 bits, one a sequence.

    Returns float32 [n, n_head * d_v] and the arrays.
    """
    register_targets()
    k, v = regions
    for arrays, kind in zip(regions, kv_types, strict=True):
        assert [a.dtype for a in arrays] == [dtype for _, dtype in KV_TYPES[kind].planes]
    d_v = v[0].shape[2] * KV_TYPES[kv_types[1]].planes[0][0]
    arrays = (*k, *v)
    results = (
        _f32(qkv.shape[0], n_head * d_v),
        *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays),
    )
    first_region = 1 + len(rope) + len(rows)
    aliases = {first_region + i: 1 + i for i in range(len(arrays))}
    call = jax.ffi.ffi_call(target("attend"), results, input_output_aliases=aliases)
    out, *arrays = call(
        qkv,
        *rope,
        *rows,
        *arrays,
        *(mapped or ()),
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
    return out, tuple(arrays[: len(k)]), tuple(arrays[len(k) :])


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
