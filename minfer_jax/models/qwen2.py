"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's shape, biases on Q, K, V, half-split RoPE."""

from __future__ import annotations

from minfer_jax.gguf import GGUFFile
from minfer_jax.models import llama
from minfer_jax.models.hparams import HParams, read_hparams
from minfer_jax.models.tensors import TensorList, TensorSpec, decoder_tensors


def hparams(file: GGUFFile) -> HParams:
    return read_hparams(file)


def tensors(hp: HParams) -> TensorList:
    head_bias = TensorSpec("output.bias", (hp.n_vocab,), required=False)
    return decoder_tensors(hp, bias=("attn_q", "attn_k", "attn_v"), extra=[head_bias])


graph = llama.graph
