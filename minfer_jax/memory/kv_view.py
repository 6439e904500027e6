"""The graph's side of the KV memory: write the new rows, attend, hand the regions back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from minfer_jax.graph.inputs import Rows
from minfer_jax.graph.params import CParams
from minfer_jax.ops.attention import attend_blocked, attend_masked


class KVView:
    """The regions of one trace, as k, v of layer 0, k, v of layer 1, and so on.

    The order never changes: donation pairs buffers by shape in the order of the outputs, and any
    other order would copy every region in every step.
    """

    def __init__(self, regions: Sequence[Array], rows: Rows, cparams: CParams) -> None:
        self._regions = list(regions)
        self._rows = rows
        form = attend_blocked if cparams.flash_attn else attend_masked
        precision = lax.Precision.HIGHEST if cparams.exact else lax.Precision.DEFAULT
        # Layers of equal shape share a trace, which is this view's own.
        self._attend = jax.jit(partial(form, precision=precision), static_argnames=("scale", "cap"))

    @property
    def regions(self) -> tuple[Array, ...]:
        return tuple(self._regions)

    def attend(
        self, il: int, q: Array, k: Array, v: Array, *, scale: float, window: int, cap: float
    ) -> Array:
        """Store k, v [n, h_kv, d] of layer `il` and attend with q [n, h, d]: float32 [n, h, d_v].

        `window` is the number of cells that a row sees, its own included, or 0 for all.
        """
        k_region = self._write(2 * il, k)
        v_region = self._write(2 * il + 1, v)
        first = self._rows.first
        if window:
            # A row's cells are one run, so the window is a matter of where the run begins.
            first = jnp.maximum(first, self._rows.last - (window - 1))
        with jax.named_scope("attend"):
            return self._attend(
                q,
                k_region,
                v_region,
                first,
                self._rows.last,
                scale=scale,
                cap=cap,
            )

    def _write(self, index: int, new: Array) -> Array:
        """Scatter rows [n, h_kv, d] into their cells; a padding row's cell is past the end."""
        region = self._regions[index]
        rows = jnp.swapaxes(new, 0, 1).astype(region.dtype)
        region = region.at[:, self._rows.cell].set(rows, mode="drop", unique_indices=False)
        self._regions[index] = region
        return region
