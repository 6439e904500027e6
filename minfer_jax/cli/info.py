"""`info`: what a file says of itself, without starting a device."""

from __future__ import annotations

import json as jsonlib
from typing import Any

import numpy as np

from minfer_jax.cli.session import local_file
from minfer_jax.errors import MinferError, UsageError
from minfer_jax.gguf import GGUFFile, TensorInfo, open_gguf
from minfer_jax.settings import Settings

_SHOWN = 60  # characters of a long value


def run_info(model: str | None, *, n_ctx: int, json: bool) -> None:
    """Print metadata, tensors and memory needs of `model`."""
    if not 0 <= n_ctx <= 1 << 24:
        raise UsageError(f"--n-ctx is {n_ctx}; allowed: 0 to {1 << 24}")
    file = open_gguf(local_file(model, Settings.from_env()))
    report = {
        "path": str(file.path),
        "version": file.version,
        "size_bytes": file.nbytes,
        "metadata": {k: _plain(v) for k, v in file.metadata.items()},
        "tensors": [_tensor(info) for info in file.tensors.values()],
        "memory": _memory(file, n_ctx),
    }
    if json:
        print(jsonlib.dumps(report, ensure_ascii=False))
    else:
        print("\n".join(_lines(report)))


def _plain(value: Any) -> Any:
    """A metadata value as JSON has it; arrays of more than 32 entries as their length and type."""
    if isinstance(value, np.ndarray | list):
        if len(value) > 32:
            kind = value.dtype.name if isinstance(value, np.ndarray) else type(value[0]).__name__
            return {"length": len(value), "type": kind}
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, str):
        # Bytes that are no UTF-8 were kept as surrogates, which no output encodes.
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return value


def _tensor(info: TensorInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "shape": list(info.shape),
        "type": info.type_name(),
        "bytes": info.nbytes,
    }


def _memory(file: GGUFFile, n_ctx: int) -> dict[str, Any]:
    """Bytes of the packed weights, and of what a context remembers in its default type, float16."""
    from minfer_jax.memory.plan import plan_memory
    from minfer_jax.models.registry import architecture

    weights = sum(info.nbytes or 0 for info in file.tensors.values())
    try:
        hp = architecture(file).hparams(file)
        n_ctx = n_ctx or hp.n_ctx_train
        plan = plan_memory(hp, n_ctx=n_ctx)
    except MinferError as error:
        return {"weights_bytes": weights, "kv_unknown": str(error)}
    return {
        "weights_bytes": weights,
        "kv_bytes_per_token": plan.bytes_per_cell,
        "state_bytes_per_sequence": plan.recurrent.bytes_per_slot if plan.recurrent else 0,
        "n_ctx": n_ctx,
        "kv_bytes": plan.nbytes,
        "total_bytes": weights + plan.nbytes,
    }


def _lines(report: dict[str, Any]) -> list[str]:
    mib = 1 << 20
    lines = [f"{report['path']}: GGUF v{report['version']}, {report['size_bytes'] / mib:.1f} MiB"]
    lines += ["", "Metadata"]
    lines += [f"  {key} = {_short(value)}" for key, value in report["metadata"].items()]
    tensors = report["tensors"]
    lines += ["", f"Tensors ({len(tensors)})"]
    width = max((len(t["name"]) for t in tensors), default=0)
    for t in tensors:
        shape = " x ".join(map(str, t["shape"]))
        lines.append(f"  {t['name']:{width}}  {t['type']:5}  {shape}")
    memory = report["memory"]
    lines += ["", "Memory", f"  weights       {memory['weights_bytes'] / mib:10.1f} MiB"]
    if "kv_unknown" in memory:
        return [*lines, f"  KV            unknown: {memory['kv_unknown']}"]
    if memory["kv_bytes_per_token"]:
        lines.append(f"  KV per token  {memory['kv_bytes_per_token'] / 1024:10.1f} KiB")
    if memory["state_bytes_per_sequence"]:
        lines.append(f"  a state       {memory['state_bytes_per_sequence'] / 1024:10.1f} KiB")
    return [
        *lines,
        f"  KV in all     {memory['kv_bytes'] / mib:10.1f} MiB for n_ctx {memory['n_ctx']}, f16",
        f"  together      {memory['total_bytes'] / mib:10.1f} MiB",
    ]


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"[{value['length']} x {value['type']}]"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
