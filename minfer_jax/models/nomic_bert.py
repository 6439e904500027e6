"""Nomic BERT (Nussbaum et al. 2024): BERT with rotated heads and SwiGLU."""

from __future__ import annotations

from minfer_jax.gguf import GGUFFile
from minfer_jax.models import bert
from minfer_jax.models.hparams import HParams
from minfer_jax.models.tensors import TensorList


def hparams(file: GGUFFile) -> HParams:
    return bert.read_encoder(file, rope=True, ffn="gated")


def tensors(hp: HParams) -> TensorList:
    return bert.encoder_tensors(hp, extra=[], bias=("attn_output",))


graph = bert.graph
