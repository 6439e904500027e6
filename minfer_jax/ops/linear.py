"""Matrix products with packed weights."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from minfer_jax.ops.qtensor import QTensor

CPU_CHUNK = 1 << 18
"""Weights dequantized at a time when several rows share them: 1 MiB of float32, which stays in
cache until the product has read it."""
ACCELERATOR_CHUNK = 1 << 24
"""The same where a product has to be large to be fast: 64 MiB."""


def matmul(x: Array, w: QTensor, *, exact: bool, chunk: int) -> Array:
    """x [n, in] times w [out, in] transposed: float32 [n, out].

    The weight is dequantized in the graph, `chunk` values at a time. `exact` asks every backend
    for full float32 products (a GPU may otherwise use TF32 and a TPU bfloat16).
    """
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    if x.shape[0] == 1:
        # Written as a product with a transpose, XLA folds the dequantization into it.
        return jnp.matmul(x, w.dequantize().T, precision=precision)

    def product(w: QTensor) -> Array:
        return jnp.einsum("ni,oi->no", x, w.dequantize(), precision=precision)

    n_out, n_in = w.shape
    rows = max(1, chunk // n_in)
    if n_out <= rows:
        return product(w)

    def step(i: Array, y: Array) -> Array:
        # The last chunk is moved up to end with the matrix; it writes some columns twice.
        start = jnp.minimum(i * rows, n_out - rows)
        part = product(w.dynamic_rows(start, rows))
        return lax.dynamic_update_slice(y, part, (jnp.zeros_like(start), start))

    # Every column is overwritten. Plain zeros would depend on nothing, and XLA would make those
    # of all layers first.
    y = lax.pad(x[:, :1], np.float32(0.0), ((0, 0, 0), (0, n_out - 1, 0)))
    return lax.fori_loop(jnp.int32(0), jnp.int32(-(-n_out // rows)), step, y)
