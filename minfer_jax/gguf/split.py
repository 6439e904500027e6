"""A path -> all files of a model: a single file, or every part of a split one.

Split files follow llama.cpp's convention: `NAME-00001-of-00003.gguf`, each with the keys
`split.no` (from 0), `split.count` and `split.tensors.count` (over all parts). Must not know what
is in the metadata otherwise, nor how a file is parsed.
"""

import os.path
import re
from pathlib import Path
from typing import Any

from minfer_jax.errors import GGUFError
from minfer_jax.gguf.reader import Shard, read_shard
from minfer_jax.gguf.types import TensorInfo

_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_MAX_SHARDS = 99999


def read_shards(path: Path) -> tuple[Shard, ...]:
    """All parts of the model that `path` belongs to, in order; `path` may be any of them.

    Raises GGUFError if a part is missing, or if names, numbers, counts or tensors disagree.
    """
    opened = read_shard(path)
    if "split.count" not in opened.metadata:
        return (opened,)
    count = _split_value(opened, "split.count", 1, _MAX_SHARDS)
    if count == 1:
        return (opened,)
    number = _split_value(opened, "split.no", 0, count - 1)
    prefix = _split_prefix(path, number, count)
    shards: list[Shard] = []
    for i in range(count):
        part = path.with_name(f"{prefix}-{i + 1:05d}-of-{count:05d}.gguf")
        if not os.path.exists(part):
            raise GGUFError(f"{part}: no such file: part {i + 1} of {count} of {path} is missing")
        shard = read_shard(part, i)
        _check_part(shard, i, count)
        shards.append(shard)
    _check_tensor_count(shards)
    return tuple(shards)


def merge_tensors(shards: tuple[Shard, ...]) -> dict[str, TensorInfo]:
    """The tensors of all parts by name, in file order; a name in two parts is a GGUFError."""
    merged: dict[str, TensorInfo] = {}
    for shard in shards:
        for name, info in shard.tensors.items():
            if name in merged:
                other = shards[merged[name].shard].path
                raise GGUFError(f"{shard.path}: tensor {name!r} is also in {other}")
            merged[name] = info
    return merged


def _split_prefix(path: Path, number: int, count: int) -> str:
    match = _NAME.fullmatch(path.name)
    expected = f"NAME-{number + 1:05d}-of-{count:05d}.gguf"
    if match is None or (int(match[2]), int(match[3])) != (number + 1, count):
        raise GGUFError(
            f"{path}: has key 'split.no' {number} and key 'split.count' {count}, so it must be"
            f" named {expected}"
        )
    return match[1]


def _check_part(shard: Shard, number: int, count: int) -> None:
    for key, expected in (("split.no", number), ("split.count", count)):
        found = _split_value(shard, key, 0, _MAX_SHARDS)
        if found != expected:
            raise GGUFError(f"{shard.path}: key {key!r} is {found}, expected {expected}")


def _check_tensor_count(shards: list[Shard]) -> None:
    expected = _split_value(shards[0], "split.tensors.count", 0, 1 << 63)
    found = sum(len(shard.tensors) for shard in shards)
    if found != expected:
        raise GGUFError(
            f"{shards[0].path}: key 'split.tensors.count' is {expected} but the"
            f" {len(shards)} parts hold {found} tensors"
        )


def _split_value(shard: Shard, key: str, lo: int, hi: int) -> int:
    value: Any = shard.metadata.get(key)
    if value is None:
        raise GGUFError(f"{shard.path}: missing key {key!r}; it is not a part of a split model")
    if type(value) is not int or not lo <= value <= hi:
        raise GGUFError(f"{shard.path}: key {key!r} is {value!r}, allowed: {lo} to {hi}")
    return value
