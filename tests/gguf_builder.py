"""Builds GGUF bytes field by field with `struct`, valid ones and ones broken on purpose.

    data = gguf_bytes({"general.architecture": "llama", "x": typed("u64", 3)},
                      [f32_tensor("a", array), Tensor("b", (32, 2), 8, bytes(68))])

Metadata values find their type by themselves (bool, u32 or else i32/u64/i64, f32, string, arrays
of one element type, numpy arrays by dtype) unless wrapped in `typed`. Nothing here is checked:
every count, type, dimension and offset can be set to what a damaged or hostile file would hold.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

VALUE_TYPES = {
    "u8": (0, "B"),
    "i8": (1, "b"),
    "u16": (2, "H"),
    "i16": (3, "h"),
    "u32": (4, "I"),
    "i32": (5, "i"),
    "f32": (6, "f"),
    "bool": (7, "?"),
    "string": (8, ""),
    "array": (9, ""),
    "u64": (10, "Q"),
    "i64": (11, "q"),
    "f64": (12, "d"),
}
_NUMPY_TYPES = {
    f"{kind}{size}": name
    for kind, size, name in [
        ("u", 1, "u8"),
        ("i", 1, "i8"),
        ("u", 2, "u16"),
        ("i", 2, "i16"),
        ("u", 4, "u32"),
        ("i", 4, "i32"),
        ("f", 4, "f32"),
        ("b", 1, "bool"),
        ("u", 8, "u64"),
        ("i", 8, "i64"),
        ("f", 8, "f64"),
    ]
}


class Typed(NamedTuple):
    """A value with its GGUF type said aloud. For an array, `type` is that of the elements."""

    type: str
    value: Any


class RawValue(NamedTuple):
    """Bytes to stand where type and value of a pair would."""

    data: bytes


@dataclass
class Tensor:
    """`dims` in file order (`ne`, innermost first); `offset` None: after the previous tensor."""

    name: str | bytes
    dims: Sequence[int]
    type: int
    data: bytes = b""
    offset: int | None = None
    n_dims: int | None = None


def typed(type_: str, value: Any) -> Typed:
    return Typed(type_, value)


def f32_tensor(name: str, values: Any) -> Tensor:
    """A numpy-order array as an F32 tensor."""
    array = np.asarray(values, np.dtype("<f4"))
    return Tensor(name, array.shape[::-1], 0, array.tobytes())


def string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(value: Any) -> bytes:
    """Type id and value, as they follow a key."""
    if isinstance(value, RawValue):
        return value.data
    name, plain = value if isinstance(value, Typed) else (None, value)
    if isinstance(plain, list | tuple | np.ndarray):
        return struct.pack("<I", VALUE_TYPES["array"][0]) + _array(plain, name)
    name = name or _type_of(plain)
    return struct.pack("<I", VALUE_TYPES[name][0]) + _scalar(name, plain)


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, float):
        return "f32"
    if isinstance(value, str | bytes):
        return "string"
    if 0 <= value < 1 << 32:
        return "u32"
    if -(1 << 31) <= value < 0:
        return "i32"
    return "u64" if value > 0 else "i64"


def _scalar(name: str, value: Any) -> bytes:
    if name == "string":
        return string(value)
    return struct.pack("<" + VALUE_TYPES[name][1], value)


def _array(values: Any, name: str | None) -> bytes:
    if isinstance(values, np.ndarray):
        name = name or _NUMPY_TYPES[f"{values.dtype.kind}{values.dtype.itemsize}"]
        values = values.tolist()
    if name is None:
        name = "array" if values and isinstance(values[0], list) else ""
        name = name or (_type_of(values[0]) if values else "i32")
    head = struct.pack("<IQ", VALUE_TYPES[name][0], len(values))
    if name == "array":
        return head + b"".join(_array(inner, None) for inner in values)
    if name == "string":
        return head + b"".join(map(string, values))
    return head + struct.pack(f"<{len(values)}{VALUE_TYPES[name][1]}", *values)


def gguf_bytes(
    kv: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = (),
    tensors: Sequence[Tensor] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    alignment: int | None = None,
    alignment_type: str = "u32",
    pad: int | None = None,
    n_kv: int | None = None,
    n_tensors: int | None = None,
    pad_last: bool = True,
) -> bytes:
    """A whole file.

    `alignment` adds the key `general.alignment` of type `alignment_type`, and is what the data is
    padded to unless `pad` says otherwise. `n_kv` and `n_tensors` override the counts.
    `pad_last=False` leaves out the padding after the last tensor.
    """
    pairs = list(kv.items() if isinstance(kv, Mapping) else kv)
    if alignment is not None:
        pairs.append(("general.alignment", typed(alignment_type, alignment)))
    pad = pad or alignment or 32
    out = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if n_tensors is None else n_tensors,
        len(pairs) if n_kv is None else n_kv,
    )
    for key, value in pairs:
        out += string(key) + value_bytes(value)
    data, offsets = _data_section(tensors, pad, pad_last)
    for tensor, offset in zip(tensors, offsets, strict=True):
        out += string(tensor.name)
        out += struct.pack("<I", len(tensor.dims) if tensor.n_dims is None else tensor.n_dims)
        out += struct.pack(f"<{len(tensor.dims)}Q", *tensor.dims)
        out += struct.pack("<IQ", tensor.type, offset)
    return out + bytes(-len(out) % pad) + data if tensors else out


def _data_section(tensors: Sequence[Tensor], pad: int, pad_last: bool) -> tuple[bytes, list[int]]:
    data, offsets = bytearray(), []
    for i, tensor in enumerate(tensors):
        offsets.append(len(data) if tensor.offset is None else tensor.offset)
        data += tensor.data
        if pad_last or i + 1 < len(tensors):
            data += bytes(-len(data) % pad)
    return bytes(data), offsets


def write_gguf(path: Path, *args: Any, **kwargs: Any) -> Path:
    """`gguf_bytes(...)` into a file; returns its path."""
    path.write_bytes(gguf_bytes(*args, **kwargs))
    return path


def write_split(
    folder: Path, kv: Mapping[Any, Any], parts: Sequence[Sequence[Tensor]], name: str = "model"
) -> list[Path]:
    """A valid split model, one list of tensors for each part; metadata goes into the first."""
    total = sum(map(len, parts))
    paths = []
    for i, tensors in enumerate(parts):
        keys = dict(kv) if i == 0 else {}
        keys["split.no"] = typed("u16", i)
        keys["split.count"] = typed("u16", len(parts))
        keys["split.tensors.count"] = typed("i32", total)
        path = folder / f"{name}-{i + 1:05d}-of-{len(parts):05d}.gguf"
        paths.append(write_gguf(path, keys, tensors))
    return paths
