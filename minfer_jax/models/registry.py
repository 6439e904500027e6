"""From `general.architecture` to the three functions of a family."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

from jax import Array

from minfer_jax.errors import ModelError
from minfer_jax.gguf import GGUFFile
from minfer_jax.models import gemma3, llama, qwen2, qwen3
from minfer_jax.models.forward import Forward
from minfer_jax.models.hparams import HParams
from minfer_jax.models.tensors import TensorList


class Architecture(NamedTuple):
    """What one family's file provides."""

    hparams: Callable[[GGUFFile], HParams]
    tensors: Callable[[HParams], TensorList]
    graph: Callable[[HParams, Forward], Array]


def _family(module: ModuleType) -> Architecture:
    return Architecture(module.hparams, module.tensors, module.graph)


ARCHITECTURES: dict[str, Architecture] = {
    "gemma3": _family(gemma3),
    "llama": _family(llama),
    "qwen2": _family(qwen2),
    "qwen3": _family(qwen3),
}


def architecture(file: GGUFFile) -> Architecture:
    """The family of `file`; `ModelError` with the list of those supported if there is none."""
    name = file.get_str("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: architecture {name!r} is not supported;"
            f" supported: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]
