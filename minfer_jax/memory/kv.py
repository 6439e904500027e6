"""The host's side of the KV memory: one sequence, in a straight line of cells.

Cell i holds position i. The cursor is the truth: what lies past it is garbage that nobody reads,
so going back is O(1) and touches no region.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

from minfer_jax.device import Device
from minfer_jax.errors import ModelError
from minfer_jax.models.hparams import HParams
from minfer_jax.ops.attention import BLOCK

KV_TYPES = {"f16": jnp.float16, "f32": jnp.float32}


class KVMemory:
    """Regions for `n_ctx` cells, sized once and never grown."""

    def __init__(
        self, hp: HParams, *, n_ctx: int, kv_format: tuple[str, str], device: Device
    ) -> None:
        for kind in kv_format:
            if kind not in KV_TYPES:
                raise ModelError(
                    f"KV type {kind!r} is not supported; supported: {', '.join(KV_TYPES)}"
                )
        self._device = device
        self.n_ctx = n_ctx
        self.n_cells = math.ceil(n_ctx / BLOCK) * BLOCK
        heads = hp.n_layer * hp.n_head_kv
        # All layers lie in one region of K and one of V: every array that goes through a step
        # costs a microsecond or two of it.
        self._layout = (
            ((heads, self.n_cells, hp.head_dim_k), KV_TYPES[kv_format[0]]),
            ((heads, self.n_cells, hp.head_dim_v), KV_TYPES[kv_format[1]]),
        )
        self._regions: tuple[Array, ...] | None = None
        self._n_past = 0

    @property
    def n_past(self) -> int:
        """Tokens in the memory, which is also the next position."""
        return self._n_past

    @property
    def lost(self) -> bool:
        """Whether the regions were donated to a step whose outputs never came back."""
        return self._regions is not None and self._regions[0].is_deleted()

    def abstract_regions(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and types of the regions, to trace with."""
        sharding = jax.sharding.SingleDeviceSharding(self._device)
        return tuple(jax.ShapeDtypeStruct(s, t, sharding=sharding) for s, t in self._layout)

    def regions(self) -> tuple[Array, ...]:
        """The regions, to be donated to a step whose outputs go to `advance`.

        They are made on the device, at first use: one that came from the host would not be
        donated in place.
        """
        if self._regions is None:
            self._regions = tuple(
                jnp.zeros(shape, dtype, device=self._device) for shape, dtype in self._layout
            )
        return self._regions

    def free_cells(self) -> int:
        return self.n_ctx - self._n_past

    def advance(self, regions: tuple[Array, ...], n_tokens: int) -> None:
        """Take back the regions of a step that has written `n_tokens` at the cursor."""
        self._regions = regions
        self._n_past += n_tokens

    def truncate(self, n_past: int) -> None:
        """Forget all but the first `n_past` tokens."""
        if not 0 <= n_past <= self._n_past:
            raise ValueError(f"cannot truncate {self._n_past} tokens to {n_past}")
        self._n_past = n_past

    def drop(self) -> None:
        """Forget everything, the regions too: a step failed after they were donated to it."""
        self._regions = None
        self._n_past = 0
