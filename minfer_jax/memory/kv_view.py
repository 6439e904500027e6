"""The graph's side of one cache: write the new rows, attend, hand the regions back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from minfer_jax.graph.inputs import CacheRows
from minfer_jax.graph.params import CParams
from minfer_jax.memory.plan import CacheSpec
from minfer_jax.ops.attention import Mapped, attend_blocked, attend_masked
from minfer_jax.ops.cpu.tiled import attend
from minfer_jax.ops.kv_types import KV_TYPES


class KVView:
    """The arrays of one cache in one trace: K and V, each of [layers * n_head_kv, n_cells, ...].

    `mapped` is the position and the sequence of every row, and the map of the cells; without it
    what a row sees is one run of cells.
    """

    def __init__(
        self,
        spec: CacheSpec,
        k: tuple[Array, ...],
        v: tuple[Array, ...],
        rows: CacheRows,
        mapped: tuple[Array, Array, Array] | None,
        cparams: CParams,
    ) -> None:
        self._spec = spec
        self._k, self._v = k, v
        self._rows = rows
        self._mapped = mapped
        form = attend_blocked if cparams.flash_attn else attend_masked
        precision = lax.Precision.HIGHEST if cparams.exact else lax.Precision.DEFAULT
        # Layers of equal shape share a trace, which is this view's own.
        self._attend = jax.jit(
            partial(form, precision=precision, types=spec.types, d_v=spec.head_dim_v),
            static_argnames=("n_kv", "scale", "cap", "window"),
        )

    @property
    def regions(self) -> tuple[Array, ...]:
        return (*self._k, *self._v)

    def attend(
        self,
        layer: int,
        q: Array,
        k: Array,
        v: Array | None,
        *,
        scale: float,
        window: int,
        cap: float,
    ) -> Array:
        """Store k, v [n, h_kv, d] of the cache's layer and attend with q [n, h, d]: float32
        [n, h, d_v].

        `v` is None where a value is the first part of its key. `window` is the number of positions
        that a row sees, its own included, or 0 for all.
        """
        n_kv = self._spec.n_head_kv
        self._k = self._write(self._k, self._spec.types[0], layer, k)
        if v is not None:
            self._v = self._write(self._v, self._spec.types[1], layer, v)
        first = self._rows.first
        if window and self._mapped is None:
            # A row's cells are one run, so the window is a matter of where the run begins.
            first = jnp.maximum(first, self._rows.last - (window - 1))
        with jax.named_scope("attend"):
            return self._attend(
                q,
                self._k,
                self._v,
                first,
                self._rows.last,
                np.int32(layer * n_kv),
                None if self._mapped is None else Mapped(*self._mapped),
                n_kv=n_kv,
                scale=scale,
                cap=cap,
                window=window,
            )

    def attend_joined(
        self,
        layer: int,
        qkv: Array,
        rope: tuple[Array, Array],
        norms: Sequence[Array],
        *,
        n_head: int,
        interleaved: bool,
        eps: float,
        scale: float,
        window: int,
        cap: float,
    ) -> Array:
        """Norm, rotation, store and attention of the cache's layer in one native kernel.

        qkv [n, columns] holds the heads of q, k and v side by side, `rope` the cosines and sines
        [n, n_rot / 2], `norms` the weights of the norms on q and k heads, or nothing; returns
        float32 [n, n_head * d_v].
        """
        rows = self._rows
        with jax.named_scope("attend"):
            out, self._k, self._v = attend(
                qkv,
                rope,
                (rows.cell, rows.first, rows.last),
                (self._k, self._v),
                norms,
                mapped=self._mapped,
                kv_types=self._spec.types,
                layer=layer,
                n_head=n_head,
                n_head_kv=self._spec.n_head_kv,
                interleaved=interleaved,
                eps=eps,
                scale=scale,
                window=window,
                cap=cap,
            )
        return out

    def _write(
        self, region: tuple[Array, ...], kind: str, layer: int, new: Array
    ) -> tuple[Array, ...]:
        """Scatter rows [n, h_kv, d] into their cells; a padding row's cell is past the end."""
        n_kv = self._spec.n_head_kv
        heads = slice(layer * n_kv, (layer + 1) * n_kv)
        parts = KV_TYPES[kind].encode(jnp.swapaxes(new, 0, 1))
        return tuple(
            array.at[heads, self._rows.cell].set(part, mode="drop", unique_indices=False)
            for array, part in zip(region, parts, strict=True)
        )
