"""Memory in large pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from minfer_jax.device import Device
from minfer_jax.ops.cpu.library import register_targets, target

Layout = tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]


def zeros(layout: Sequence[tuple[tuple[int, ...], Any]], device: Device) -> tuple[Array, ...]:
    """An array of zeros for each shape and type, made on the device.

    Of a CPU it is in large pages where the system gives them and the kernels were built: eight
    sequences with 128 cells each decode 5% faster.
    """
    if device.platform != "cpu" or not register_targets():
        return tuple(jax.numpy.zeros(shape, dtype, device=device) for shape, dtype in layout)
    with jax.default_device(device):
        return _zeros(tuple((shape, np.dtype(dtype)) for shape, dtype in layout))


@partial(jax.jit, static_argnums=0)
def _zeros(layout: Layout) -> tuple[Array, ...]:
    return tuple(
        jax.ffi.ffi_call(target("zeros"), jax.ShapeDtypeStruct(shape, dtype))()
        for shape, dtype in layout
    )
