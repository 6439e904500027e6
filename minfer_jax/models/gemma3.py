"""Gemma 3 text models (Gemma Team 2025): sliding-window layers between global ones, four norms
a layer, a norm on every query and key head, scaled embeddings, GeGLU.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jax import Array

from minfer_jax.gguf import GGUFFile
from minfer_jax.models.forward import Forward
from minfer_jax.models.hparams import HParams, read_hparams, read_swa_layers
from minfer_jax.models.tensors import TensorList, decoder_tensors

_GLOBAL_EVERY = 6  # of six layers the last one is global, unless the file says otherwise
_LAYERS_OF_27B = 62


def hparams(file: GGUFFile) -> HParams:
    hp = read_hparams(file)
    n_swa = file.get_int("gemma3.attention.sliding_window", 0, lo=0, hi=1 << 30)
    swa_base = file.get_float("gemma3.rope.freq_base_swa", 10000.0, lo=1.001, hi=1e12)
    # The 27B model scales queries by its embedding width per head instead of by the head's width.
    per_head = hp.n_embd // hp.n_head if hp.n_layer == _LAYERS_OF_27B else hp.head_dim_k
    return replace(
        hp,
        attn_scale=per_head**-0.5,
        n_swa=n_swa,
        swa_layers=read_swa_layers(file, hp.n_layer, _GLOBAL_EVERY) if n_swa else (),
        # Only global layers stretch their positions.
        rope_swa=replace(hp.rope, freq_base=swa_base, freq_scale=1.0),
        # The reference multiplies by the float32 square root.
        embd_scale=float(np.sqrt(np.float32(hp.n_embd))),
        final_softcap=file.get_float("gemma3.final_logit_softcapping", 0.0, lo=0.0, hi=1e6),
        activation="gelu",
        qk_norm=True,
    )


def tensors(hp: HParams) -> TensorList:
    norms = [
        ("attn_q_norm", hp.head_dim_k),
        ("attn_k_norm", hp.head_dim_k),
        ("post_attention_norm", hp.n_embd),
        ("post_ffw_norm", hp.n_embd),
    ]
    return decoder_tensors(hp, bias=("attn_q", "attn_k", "attn_v"), layer_norms=norms)


def graph(hp: HParams, f: Forward) -> Array:
    x = f.embed()
    for il in range(hp.n_layer):
        with f.layer(il):
            attn = f.attention(il, f.norm(x, il, "attn_norm"))
            x, attn = f.output_rows(il, x, attn)
            x = f.add_normed(x, attn, il, "post_attention_norm")
            ffn = f.feed_forward(il, f.norm(x, il, "ffn_norm"))
            x = f.add_normed(x, ffn, il, "post_ffw_norm")
    return f.logits(x)
