"""From `general.architecture` to the three functions of a family."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

from jax import Array

from minfer_jax.errors import ModelError
from minfer_jax.gguf import GGUFFile
from minfer_jax.models import (
    bert,
    cohere2,
    deepseek2,
    falcon_h1,
    gemma2,
    gemma3,
    granitehybrid,
    jamba,
    jina_bert_v2,
    lfm2,
    llama,
    mamba,
    mamba2,
    nemotron_h,
    nomic_bert,
    qwen2,
    qwen3,
    qwen3next,
    qwen35,
    rwkv6,
    rwkv7,
)
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
    "bert": _family(bert),
    "cohere2": _family(cohere2),
    "deepseek2": _family(deepseek2),
    "falcon-h1": _family(falcon_h1),
    "gemma2": _family(gemma2),
    "gemma3": _family(gemma3),
    "granitehybrid": _family(granitehybrid),
    "jamba": _family(jamba),
    "jina-bert-v2": _family(jina_bert_v2),
    "lfm2": _family(lfm2),
    "llama": _family(llama),
    "mamba": _family(mamba),
    "mamba2": _family(mamba2),
    "nemotron_h": _family(nemotron_h),
    "nomic-bert": _family(nomic_bert),
    "qwen2": _family(qwen2),
    "qwen3": _family(qwen3),
    "qwen35": _family(qwen35),
    "qwen3next": _family(qwen3next),
    "rwkv6": _family(rwkv6),
    "rwkv7": _family(rwkv7),
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
