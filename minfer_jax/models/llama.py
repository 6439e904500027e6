"""Llama 1-3 and the many models of its shape (Mistral, SmolLM2, TinyLlama...).

Touvron et al. 2023: pre-norm, rotary attention over neighbouring pairs, SwiGLU.
"""

from __future__ import annotations

from dataclasses import replace

from jax import Array

from minfer_jax.gguf import GGUFFile
from minfer_jax.models.forward import Forward
from minfer_jax.models.hparams import HParams, read_hparams
from minfer_jax.models.tensors import TensorList, TensorSpec, decoder_tensors


def hparams(file: GGUFFile) -> HParams:
    hp = read_hparams(file, rope_style="interleaved")
    scale = file.get_float("llama.attention.scale", 0.0, lo=0.0, hi=1e6)
    return replace(hp, attn_scale=scale or hp.attn_scale)


def tensors(hp: HParams) -> TensorList:
    bias = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    rope_freqs = TensorSpec("rope_freqs.weight", (hp.rope.n_rot // 2,), required=False)
    return decoder_tensors(hp, bias=bias, extra=[rope_freqs])


def graph(hp: HParams, f: Forward) -> Array:
    x = f.embed()
    for il in range(hp.n_layer):
        with f.layer(il):
            attn = f.attention(il, f.norm(x, il, "attn_norm"))
            x, attn = f.output_rows(il, x, attn)
            x = x + attn
            x = x + f.feed_forward(il, f.norm(x, il, "ffn_norm"))
    return f.logits(x)
