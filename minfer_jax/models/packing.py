"""Forms of matrices: what multiplies them decides how they lie in memory.

Each form has a packer: groups of tensors of one type and row length, joined row-wise, become a
matrix each. Knows files and devices, not models.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from minfer_jax.device import Device, threads
from minfer_jax.errors import UsageError
from minfer_jax.gguf import BLOCK_FORMATS, GGMLType, GGUFFile, TensorInfo
from minfer_jax.ops.cpu.library import TILE_ROWS, can_split, library, n_tiles, register_targets
from minfer_jax.ops.cpu.tiled import TiledTensor
from minfer_jax.ops.qtensor import QTensor
from minfer_jax.ops.unrolled import UnrolledTensor
from minfer_jax.ops.unrolled import pack as pack_unrolled

Matrix = QTensor | TiledTensor | UnrolledTensor
Group = list[TensorInfo]
Packed = Callable[[Group], None]
"""Told of each group that has been packed."""

_ALIGN = 64  # what jax's CPU client wants of host memory to use it without a copy


class WeightForm(enum.Enum):
    """How matrices are kept, which decides what multiplies them."""

    PLANES = "planes"
    """The file's blocks, split into planes; XLA dequantizes them to float32. For accelerators."""
    UNROLLED = "unrolled"
    """Planes with the output rows innermost, which XLA's CPU compiler vectorizes. Float32."""
    TILED = "tiled"
    """Tiles for the native kernels, which round activations to int8. The CPU only."""


def weight_form(device: Device, *, exact: bool, kernels: str) -> WeightForm:
    """The fastest form for `device`; `kernels` is `Settings.kernels`.

    Raises `UsageError` for kernels that are unknown or do not run here.
    """
    found = library()
    chosen = kernels not in ("auto", "xla")
    if chosen and (found is None or kernels not in found.variants):
        here = ", ".join(["auto", *(found.variants if found else ()), "xla"])
        raise UsageError(f"MINFER_KERNELS is {kernels!r}; allowed here: {here}")
    if device.platform != "cpu":
        return WeightForm.PLANES
    if exact or kernels == "xla" or found is None:
        return WeightForm.UNROLLED
    if not register_targets():
        if chosen:
            raise UsageError(
                f"MINFER_KERNELS={kernels}: the kernels were built for another jaxlib: install"
                " this package again"
            )
        return WeightForm.UNROLLED
    found.use(kernels if chosen else found.variants[0])
    return WeightForm.TILED


def pack_matrices(
    form: WeightForm,
    file: GGUFFile,
    groups: list[Group],
    device: Device,
    packed: Packed,
    head: str | None = None,
) -> list[Matrix]:
    """A matrix on `device` for each group of tensors.

    Of the tensor called `head`, products of few rows need most values only roughly: its tiles have
    the lower bits of quants apart where the type allows it.
    """
    if form is WeightForm.TILED:
        return _tiled(file, groups, device, packed, head)
    pack = _planes if form is WeightForm.PLANES else _unrolled
    return pack(file, groups, device, packed)


def rows_of(info: TensorInfo) -> int:
    """Rows of a tensor as one matrix: those of several matrices lie below each other."""
    return math.prod(info.shape[:-1])


def padded_rows(form: WeightForm, n: int) -> int:
    """Rows from the beginning of a tensor of n rows to that of the next one in its matrix."""
    return n_tiles(n) * TILE_ROWS if form is WeightForm.TILED else n


def _planes(file: GGUFFile, groups: list[Group], device: Device, packed: Packed) -> list[Matrix]:
    def matrix(group: Group) -> Matrix:
        unpack = BLOCK_FORMATS[_type(group)].unpack
        parts = [unpack(raw) for raw in _raw(file, group)]
        shape = _shape(group)
        planes = {}
        for name, first in parts[0].items():
            whole = (shape[0], *first.shape[1:])
            host = aligned(whole, first.dtype, [part[name] for part in parts])
            planes[name] = jax.device_put(host, device)
        packed(group)
        return QTensor(planes, _type(group), shape)

    return [matrix(group) for group in groups]


def _unrolled(file: GGUFFile, groups: list[Group], device: Device, packed: Packed) -> list[Matrix]:
    def matrix(group: Group) -> Matrix:
        planes = {}
        for name, plane in pack_unrolled(_raw(file, group), _type(group), _empty).items():
            plane.flags.writeable = False
            planes[name] = jax.device_put(plane, device)
        packed(group)
        return UnrolledTensor(planes, _type(group), _shape(group))

    return [matrix(group) for group in groups]


def _tiled(
    file: GGUFFile, groups: list[Group], device: Device, packed: Packed, head: str | None
) -> list[Matrix]:
    """All tiles lie in one array: an argument of every step instead of hundreds, and a piece of
    memory that the system gives large pages, with which a decode step takes a tenth less time.
    """
    kernels = library()
    assert kernels is not None
    tiles = [sum(n_tiles(rows_of(info)) for info in group) for group in groups]
    splits = [[info.name for info in g] == [head] and can_split(_type(g)) for g in groups]
    sizes = [
        n * kernels.tile_bytes(_type(group), _shape(group)[1], split=split)
        for n, group, split in zip(tiles, groups, splits, strict=True)
    ]
    starts = np.cumsum([0, *sizes]).tolist()
    memory = _empty((starts[-1],), np.dtype(np.uint8))
    with ThreadPoolExecutor(threads(), thread_name_prefix="pack") as pool:
        for group, split, start, size in zip(groups, splits, starts, sizes, strict=False):
            n_in, out = _shape(group)[1], memory[start : start + size]
            kernels.pack(_raw(file, group), _type(group), n_in, out, pool, split=split)
            packed(group)
    memory.flags.writeable = False
    array = jax.device_put(memory, device)
    return [
        TiledTensor(array, _type(group), (n * TILE_ROWS, _shape(group)[1]), start, split)
        for group, n, start, split in zip(groups, tiles, starts, splits, strict=False)
    ]


def _type(group: Group) -> GGMLType:
    type_ = group[0].type
    assert type_ is not None
    return type_


def _shape(group: Group) -> tuple[int, int]:
    return sum(rows_of(info) for info in group), group[0].shape[-1]


def _raw(file: GGUFFile, group: Group) -> list[np.ndarray]:
    """The tensors as the file stores them: uint8 [rows, row_bytes] each."""
    return [file.raw(info.name).reshape(rows_of(info), -1) for info in group]


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any], parts: list[np.ndarray]) -> np.ndarray:
    """Parts joined along axis 0 in aligned, read-only memory: the CPU client takes it as it is."""
    out = _empty(shape, dtype)
    np.concatenate(parts, out=out)
    out.flags.writeable = False
    return out


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = np.empty(nbytes + _ALIGN, np.uint8)
    offset = -buffer.ctypes.data % _ALIGN
    return buffer[offset : offset + nbytes].view(dtype).reshape(shape)
