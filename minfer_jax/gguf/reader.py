"""One GGUF file -> checked metadata and tensor records over a read-only memory map.

Reads GGUF v2 and v3, little-endian. Every count, length and offset is a Python integer that is
compared with what remains of the file before anything is allocated, so a hostile file costs no
more than its own size. Must not know what a key means (but for `general.alignment`, which moves
the data), how tensors are packed, or that a model may be split over several files.
"""

import mmap
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from minfer_jax.errors import GGUFError
from minfer_jax.gguf.types import BLOCK_SIZES, GGMLType, TensorInfo

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
# 2^31 is a power of two as well, but nothing real is aligned to more than a huge page.
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4
# ggml keeps tensor names in 64 bytes with a final zero; the GGUF spec bounds keys to 2^16 - 1.
MAX_TENSOR_NAME = 63
MAX_KEY = (1 << 16) - 1
MAX_ARRAY_DEPTH = 4

_U32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
_TYPE_NAMES = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array")
_TYPE_NAMES += ("u64", "i64", "f64")
_SCALARS = {
    vtype: (struct.Struct(f"<{code}"), np.dtype(f"<{dtype}"))
    for vtype, code, dtype in [
        (0, "B", "u1"),
        (1, "b", "i1"),
        (2, "H", "u2"),
        (3, "h", "i2"),
        (_U32, "I", "u4"),
        (5, "i", "i4"),
        (6, "f", "f4"),
        (_BOOL, "B", "u1"),
        (10, "Q", "u8"),
        (11, "q", "i8"),
        (12, "d", "f8"),
    ]
}
_UINT32, _UINT64 = struct.Struct("<I"), struct.Struct("<Q")

# The least that one entry can take, for a check of counts before the first entry is read.
_MIN_KV = 8 + 1 + 4 + 1
_MIN_TENSOR = 8 + 1 + 4 + 8 + 4 + 8
_MIN_STRING, _MIN_ARRAY = 8, 4 + 8

# What people really hand to a GGUF reader by mistake.
_OTHER_FILES = (
    ((b"ggml", b"lmgg", b"fmgg", b"tjgg", b"algg"), "a file of the time before GGUF; convert it"),
    ((b"version https://git-lfs",), "a git-lfs pointer; fetch the real file with `git lfs pull`"),
    ((b"<!DOCTYPE", b"<!doctype", b"<html"), "a web page; the download went wrong"),
    ((b"PK\x03\x04",), "a zip or PyTorch file"),
)


@dataclass(frozen=True)
class Shard:
    """One parsed file. `data` is the whole file as read-only uint8 over the memory map."""

    path: Path
    version: int
    alignment: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: np.ndarray


def read_shard(path: Path, index: int = 0) -> Shard:
    """Map one file and parse its header; `index` is stored as every tensor's `shard`.

    Raises GGUFError, and nothing else, for whatever is wrong with the file or its contents.
    """
    buffer = _map_file(path)
    cursor = _Cursor(path, buffer)
    version, n_tensors, n_kv = _read_header(cursor)
    metadata, alignment = _read_metadata(cursor, n_kv)
    tensors = _read_tensors(cursor, n_tensors, alignment, index)
    _check_overlap(path, tensors)
    return Shard(path, version, alignment, metadata, tensors, cursor.data)


def _map_file(path: Path) -> mmap.mmap:
    try:
        mode = path.stat().st_mode
        # Checked before opening: opening a pipe would block.
        if stat.S_ISDIR(mode):
            raise GGUFError(f"{path}: is a directory, not a GGUF file")
        if not stat.S_ISREG(mode):
            raise GGUFError(f"{path}: is not a regular file")
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise GGUFError(f"{path}: not a GGUF file: it is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise GGUFError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        # ValueError: a path with a zero byte, or a file that became empty after the check.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise GGUFError(f"{path}: cannot be opened: {reason}") from None


class _Cursor:
    """A position in the map; each read checks the bytes that remain, then moves on."""

    def __init__(self, path: Path, buffer: mmap.mmap):
        self.path = path
        self.buffer = buffer
        self.data = np.frombuffer(buffer, np.uint8)
        self.size = len(buffer)
        self.pos = 0

    def fail(self, what: str) -> NoReturn:
        raise GGUFError(f"{self.path}: {what}")

    def need(self, nbytes: int, what: str) -> None:
        left = self.size - self.pos
        if nbytes > left:
            self.fail(f"{what} needs {nbytes} bytes but the file ends after {left} (truncated?)")

    def unpack(self, form: struct.Struct, what: str) -> Any:
        self.need(form.size, what)
        (value,) = form.unpack_from(self.buffer, self.pos)
        self.pos += form.size
        return value

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.unpack(_UINT64, f"length of {what}")
        if limit is not None and length > limit:
            self.fail(f"{what} is {length} bytes long, allowed: at most {limit}")
        self.need(length, what)
        self.pos += length
        return _text(self.buffer[self.pos - length : self.pos])

    def strings(self, count: int, what: str) -> list[str]:
        # The one hot loop of an open (a quarter million tokens): no call per element but these.
        buffer, size, pos = self.buffer, self.size, self.pos
        length_at = _UINT64.unpack_from
        out: list[str] = []
        for i in range(count):
            start = pos + 8
            if start > size:
                self.fail(f"{what}[{i}] starts past the end of the file (truncated?)")
            pos = start + length_at(buffer, pos)[0]
            if pos > size:
                self.fail(f"{what}[{i}] is {pos - start} bytes long, {size - start} remain")
            out.append(buffer[start:pos].decode("utf-8", "surrogateescape"))
        self.pos = pos
        return out

    def numbers(self, count: int, vtype: int, what: str) -> np.ndarray:
        dtype = _SCALARS[vtype][1]
        self.need(count * dtype.itemsize, what)
        end = self.pos + count * dtype.itemsize
        values = self.data[self.pos : end].view(dtype)
        self.pos = end
        if vtype != _BOOL:
            return values
        if values.max(initial=0) > 1:
            self.fail(f"{what} holds a byte {values.max()}, allowed: 0 or 1")
        return values.view(np.bool_)


def _text(raw: bytes) -> str:
    """UTF-8 in which broken bytes survive and can be had back with the same error handler."""
    return raw.decode("utf-8", "surrogateescape")


def _read_header(cursor: _Cursor) -> tuple[int, int, int]:
    """-> version, number of tensors, number of metadata pairs."""
    start = cursor.buffer[:32]
    if start[:4] != MAGIC:
        hint = next((h for magics, h in _OTHER_FILES if start.startswith(magics)), None)
        found = f"it looks like {hint}" if hint else f"it starts with {start[:4]!r}"
        cursor.fail(f"not a GGUF file: {found}")
    cursor.pos = 4
    version = cursor.unpack(_UINT32, "version")
    if version and version & 0xFFFF == 0:
        cursor.fail("is a big-endian GGUF file, allowed: little-endian; convert it")
    if version not in VERSIONS:
        cursor.fail(f"GGUF version {version} is not supported, allowed: 2 or 3")
    n_tensors = cursor.unpack(_UINT64, "tensor count")
    n_kv = cursor.unpack(_UINT64, "metadata count")
    left = cursor.size - cursor.pos
    if n_kv * _MIN_KV + n_tensors * _MIN_TENSOR > left:
        cursor.fail(f"{n_kv} metadata pairs and {n_tensors} tensors do not fit into {left} bytes")
    return version, n_tensors, n_kv


def _read_metadata(cursor: _Cursor, n_kv: int) -> tuple[dict[str, Any], int]:
    """-> the metadata in file order, and the alignment of the data section."""
    metadata: dict[str, Any] = {}
    alignment = DEFAULT_ALIGNMENT
    for i in range(n_kv):
        key = cursor.string(f"metadata key {i}", MAX_KEY)
        if not key:
            cursor.fail(f"metadata key {i} is empty")
        if key in metadata:
            cursor.fail(f"duplicate key {key!r}")
        vtype = cursor.unpack(_UINT32, f"type of key {key!r}")
        metadata[key] = _read_value(cursor, vtype, f"key {key!r}", 0)
        if key == "general.alignment":
            alignment = _check_alignment(cursor, vtype, metadata[key])
    return metadata, alignment


def _check_alignment(cursor: _Cursor, vtype: int, value: Any) -> int:
    if vtype != _U32:
        cursor.fail(f"key 'general.alignment' is of type {_TYPE_NAMES[vtype]}, allowed: u32")
    if not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        allowed = f"a power of two up to {MAX_ALIGNMENT}"
        cursor.fail(f"key 'general.alignment' is {value}, allowed: {allowed}")
    return value


def _read_value(cursor: _Cursor, vtype: int, what: str, depth: int) -> Any:
    if vtype == _STRING:
        return cursor.string(what)
    if vtype == _ARRAY:
        return _read_array(cursor, what, depth + 1)
    if vtype not in _SCALARS:
        cursor.fail(f"{what} has value type {vtype}, allowed: 0 to 12")
    value = cursor.unpack(_SCALARS[vtype][0], what)
    if vtype != _BOOL:
        return value
    if value > 1:
        cursor.fail(f"{what} is a bool with byte {value}, allowed: 0 or 1")
    return bool(value)


def _read_array(cursor: _Cursor, what: str, depth: int) -> list[Any] | np.ndarray:
    if depth > MAX_ARRAY_DEPTH:
        cursor.fail(f"{what} nests arrays deeper than {MAX_ARRAY_DEPTH}")
    vtype = cursor.unpack(_UINT32, f"element type of {what}")
    count = cursor.unpack(_UINT64, f"element count of {what}")
    if vtype == _STRING:
        cursor.need(count * _MIN_STRING, what)
        return cursor.strings(count, what)
    if vtype == _ARRAY:
        cursor.need(count * _MIN_ARRAY, what)
        return [_read_array(cursor, f"{what}[{i}]", depth + 1) for i in range(count)]
    if vtype not in _SCALARS:
        cursor.fail(f"{what} has element type {vtype}, allowed: 0 to 12")
    return cursor.numbers(count, vtype, what)


def _read_tensors(
    cursor: _Cursor, n_tensors: int, alignment: int, index: int
) -> dict[str, TensorInfo]:
    records: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for i in range(n_tensors):
        name = cursor.string(f"name of tensor {i}", MAX_TENSOR_NAME)
        if not name:
            cursor.fail(f"name of tensor {i} is empty")
        if name in records:
            cursor.fail(f"duplicate tensor name {name!r}")
        shape = _read_shape(cursor, name)
        type_id = cursor.unpack(_UINT32, f"type of tensor {name!r}")
        records[name] = shape, type_id, cursor.unpack(_UINT64, f"offset of tensor {name!r}")
    start = -(-cursor.pos // alignment) * alignment
    return {
        name: _place(cursor, name, shape, type_id, start, offset, alignment, index)
        for name, (shape, type_id, offset) in records.items()
    }


def _read_shape(cursor: _Cursor, name: str) -> tuple[int, ...]:
    n_dims = cursor.unpack(_UINT32, f"dimension count of tensor {name!r}")
    if not 1 <= n_dims <= MAX_DIMS:
        cursor.fail(f"tensor {name!r} has {n_dims} dimensions, allowed: 1 to {MAX_DIMS}")
    ne = [cursor.unpack(_UINT64, f"dimension of tensor {name!r}") for _ in range(n_dims)]
    if any(not 0 < n < 1 << 63 for n in ne):
        cursor.fail(f"tensor {name!r} has dimensions {ne}, allowed: 1 to 2^63-1 each")
    return tuple(reversed(ne))


def _place(
    cursor: _Cursor,
    name: str,
    shape: tuple[int, ...],
    type_id: int,
    start: int,
    offset: int,
    alignment: int,
    index: int,
) -> TensorInfo:
    """Check one record against the file. The padding after the last tensor may be missing."""
    if offset % alignment:
        cursor.fail(f"tensor {name!r} is at offset {offset}, not a multiple of {alignment}")
    kind = GGMLType(type_id) if type_id in BLOCK_SIZES else None
    nbytes = None
    if kind is not None:
        block, block_bytes = BLOCK_SIZES[kind]
        if shape[-1] % block:
            cursor.fail(
                f"tensor {name!r} of type {kind.name} (id {type_id}) has rows of {shape[-1]}"
                f" values, allowed: a multiple of {block}"
            )
        n_values = 1
        for n in shape:
            n_values *= n
        nbytes = n_values // block * block_bytes
    # An unknown type has an unknown size, but at least a byte.
    end = start + offset + (1 if nbytes is None else nbytes)
    if end > cursor.size:
        cursor.fail(
            f"tensor {name!r} ends at byte {end} but the file has {cursor.size} (truncated?)"
        )
    return TensorInfo(
        name=name,
        shape=shape,
        type=kind,
        type_id=type_id,
        offset=start + offset,
        nbytes=nbytes,
        shard=index,
    )


def _check_overlap(path: Path, tensors: dict[str, TensorInfo]) -> None:
    last, last_end = None, 0
    for info in sorted(tensors.values(), key=lambda t: t.offset):
        if info.offset < last_end:
            raise GGUFError(f"{path}: the data of tensors {last!r} and {info.name!r} overlap")
        last, last_end = info.name, info.offset + (info.nbytes or 1)
