"""From a checked file to packed arrays on the device.

Quantized tensors stay quantized. Tensors that are multiplied with the same activations are
joined row-wise where their types are equal; a tensor is then a range of rows of a packed array,
which serves the fused and the separate form alike.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import jax
import numpy as np
from jax import Array

from minfer_jax.device import Device
from minfer_jax.gguf import BLOCK_FORMATS, GGUFFile, TensorInfo
from minfer_jax.models.packing import (
    Matrix,
    WeightForm,
    aligned,
    pack_matrices,
    padded_rows,
    rows_of,
)
from minfer_jax.models.tensors import TensorList, check_tensors

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


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

    arrays: Mapping[str, Matrix | Array]
    ranges: Mapping[str, RowRange]

    def __contains__(self, name: str) -> bool:
        return name in self.ranges or name in self.arrays

    def vector(self, name: str) -> Array:
        """A tensor that is no matrix, such as a norm's weight or a bias: float32."""
        value = self.arrays[name]
        assert not isinstance(value, Matrix), name
        return value

    def matrix(self, name: str) -> Matrix:
        """A tensor's own rows."""
        r = self.ranges[name]
        return self.packed(r.array).rows(r.start, r.stop)

    def packed(self, array: str) -> Matrix:
        """A whole packed array."""
        value = self.arrays[array]
        assert isinstance(value, Matrix), array
        return value


def head_of(names: Container[str]) -> str:
    """The tensor that makes the logits: without a head of its own a model reads its embeddings
    again."""
    return "output.weight" if "output.weight" in names else "token_embd.weight"


class Weights:
    """A model's weights on one device, flattened once: every step gets the same flat tuple.

    An array that several matrices lie in is in it once, as each costs every step half a
    microsecond.
    """

    def __init__(self, arrays: dict[str, Matrix | Array], ranges: Mapping[str, RowRange]) -> None:
        leaves, self._treedef = jax.tree_util.tree_flatten(arrays)
        distinct = {id(leaf): leaf for leaf in leaves}
        self.leaves: tuple[Array, ...] = tuple(distinct.values())
        order = {key: i for i, key in enumerate(distinct)}
        self._leaf_of = [order[id(leaf)] for leaf in leaves]
        self._ranges = MappingProxyType(dict(ranges))

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    def view(self, leaves: Iterable[Array]) -> WeightView:
        """The named weights of a flat tuple, real or traced."""
        distinct = tuple(leaves)
        all_leaves = [distinct[i] for i in self._leaf_of]
        return WeightView(jax.tree_util.tree_unflatten(self._treedef, all_leaves), self._ranges)


def load_weights(
    file: GGUFFile,
    wanted: TensorList,
    device: Device,
    form: WeightForm,
    progress: Progress | None = None,
    *,
    split_head: bool = False,
) -> Weights:
    """Pack every wanted tensor of `file` onto `device`; raises as `check_tensors`.

    With `split_head` a decode step may read only the upper bits of the head where a logit is far
    below the largest. For models whose logits are the head's product and nothing more.

    On the CPU the packed host arrays are the device's; elsewhere each is let go once it has been
    copied.
    """
    infos = {info.name: info for info in check_tensors(file, wanted)}
    total = sum(info.nbytes or 0 for info in infos.values())
    done = 0

    def packed(members: list[TensorInfo]) -> None:
        nonlocal done
        done += sum(info.nbytes or 0 for info in members)
        if progress:
            progress(done, total)

    groups = [[infos[name] for name in names] for names in _packs(infos, wanted.groups)]
    plain = wanted.plain
    matrices = [members for members in groups if members[0].name not in plain]
    arrays: dict[str, Matrix | Array] = {}
    ranges: dict[str, RowRange] = {}
    head = head_of(infos) if split_head else None
    for members, matrix in zip(
        matrices, pack_matrices(form, file, matrices, device, packed, head), strict=True
    ):
        array = "+".join(info.name for info in members)
        arrays[array] = matrix
        start = 0
        for info in members:
            n = rows_of(info)
            ranges[info.name] = RowRange(array, start, start + n)
            start += padded_rows(form, n)
    for members in groups:
        name = members[0].name
        if name in plain:
            arrays[name] = _plain(file, members[0], plain[name], device)
            packed(members)
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


def _plain(file: GGUFFile, info: TensorInfo, shape: tuple[int, ...], device: Device) -> Array:
    """A tensor as the file has it, dequantized: float32 of `shape`."""
    assert info.type is not None
    fmt = BLOCK_FORMATS[info.type]
    raw = file.raw(info.name).reshape(rows_of(info), -1)
    values = fmt.dequantize(fmt.unpack(raw), np).reshape(shape)
    return jax.device_put(aligned(values.shape, values.dtype, [values]), device)
