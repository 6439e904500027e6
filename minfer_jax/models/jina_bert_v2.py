"""Jina BERT v2 (Günther et al. 2023): BERT with ALiBi instead of positions, and GEGLU.

The models for code have norms on queries and keys and a second norm behind attention.
"""

from __future__ import annotations

from dataclasses import replace

from minfer_jax.gguf import GGUFFile
from minfer_jax.models import bert
from minfer_jax.models.hparams import HParams
from minfer_jax.models.tensors import TensorList

_MAX_BIAS = 8.0


def hparams(file: GGUFFile) -> HParams:
    hp = bert.read_encoder(file, rope=False, ffn="gated")
    assert hp.encoder is not None
    up = file.tensors.get("blk.0.ffn_up.weight")
    if "blk.0.ffn_gate.weight" not in file.tensors:
        joined = up is not None and up.shape[0] != hp.n_ff
        hp = replace(hp, encoder=replace(hp.encoder, ffn="joined" if joined else "plain"))
    return replace(hp, activation="gelu", alibi=_MAX_BIAS)


def tensors(hp: HParams) -> TensorList:
    k = hp.n_head_kv * hp.head_dim_k
    norms = (("attn_q_norm", hp.n_head * hp.head_dim_k), ("attn_k_norm", k))
    return bert.encoder_tensors(
        hp,
        extra=[],
        bias=("attn_output", "ffn_up", "ffn_down"),
        norms=(*norms, ("attn_norm_2", hp.n_embd)),
    )


graph = bert.graph
