"""The compiled library: loading, choosing a variant, packing. Needs no jax until targets are used.

The FFI targets' names carry LAYOUT: executables kept on disk name the targets they call, and one
that was built for another layout of weights or of arguments must not find them.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from minfer_jax.errors import UsageError
from minfer_jax.gguf import GGMLType

LAYOUT = 5
"""Raised whenever tiles or the arguments of a target change, together with kLayoutVersion in
tiles.h: a library that was built from other sources is not used."""
TILE_ROWS = 16
_SPLIT = {GGMLType.Q8_0: 1008}  # kQ8_0Split in tiles.h
_TARGETS = ("linear", "experts", "take", "add_normed", "attend", "zeros")
_PACK_BYTES = 1 << 18  # of a file, that a thread packs at a time: a small matrix is several jobs


@dataclass(frozen=True)
class Library:
    """The loaded library. `variants` are the names of those that run here, best first."""

    dll: ctypes.CDLL
    variants: tuple[str, ...]

    def use(self, variant: str) -> None:
        """Run every kernel in this variant from now on, in the whole process."""
        if variant not in self.variants:
            raise UsageError(
                f"kernels {variant!r} do not run here; those that do: {', '.join(self.variants)}"
            )
        self.dll.minfer_use(self._names().index(variant))

    def tile_bytes(self, type_: GGMLType, n_cols: int, *, split: bool = False) -> int:
        """Bytes of 16 rows of `n_cols` columns; 0 if the type has no tiles."""
        return sum(self.tile_parts(type_, n_cols, split=split))

    def tile_parts(self, type_: GGMLType, n_cols: int, *, split: bool) -> tuple[int, int]:
        """The same of the first and, for a split matrix, the second part."""
        code = type_code(type_, split)
        return self.dll.minfer_tile_size(code, n_cols), self.dll.minfer_lower_size(code, n_cols)

    def pack(
        self,
        parts: Sequence[np.ndarray],
        type_: GGMLType,
        n_cols: int,
        out: np.ndarray,
        pool: Executor | None = None,
        *,
        split: bool = False,
    ) -> None:
        """Pack matrices, each uint8 [rows, row_bytes] as the file stores it, one below the other.

        Every part starts a new tile; a split matrix is one part. `out` is uint8, `tile_bytes` for
        each tile. With a `pool` its threads share the work.
        """
        assert not split or len(parts) == 1
        size, code = self.tile_bytes(type_, n_cols, split=split), type_code(type_, split)
        jobs = []
        start = 0
        for raw in parts:
            assert raw.flags.c_contiguous
            rows, row_bytes = raw.shape
            tiles = n_tiles(rows)
            step = max(1, _PACK_BYTES // (row_bytes * TILE_ROWS))
            for first in range(0, tiles, step):
                jobs.append((raw, rows, first, min(tiles, first + step), start))
            start += tiles * size
        assert size and out.nbytes == start and out.flags.c_contiguous

        def run(job: tuple[np.ndarray, int, int, int, int]) -> None:
            raw, rows, first, last, offset = job
            to = out.ctypes.data + offset
            self.dll.minfer_pack(code, raw.ctypes.data, rows, n_cols, first, last, to)

        # ctypes lets go of the interpreter's lock.
        for _ in pool.map(run, jobs) if pool else map(run, jobs):
            pass

    def _names(self) -> list[str]:
        names = []
        while name := self.dll.minfer_variant(len(names)):
            names.append(name.decode())
        return names


def can_split(type_: GGMLType) -> bool:
    """Whether tiles of this type can have the lower bits of their quants apart."""
    return type_ in _SPLIT


def type_code(type_: GGMLType, split: bool) -> int:
    """What the kernels call the type, in one piece or split."""
    return _SPLIT[type_] if split else type_.value


def n_tiles(rows: int) -> int:
    """Tiles that hold `rows` rows."""
    return -(-rows // TILE_ROWS)


@cache
def library() -> Library | None:
    """The library, or None where it was not built, cannot be loaded or is from other sources."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_kernels{suffix}")
        if path.is_file():
            break
    else:
        return None
    try:
        dll = ctypes.CDLL(str(path))
        _declare(dll)
    except (OSError, AttributeError):  # the latter for a function that it lacks
        return None
    if dll.minfer_layout() != LAYOUT:
        return None
    names = Library(dll, ())._names()
    return Library(dll, tuple(n for i, n in enumerate(names) if dll.minfer_runs_here(i)))


@cache
def register_targets() -> bool:
    """Make the kernels known to XLA under the names that `target` gives.

    False if there are none, or if this jaxlib is not compatible with the one they were built for.
    """
    import jax

    found = library()
    if found is None:
        return False
    try:
        for name in _TARGETS:
            handler = jax.ffi.pycapsule(getattr(found.dll, f"minfer_{name}"))
            jax.ffi.register_ffi_target(target(name), handler, platform="cpu")
    except jax.errors.JaxRuntimeError:
        return False
    return True


def target(name: str) -> str:
    """A kernel's name within executables."""
    return f"minfer_{name}_v{LAYOUT}"


def _declare(dll: ctypes.CDLL) -> None:
    """Types of the plain functions, so that 64-bit integers and pointers pass whole."""
    i32, i64, address = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    signatures = {
        "minfer_variant": (ctypes.c_char_p, [i32]),
        "minfer_runs_here": (i32, [i32]),
        "minfer_use": (None, [i32]),
        "minfer_layout": (i32, []),
        "minfer_tile_size": (i64, [i32, i64]),
        "minfer_lower_size": (i64, [i32, i64]),
        "minfer_pack": (None, [i32, address, i64, i64, i64, i64, address]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(dll, name)
        function.restype, function.argtypes = result, arguments
