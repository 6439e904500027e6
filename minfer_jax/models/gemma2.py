"""Gemma 2 (Gemma Team 2024): every other layer sees a sliding window, four norms a layer, capped
scores and logits, scaled embeddings, GeGLU.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from minfer_jax.gguf import GGUFFile
from minfer_jax.models import gemma3
from minfer_jax.models.hparams import HParams, read_hparams, read_swa_layers
from minfer_jax.models.tensors import TensorList, decoder_tensors

_GLOBAL_EVERY = 2
_LAYERS_OF_27B = 46


def hparams(file: GGUFFile) -> HParams:
    hp = read_hparams(file)
    n_swa = file.get_int("gemma2.attention.sliding_window", 4096, lo=0, hi=1 << 30)
    swa_base = file.get_float("gemma2.rope.freq_base_swa", hp.rope.freq_base, lo=1.001, hi=1e12)
    # The 27B model scales queries by its embedding width per head instead of by the head's width.
    per_head = hp.n_embd // hp.n_head if hp.n_layer == _LAYERS_OF_27B else hp.head_dim_k
    # The reference multiplies by the float32 square root.
    scale = float(np.sqrt(np.float32(hp.n_embd)))
    return replace(
        hp,
        attn_scale=per_head**-0.5,
        n_swa=n_swa,
        swa_layers=read_swa_layers(file, hp.n_layer, _GLOBAL_EVERY) if n_swa else (),
        rope_swa=replace(hp.rope, freq_base=swa_base),
        embd_scale=scale,
        embd_input_scale=scale,
        attn_softcap=file.get_float("gemma2.attn_logit_softcapping", 50.0, lo=0.0, hi=1e6),
        final_softcap=file.get_float("gemma2.final_logit_softcapping", 30.0, lo=0.0, hi=1e6),
        activation="gelu",
    )


def tensors(hp: HParams) -> TensorList:
    norms = [("post_attention_norm", hp.n_embd), ("post_ffw_norm", hp.n_embd)]
    return decoder_tensors(hp, bias=("attn_q", "attn_k", "attn_v"), layer_norms=norms)


graph = gemma3.graph
