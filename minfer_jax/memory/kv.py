"""The host's side of the KV memory: sequences in streams of their own.

A stream is a straight run of cells in the regions; its cell i holds position i of its sequence. A
sequence's length is the truth: what lies past it is garbage that nobody reads, so going back is
O(1) and touches no region.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from minfer_jax.device import Device
from minfer_jax.errors import ModelError
from minfer_jax.models.hparams import HParams
from minfer_jax.ops.attention import BLOCK

KV_TYPES = {"f16": jnp.float16, "f32": jnp.float32}


class KVMemory:
    """Regions for `n_ctx` cells, sized once, never grown, shared evenly by `n_seq_max` streams."""

    def __init__(
        self,
        hp: HParams,
        *,
        n_ctx: int,
        n_seq_max: int = 1,
        kv_format: tuple[str, str],
        device: Device,
    ) -> None:
        for kind in kv_format:
            if kind not in KV_TYPES:
                raise ModelError(
                    f"KV type {kind!r} is not supported; supported: {', '.join(KV_TYPES)}"
                )
        self._device = device
        self.n_ctx_seq = n_ctx // n_seq_max
        """Tokens that a sequence can hold."""
        self._stride = math.ceil(self.n_ctx_seq / BLOCK) * BLOCK
        self.n_cells = n_seq_max * self._stride
        heads = hp.n_layer * hp.n_head_kv
        # All layers lie in one region of K and one of V: every array that goes through a step
        # costs a microsecond or two of it.
        self._layout = (
            ((heads, self.n_cells, hp.head_dim_k), KV_TYPES[kv_format[0]]),
            ((heads, self.n_cells, hp.head_dim_v), KV_TYPES[kv_format[1]]),
        )
        self._regions: tuple[Array, ...] | None = None
        self._lengths = [0] * n_seq_max

    @property
    def n_seq_max(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of every sequence."""
        return tuple(self._lengths)

    def n_past(self, seq: int = 0) -> int:
        """Tokens of a sequence, which is also its next position."""
        return self._lengths[seq]

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

    def free_cells(self, seq: int = 0) -> int:
        return self.n_ctx_seq - self._lengths[seq]

    def first_cell(self, seq: np.ndarray) -> np.ndarray:
        """Where the streams of sequences int32 [n] begin."""
        return seq * np.int32(self._stride)

    def advance(self, regions: tuple[Array, ...], seqs: list[int]) -> None:
        """Take back the regions of a step that has written a token of each of `seqs`."""
        self._regions = regions
        for seq in seqs:
            self._lengths[seq] += 1

    def truncate(self, n_past: int, seq: int = 0) -> None:
        """Forget all but the first `n_past` tokens of a sequence."""
        if not 0 <= n_past <= self._lengths[seq]:
            raise ValueError(f"cannot truncate {self._lengths[seq]} tokens to {n_past}")
        self._lengths[seq] = n_past

    def copy(self, source: int, target: int, n: int) -> None:
        """Make the first `n` tokens of `source` all that `target` holds."""
        if n:
            starts = [np.int32(seq * self._stride) for seq in (source, target)]
            self._lengths[target] = 0
            self._regions = _copy_cells(self.regions(), *starts, size=self._stride)
        self._lengths[target] = n

    def drop(self) -> None:
        """Forget everything, the regions too: a step failed after they were donated to it."""
        self._regions = None
        self._lengths = [0] * self.n_seq_max


@partial(jax.jit, static_argnames="size", donate_argnums=0)
def _copy_cells(
    regions: tuple[Array, ...], source: Array, target: Array, *, size: int
) -> tuple[Array, ...]:
    """The regions, `size` cells from `source` on copied to those from `target` on."""

    def copy(region: Array) -> Array:
        cells = lax.dynamic_slice_in_dim(region, source, size, axis=1)
        return lax.dynamic_update_slice_in_dim(region, cells, target, axis=1)

    return tuple(copy(region) for region in regions)
