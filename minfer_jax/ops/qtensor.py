"""A weight that stays quantized: the file's blocks split into planes, dequantized inside graphs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from minfer_jax.gguf import BLOCK_FORMATS, GGMLType


@partial(jax.tree_util.register_dataclass, data_fields=["planes"], meta_fields=["type", "shape"])
@dataclass(frozen=True)
class QTensor:
    """A matrix [out, in] as the planes of its block format.

    `planes` is data; `type` and `shape` are static. Every plane is [out, n_blocks, ...], so a
    range or a gather of rows is the same range or gather of every plane.
    """

    planes: dict[str, Array]
    type: GGMLType
    shape: tuple[int, int]

    def rows(self, start: int, stop: int) -> QTensor:
        """The rows start..stop as a view (a static slice, folded into whatever reads it)."""
        if start == 0 and stop == self.shape[0]:
            return self
        planes = {k: p[start:stop] for k, p in self.planes.items()}
        return QTensor(planes, self.type, (stop - start, self.shape[1]))

    def dynamic_rows(self, start: Array, n: int) -> QTensor:
        """The `n` rows from a traced `start` on, which must not lie past the end."""
        planes = {k: lax.dynamic_slice_in_dim(p, start, n) for k, p in self.planes.items()}
        return QTensor(planes, self.type, (n, self.shape[1]))

    def take(self, ids: Array) -> Array:
        """Rows `ids` [n], dequantized: float32 [n, in]. The caller has checked the ids."""
        planes = {k: jnp.take(p, ids, axis=0, mode="clip") for k, p in self.planes.items()}
        return BLOCK_FORMATS[self.type].dequantize(planes, jnp)

    def dequantize(self) -> Array:
        """The whole matrix: float32 [out, in]."""
        return BLOCK_FORMATS[self.type].dequantize(self.planes, jnp)
