"""A model on disk as the rest of the package sees it: metadata, tensor records, raw bytes.

Puts the parts of a split model together and gives typed access to metadata. Must not know any
architecture, tokenizer or block layout: it hands out values and bytes.
"""

import math
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from minfer_jax.errors import GGUFError
from minfer_jax.gguf.reader import Shard
from minfer_jax.gguf.split import merge_tensors, read_shards
from minfer_jax.gguf.types import TensorInfo

D = TypeVar("D")
_REQUIRED: Any = object()
_ARRAY_KINDS = {"int": "iu", "float": "f", "bool": "b"}


def open_gguf(path: str | os.PathLike[str]) -> "GGUFFile":
    """Open a GGUF file (or any part of a split one): header parsed and checked, data mapped.

    Raises GGUFError, and nothing else, if the file cannot be read or is not valid.
    """
    given = Path(path)
    return GGUFFile(given, read_shards(given))


class GGUFFile:
    """An open model file. Its arrays are read-only views of the memory map and may outlive it.

    `metadata` keeps the file's order: numbers, bools and strings as Python values, arrays of
    numbers as numpy views (little-endian, possibly unaligned), arrays of strings as list[str],
    arrays of arrays as lists. Strings are UTF-8; bytes that are not can be had back with
    `text.encode("utf-8", "surrogateescape")`. Of a split model it is the first part's.
    """

    def __init__(self, path: Path, shards: tuple[Shard, ...]):
        self.path = path
        self.paths = tuple(shard.path for shard in shards)
        self.version = shards[0].version
        self.alignment = shards[0].alignment
        self.metadata: dict[str, Any] = shards[0].metadata
        self.tensors: dict[str, TensorInfo] = merge_tensors(shards)
        self.nbytes = sum(shard.data.nbytes for shard in shards)
        self._data: tuple[np.ndarray, ...] | None = tuple(shard.data for shard in shards)

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the map. It is unmapped when the last array over it is gone, never before."""
        self._data = None

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes of a tensor: read-only uint8 [nbytes], a view of the map.

        Raises GGUFError for an unknown name, for a type id without a known size, after close().
        """
        info = self.tensors.get(name)
        if info is None:
            raise GGUFError(f"{self.path}: missing tensor {name!r}")
        if info.nbytes is None:
            raise GGUFError(
                f"{self.paths[info.shard]}: tensor {name!r} has {info.type_name()}, which is not"
                " supported; requantize the model"
            )
        if self._data is None:
            raise GGUFError(f"{self.path}: is closed; tensor {name!r} cannot be read")
        return self._data[info.shard][info.offset : info.offset + info.nbytes]

    def get_int(
        self, key: str, default: D = _REQUIRED, *, lo: int | None = None, hi: int | None = None
    ) -> int | D:
        """An integer of any stored width within lo..hi; a bool is not an integer.

        Like all of these: without a default a missing key is a GGUFError; a default is returned
        as it is; a value of another type or out of range is a GGUFError that names file and key.
        """
        allowed = "an integer" + _range_text(lo, hi)
        return self._get(key, default, allowed, lambda v: type(v) is int and _within(v, lo, hi))

    def get_float(
        self, key: str, default: D = _REQUIRED, *, lo: float | None = None, hi: float | None = None
    ) -> float | D:
        """A finite number within lo..hi; an integer is read as one."""

        def fits(value: Any) -> bool:
            return type(value) in (int, float) and math.isfinite(value) and _within(value, lo, hi)

        value = self._get(key, default, "a finite number" + _range_text(lo, hi), fits)
        return float(value) if type(value) is int and key in self.metadata else value

    def get_bool(self, key: str, default: D = _REQUIRED) -> bool | D:
        """A bool; an integer is not one."""
        return self._get(key, default, "a bool", lambda v: type(v) is bool)

    def get_str(self, key: str, default: D = _REQUIRED) -> str | D:
        """A string, in which bytes that are not UTF-8 are surrogate escapes."""
        return self._get(key, default, "a string", lambda v: type(v) is str)

    def get_array(
        self, key: str, default: D = _REQUIRED, *, kind: str | None = None, n: int | None = None
    ) -> Any | D:
        """An array: a numpy view, list[str] or a list of arrays.

        `kind` ("int", "float", "bool" or "str") restricts the element type, `n` the length.
        """

        def fits(value: Any) -> bool:
            if not isinstance(value, list | np.ndarray) or (n is not None and len(value) != n):
                return False
            if kind is None:
                return True
            if isinstance(value, np.ndarray):
                return value.dtype.kind in _ARRAY_KINDS.get(kind, "")
            return kind == "str" and all(type(v) is str for v in value)

        allowed = "an array" + (f" of {n}" if n is not None else "")
        return self._get(key, default, allowed + (f" ({kind})" if kind else ""), fits)

    def _get(self, key: str, default: Any, allowed: str, fits: Callable[[Any], bool]) -> Any:
        if key not in self.metadata:
            if default is _REQUIRED:
                raise GGUFError(f"{self.path}: missing key {key!r}")
            return default
        value = self.metadata[key]
        if not fits(value):
            raise GGUFError(f"{self.path}: key {key!r} is {_shown(value)}, allowed: {allowed}")
        return value


def _within(value: float, lo: float | None, hi: float | None) -> bool:
    return (lo is None or lo <= value) and (hi is None or value <= hi)


def _range_text(lo: float | None, hi: float | None) -> str:
    if lo is None and hi is None:
        return ""
    if hi is None:
        return f" of at least {lo}"
    return f" of at most {hi}" if lo is None else f" from {lo} to {hi}"


def _shown(value: Any) -> str:
    """The value in at most some 60 characters of one line."""
    if isinstance(value, np.ndarray):
        return f"an array of {len(value)} {value.dtype.name}"
    if isinstance(value, list):
        kind = "strings" if all(type(v) is str for v in value) else "arrays"
        return f"an array of {len(value)} {kind}"
    text = repr(value[:60]) if isinstance(value, str) else repr(value)
    kind = {bool: "the bool ", str: "the string "}.get(type(value), "")
    return f"{kind}{text}"
