"""Falcon-H1 (Zuo et al. 2025): attention and a Mamba-2 mixer side by side in every layer.

The reference's multipliers are part of the file's weights.
"""

from __future__ import annotations

from dataclasses import replace

from jax import Array

from minfer_jax.gguf import GGUFFile
from minfer_jax.models.forward import Forward
from minfer_jax.models.hparams import HParams, read_hparams
from minfer_jax.models.layers import (
    attention_tensors,
    ffn_tensors,
    norm_tensors,
    outer_tensors,
    tensor_list,
)
from minfer_jax.models.ssm import mamba2_mixer, mamba2_states, mamba2_tensors, read_ssm2
from minfer_jax.models.tensors import TensorList, TensorSpec
from minfer_jax.ops.norm import rms_norm


def hparams(file: GGUFFile) -> HParams:
    hp = read_hparams(file)
    ssm = read_ssm2(file)
    return replace(hp, ssm=ssm, recurrent_layers=(True,) * hp.n_layer, states=mamba2_states(ssm))


def tensors(hp: HParams) -> TensorList:
    parts = [outer_tensors(hp)]
    for il in range(hp.n_layer):
        parts.append(norm_tensors(il, ("attn_norm", hp.n_embd)))
        parts.append(TensorList((TensorSpec(_ffn_norm(il), (hp.n_embd,)),)))
        parts.append(attention_tensors(hp, il))
        parts.append(mamba2_tensors(hp, il, conv_bias=False, norm=False))
        parts.append(ffn_tensors(hp, il, bias=True))
    # llama.cpp, whose files these are, knows both and adds or multiplies by neither.
    unused = ["rope_freqs.weight", *(f"blk.{il}.attn_output.bias" for il in range(hp.n_layer))]
    return tensor_list(*parts, ignored=unused)


def _ffn_norm(il: int) -> str:
    """Files have it without the usual `.weight`."""
    return f"blk.{il}.ffn_norm"


def graph(hp: HParams, f: Forward) -> Array:
    x = f.embed()
    for il in range(hp.n_layer):
        with f.layer(il):
            normed = f.norm(x, il, "attn_norm")
            out = f.attention(il, normed) + mamba2_mixer(hp, f, il, normed)
            x, out = f.output_rows(il, x, out)
            x = x + out
            x = x + f.feed_forward(il, rms_norm(x, f.array(_ffn_norm(il)), hp.norm_eps))
    return f.logits(x)
