"""What all tests of a run have in common: machine, versions, model, sizes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from minfer_jax.bench.machine import cpu_flags, cpu_info, load_average
from minfer_jax.context import Context
from minfer_jax.device import threads
from minfer_jax.gguf import GGUFFile, open_gguf
from minfer_jax.models.model import Model
from minfer_jax.models.packing import Matrix
from minfer_jax.models.weights import head_of
from minfer_jax.ops.cpu.tiled import TiledTensor

# The file types (`general.file_type`) whose name is not that of most of its tensors.
_FILE_TYPES = {
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The first keys of every row; llama-bench's names where it has the thing."""

    build_commit: str
    """Our version: a released package has no commit. "unknown" for a checkout not installed."""
    cpu_info: str
    cpu_flags: str
    load_average: float | None
    """Of the minute before the first test."""
    gpu_info: str
    backends: str
    jax_version: str
    jaxlib_version: str
    flags: str
    """The command's arguments."""
    model_filename: str
    model_type: str
    model_size: int
    """Bytes of all tensors in the file."""
    model_n_params: int
    n_ctx: int
    n_batch: int
    n_ubatch: int
    """As asked for; a small context uses less."""
    n_threads: int
    type_k: str
    type_v: str
    n_gpu_layers: int
    """0, or all of them, the head counted."""
    flash_attn: int
    """1: `bench` always measures that form of attention."""
    exact: bool


def describe(context: Context, *, n_ubatch: int, exact: bool, flags: str) -> Setup:
    """The setup of tests on `context`. Opens the model's file again to look at its header."""
    model = context.model
    device = model.device
    kind = "f32" if exact else "f16"
    with open_gguf(model.path) as file:
        size, n_params, model_type = _size(file), _n_params(file), _model_type(file)
    return Setup(
        build_commit=_our_version(),
        cpu_info=cpu_info(),
        cpu_flags=" ".join(cpu_flags()),
        load_average=load_average(),
        gpu_info="" if device.platform == "cpu" else device.device_kind,
        backends=f"JAX {device.platform.upper()}",
        jax_version=version("jax"),
        jaxlib_version=version("jaxlib"),
        flags=flags,
        model_filename=str(model.path),
        model_type=model_type,
        model_size=size,
        model_n_params=n_params,
        n_ctx=context.n_ctx,
        n_batch=context.n_ctx,
        n_ubatch=n_ubatch,
        n_threads=threads(),
        type_k=kind,
        type_v=kind,
        n_gpu_layers=0 if device.platform == "cpu" else model.hp.n_layer + 1,
        flash_attn=1,
        exact=exact,
    )


def weights_read(model: Model) -> int:
    """Bytes of weights, as they lie in memory, that a decode step reads: all but the table of
    embeddings, of which it needs one row, unless that table is the head, too, and but the lower
    bits of a split head, of which it needs 512 tiles at most."""
    weights = model.weights.view(model.weights.leaves)
    head, table = weights.packed(head_of(weights)), weights.packed("token_embd.weight")
    unread = 0 if table is head else _nbytes(table)
    if isinstance(head, TiledTensor) and head.split:
        unread += head.lower_nbytes
    return model.weights.nbytes - unread


def _nbytes(matrix: Matrix) -> int:
    if isinstance(matrix, TiledTensor):
        return matrix.nbytes
    return sum(plane.nbytes for plane in matrix.planes.values())


def _our_version() -> str:
    try:
        return version("minfer-jax")
    except PackageNotFoundError:
        return "unknown"


def _size(file: GGUFFile) -> int:
    return sum(info.nbytes or 0 for info in file.tensors.values())


def _n_params(file: GGUFFile) -> int:
    return sum(math.prod(info.shape) for info in file.tensors.values())


def _model_type(file: GGUFFile) -> str:
    """`llama 135M Q4_1`: architecture, size, type of most values."""
    n = _n_params(file)
    size = f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.0f}M"
    held: Counter[str] = Counter()
    for info in file.tensors.values():
        held[info.type_name()] += math.prod(info.shape)
    stored = file.metadata.get("general.file_type")
    kind = _FILE_TYPES.get(stored) if type(stored) is int else None
    return f"{file.get_str('general.architecture')} {size} {kind or held.most_common(1)[0][0]}"
