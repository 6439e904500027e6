"""Two-layer random models out of the specs in `tests/data/archs`.

The goldens' logits were computed on these weights, which are a pure function of a tensor's name
and a seed: Philox bits as uniform numbers in +-0.1732, norm weights moved by 1, decays made
negative, RoPE factors between 1 and 4.5.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, quants

DATA = Path(__file__).parent / "data" / "archs"
ARCHS = tuple(sorted(path.stem for path in DATA.glob("*.json")))
SEED = 42


def read_spec(name: str) -> dict[str, Any]:
    """`kv`: [key, types, value] each; `tensors`: [name, ne, type] each."""
    return json.loads((DATA / f"{name}.json").read_text())


def golden(name: str) -> tuple[list[int], np.ndarray]:
    """Token ids [40] and llama.cpp's float32 logits [40, n_vocab]."""
    with np.load(DATA / f"{name}.npz") as data:
        return data["tokens"].tolist(), data["logits"]


def write_tiny(
    spec: dict[str, Any],
    path: Path,
    *,
    kv: dict[str, Any] | None = None,
    quantize: dict[str, str] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write `spec` as a GGUF file.

    `kv` replaces values of keys that the spec has, `quantize` gives tensors (by the end of their
    name) another type, `drop` leaves keys and tensors out, `extra` adds float32 tensors.
    """
    values = {key: (types, value) for key, types, value in spec["kv"] if key not in drop}
    for key, value in (kv or {}).items():
        values[key] = (values[key][0], value)
    writer = GGUFWriter(path, values.pop("general.architecture")[1], use_temp_file=False)
    for key, (types, value) in values.items():
        _add_value(writer, key, types, value)
    for name, ne, kind in spec["tensors"]:
        if name not in drop:
            data = tensor_values(name, int(np.prod(ne))).reshape(ne[::-1])
            ends = [q for end, q in (quantize or {}).items() if name.endswith(end)]
            type_ = GGMLQuantizationType[ends[0] if ends else kind]
            writer.add_tensor(name, quants.quantize(data, type_), raw_dtype=type_)
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensor_values(name: str, n: int) -> np.ndarray:
    """Float32 values of one tensor, flat."""
    key = [zlib.crc32(name.encode()), SEED]
    bits = np.random.Philox(key=key).random_raw((n + 1) // 2).view(np.uint32)[:n]
    x = ((bits.astype(np.float64) / 2.0**32 - 0.5) * (2 * 0.1732)).astype(np.float32)
    if name.endswith(".ssm_a"):  # decays
        return -np.abs(x) - np.float32(0.01)
    if name.startswith("rope_f"):
        return np.abs(x) * np.float32(20.0) + np.float32(1.0)
    return x + np.float32(1.0) if "norm" in name and name.endswith(".weight") else x


def _add_value(writer: GGUFWriter, key: str, types: list[str], value: Any) -> None:
    if isinstance(value, dict):  # a vocabulary that nobody reads
        n = value["generate"]
        value = [f"tok_{i}" for i in range(n)] if key.endswith("tokens") else [0.0] * n
    if types[0] != "ARRAY":
        writer.add_key_value(key, value, GGUFValueType[types[0]])
    elif value:
        sub_type = GGUFValueType[types[1]]
        writer.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=sub_type)
