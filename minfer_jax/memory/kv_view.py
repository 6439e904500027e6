"""The graph's side of the KV memory: write the new rows, attend, hand the regions back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from minfer_jax.graph.inputs import Rows
from minfer_jax.graph.params import CParams
from minfer_jax.ops.attention import attend_blocked, attend_masked
from minfer_jax.ops.cpu.tiled import attend


class KVView:
    """The regions of one trace: K and V, each [n_layer * n_head_kv, n_cells, d].

    The order never changes: donation pairs buffers by shape in the order of the outputs, and any
    other order would copy every region in every step.
    """

    def __init__(self, regions: Sequence[Array], rows: Rows, cparams: CParams) -> None:
        self._k, self._v = regions
        self._rows = rows
        form = attend_blocked if cparams.flash_attn else attend_masked
        precision = lax.Precision.HIGHEST if cparams.exact else lax.Precision.DEFAULT
        # Layers of equal shape share a trace, which is this view's own.
        self._attend = jax.jit(
            partial(form, precision=precision), static_argnames=("n_kv", "scale", "cap")
        )

    @property
    def regions(self) -> tuple[Array, ...]:
        return self._k, self._v

    def attend(
        self, il: int, q: Array, k: Array, v: Array, *, scale: float, window: int, cap: float
    ) -> Array:
        """Store k, v [n, h_kv, d] of layer `il` and attend with q [n, h, d]: float32 [n, h, d_v].

        `window` is the number of cells that a row sees, its own included, or 0 for all.
        """
        n_kv = k.shape[1]
        self._k = self._write(self._k, il, k)
        self._v = self._write(self._v, il, v)
        first = self._rows.first
        if window:
            # A row's cells are one run, so the window is a matter of where the run begins.
            first = jnp.maximum(first, self._rows.last - (window - 1))
        with jax.named_scope("attend"):
            return self._attend(
                q,
                self._k,
                self._v,
                first,
                self._rows.last,
                np.int32(il * n_kv),
                n_kv=n_kv,
                scale=scale,
                cap=cap,
            )

    def attend_joined(
        self,
        il: int,
        qkv: Array,
        rope: tuple[Array, Array],
        norms: Sequence[Array],
        *,
        n_head: int,
        n_head_kv: int,
        interleaved: bool,
        eps: float,
        scale: float,
        window: int,
        cap: float,
    ) -> Array:
        """Norm, rotation, store and attention of layer `il` in one native kernel.

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
                layer=il,
                n_head=n_head,
                n_head_kv=n_head_kv,
                interleaved=interleaved,
                eps=eps,
                scale=scale,
                window=window,
                cap=cap,
            )
        return out

    def _write(self, region: Array, il: int, new: Array) -> Array:
        """Scatter rows [n, h_kv, d] into their cells; a padding row's cell is past the end."""
        n_kv = new.shape[1]
        rows = jnp.swapaxes(new, 0, 1).astype(region.dtype)
        heads = slice(il * n_kv, (il + 1) * n_kv)
        return region.at[heads, self._rows.cell].set(rows, mode="drop", unique_indices=False)
