"""From a checked file to packed arrays on the device.

Quantized tensors stay quantized. Tensors that are multiplied with the same activations are
joined row-wise where their types are equal; a tensor is then a range of rows of a packed array,
which serves the fused and the separate form alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import jax
import numpy as np
from jax import Array

from minfer_jax.device import Device
from minfer_jax.gguf import BLOCK_FORMATS, GGUFFile, TensorInfo
from minfer_jax.models.tensors import TensorList, check_tensors
from minfer_jax.ops.qtensor import QTensor

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

_ALIGN = 64  # what jax's CPU client wants of host memory to use it without a copy


@dataclass(frozen=True)
class RowRange:
    """Where a tensor's rows lie: array `array`, rows start..stop."""

    array: str
    start: int
    stop: int


@dataclass(frozen=True)
class WeightView:
    """Weights by the file's tensor names: arrays, or tracers of them within a graph.

    `arrays` is data; `ranges` is fixed for the model.
    """

    arrays: Mapping[str, QTensor | Array]
    ranges: Mapping[str, RowRange]

    def __contains__(self, name: str) -> bool:
        return name in self.ranges or name in self.arrays

    def vector(self, name: str) -> Array:
        """A norm weight or bias: float32 [n]."""
        value = self.arrays[name]
        assert not isinstance(value, QTensor), name
        return value

    def matrix(self, name: str) -> QTensor:
        """A tensor's own rows."""
        r = self.ranges[name]
        return self.packed(r.array).rows(r.start, r.stop)

    def packed(self, array: str) -> QTensor:
        """A whole packed array."""
        value = self.arrays[array]
        assert isinstance(value, QTensor), array
        return value


class Weights:
    """A model's weights on one device, flattened once: every step gets the same flat tuple."""

    def __init__(self, arrays: dict[str, QTensor | Array], ranges: Mapping[str, RowRange]) -> None:
        leaves, self._treedef = jax.tree_util.tree_flatten(arrays)
        self.leaves: tuple[Array, ...] = tuple(leaves)
        self._ranges = MappingProxyType(dict(ranges))

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    def view(self, leaves: Iterable[Array]) -> WeightView:
        """The named weights of a flat tuple, real or traced."""
        return WeightView(jax.tree_util.tree_unflatten(self._treedef, leaves), self._ranges)


def load_weights(
    file: GGUFFile, wanted: TensorList, device: Device, progress: Progress | None = None
) -> Weights:
    """Pack every wanted tensor of `file` onto `device`; raises as `check_tensors`.

    On the CPU the packed host arrays are the device's; elsewhere each is let go once it has been
    copied.
    """
    infos = {info.name: info for info in check_tensors(file, wanted)}
    total = sum(info.nbytes or 0 for info in infos.values())
    done = 0
    arrays: dict[str, QTensor | Array] = {}
    ranges: dict[str, RowRange] = {}
    for names in _packs(infos, wanted.groups):
        members = [infos[name] for name in names]
        if len(members[0].shape) == 1:
            arrays[names[0]] = _vector(file, members[0], device)
        else:
            array = "+".join(names)
            arrays[array] = _pack(file, members, device)
            start = 0
            for info in members:
                ranges[info.name] = RowRange(array, start, start + info.shape[0])
                start += info.shape[0]
        done += sum(info.nbytes or 0 for info in members)
        if progress:
            progress(done, total)
    return Weights(arrays, ranges)


def _packs(
    infos: Mapping[str, TensorInfo], groups: Iterable[tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """Which tensors share an array: those of one group and type; all others stand alone."""
    group_of = {name: i for i, group in enumerate(groups) for name in group}
    packs: dict[object, list[str]] = {}
    for name, info in infos.items():
        key = (group_of[name], info.type) if name in group_of else name
        packs.setdefault(key, []).append(name)
    return [tuple(names) for names in packs.values()]


def _vector(file: GGUFFile, info: TensorInfo, device: Device) -> Array:
    """A norm weight or bias: float32 [n]."""
    assert info.type is not None
    fmt = BLOCK_FORMATS[info.type]
    values = fmt.dequantize(fmt.unpack(file.raw(info.name).reshape(1, -1)), np)[0]
    return jax.device_put(_aligned(values.shape, values.dtype, [values]), device)


def _pack(file: GGUFFile, infos: list[TensorInfo], device: Device) -> QTensor:
    """Tensors of one type and row length, one below the other."""
    type_ = infos[0].type
    assert type_ is not None
    unpack = BLOCK_FORMATS[type_].unpack
    parts = [unpack(file.raw(info.name).reshape(info.shape[0], -1)) for info in infos]
    rows = sum(info.shape[0] for info in infos)
    planes = {}
    for name, first in parts[0].items():
        host = _aligned((rows, *first.shape[1:]), first.dtype, [part[name] for part in parts])
        planes[name] = jax.device_put(host, device)
    return QTensor(planes, type_, (rows, infos[0].shape[1]))


def _aligned(shape: tuple[int, ...], dtype: np.dtype, parts: list[np.ndarray]) -> np.ndarray:
    """Parts joined along axis 0 in aligned, read-only memory: the CPU client takes it as it is."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = np.empty(nbytes + _ALIGN, np.uint8)
    offset = -buffer.ctypes.data % _ALIGN
    out = buffer[offset : offset + nbytes].view(dtype).reshape(shape)
    np.concatenate(parts, out=out)
    out.flags.writeable = False
    return out
