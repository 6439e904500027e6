"""Qwen3 (Yang et al. 2025): Qwen2's shape with a norm on every query and key head."""

from __future__ import annotations

from dataclasses import replace

from minfer_jax.gguf import GGUFFile
from minfer_jax.models import llama
from minfer_jax.models.hparams import HParams, read_hparams
from minfer_jax.models.tensors import TensorList, decoder_tensors


def hparams(file: GGUFFile) -> HParams:
    return replace(read_hparams(file), qk_norm=True)


def tensors(hp: HParams) -> TensorList:
    norms = [("attn_q_norm", hp.head_dim_k), ("attn_k_norm", hp.head_dim_k)]
    bias = ("attn_q", "attn_k", "attn_v", "attn_output")
    decoder = decoder_tensors(hp, bias=bias, layer_norms=norms)
    return replace(decoder, ignored=("cls.output.weight",))  # the re-rankers' head


graph = llama.graph
