"""Small programs over whole regions, outside the table of graphs: copies, permutations, shifts.

Each donates the regions that it changes and takes where and how much as data.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from minfer_jax.memory.plan import CacheSpec
from minfer_jax.ops.kv_types import KV_TYPES
from minfer_jax.ops.rope import apply_rope, rope_tables
from minfer_jax.ops.rope_spec import RopeSpec


class CellMove(NamedTuple):
    """`size` cells from `source` on, copied to those from `target` on."""

    source: int
    target: int
    size: int


def copy_cells(
    regions: tuple[Array, ...], moves: Sequence[CellMove], arrays: Sequence[int]
) -> tuple[Array, ...]:
    """One move for every cache, whose `arrays` are the next so many of the regions."""
    out = list(regions)
    start = 0
    for move, n in zip(moves, arrays, strict=True):
        where = [np.int32(move.source), np.int32(move.target)]
        out[start : start + n] = _copy(tuple(out[start : start + n]), *where, size=move.size)
        start += n
    return tuple(out)


@partial(jax.jit, static_argnames="size", donate_argnums=0)
def _copy(
    regions: tuple[Array, ...], source: Array, target: Array, *, size: int
) -> tuple[Array, ...]:
    def copy(region: Array) -> Array:
        cells = lax.dynamic_slice_in_dim(region, source, size, axis=1)
        return lax.dynamic_update_slice_in_dim(region, cells, target, axis=1)

    return tuple(copy(region) for region in regions)


@partial(jax.jit, donate_argnums=0)
def permute_cells(regions: tuple[Array, ...], order: Array) -> tuple[Array, ...]:
    """Regions of one cache whose cell i holds what cell order[i] (int32 [n_cells]) held."""
    return tuple(jnp.take(region, order, axis=1, mode="clip") for region in regions)


@jax.jit
def take_cells(region: Array, cells: Array) -> Array:
    """What lies in `cells` (int32 [n]) of a region: [heads, n, ...]."""
    return jnp.take(region, cells, axis=1, mode="clip")


@partial(jax.jit, donate_argnums=0)
def put_cells(
    regions: tuple[Array, ...], cells: Array, rows: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Regions whose `cells` (int32 [n]) hold new rows [heads, n, ...]; cells past the end: none."""
    return tuple(
        region.at[:, cells].set(new, mode="drop") for region, new in zip(regions, rows, strict=True)
    )


@partial(jax.jit, static_argnames=("spec", "ropes"), donate_argnums=0)
def shift_keys(
    keys: tuple[Array, ...],
    shift: Array,
    factors: Array | None,
    *,
    spec: CacheSpec,
    ropes: tuple[RopeSpec, ...],
) -> tuple[Array, ...]:
    """The keys of one cache, each rotated by its cell's shift (int32 [n_cells]) more.

    `ropes` is the rotation of each of the cache's layers. A rotation by a sum of positions is the
    product of rotations, but for the magnitude, which a key has already.
    """
    kind = KV_TYPES[spec.types[0]]
    out = list(keys)
    for i, rope in enumerate(ropes):
        if not rope.n_rot:
            continue
        heads = slice(i * spec.n_head_kv, (i + 1) * spec.n_head_kv)
        x = jnp.swapaxes(kind.decode(tuple(array[heads] for array in out)), 0, 1)
        # Behind a value that is a part of its key comes what rotates.
        start = spec.head_dim_v if spec.v_in_k else 0
        cos, sin = rope_tables(rope, shift, factors)
        tables = (cos / rope.magnitude(), sin / rope.magnitude())
        turned = apply_rope(rope, x[..., start:], tables)  # [cells, h, d]
        turned = jnp.swapaxes(jnp.concatenate([x[..., :start], turned], axis=-1), 0, 1)
        # A key that does not move keeps its bits: to encode it anew could change them.
        moved = (shift != 0)[None, :, None]
        new = kind.encode(turned)
        out = [
            array.at[heads].set(jnp.where(moved, part, array[heads]))
            for array, part in zip(out, new, strict=True)
        ]
    return tuple(out)
