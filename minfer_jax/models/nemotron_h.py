"""Nemotron-H (NVIDIA 2025): every layer is one block, a Mamba-2 mixer, an attention that sees no
positions, or a feed-forward with a squared ReLU.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from minfer_jax.errors import ModelError
from minfer_jax.gguf import GGUFFile
from minfer_jax.models.forward import Activations, Forward
from minfer_jax.models.hparams import HParams, read_hparams, read_layered_int
from minfer_jax.models.layers import (
    attending_layers,
    attention_tensors,
    ffn_tensors,
    norm_tensors,
    outer_tensors,
    tensor_list,
)
from minfer_jax.models.ssm import mamba2_mixer, mamba2_states, mamba2_tensors, read_ssm2
from minfer_jax.models.tensors import TensorList


def hparams(file: GGUFFile) -> HParams:
    # The norms are of the one kind, but a file may have the epsilon under the other's key.
    rms = "nemotron_h.attention.layer_norm_rms_epsilon" in file.metadata
    hp = read_hparams(file, rope=False, layered=True, norm="rms" if rms else "layer")
    widths = read_layered_int(file, "nemotron_h.feed_forward_length", hp.n_layer, hi=hp.n_ff)
    if set(widths) - {0, hp.n_ff}:
        raise ModelError(
            f"{file.path}: layers with a feed-forward of {min(w for w in widths if w)} and of"
            f" {hp.n_ff}; they must be alike"
        )
    has_heads = attending_layers(file, hp)
    ssm = read_ssm2(file)
    return replace(
        hp,
        ssm=ssm,
        attention_layers=tuple(h and not w for h, w in zip(has_heads, widths, strict=True)),
        recurrent_layers=tuple(not (h or w) for h, w in zip(has_heads, widths, strict=True)),
        states=mamba2_states(ssm),
    )


def tensors(hp: HParams) -> TensorList:
    parts = [outer_tensors(hp)]
    for il in range(hp.n_layer):
        parts.append(norm_tensors(il, ("attn_norm", hp.n_embd)))
        if hp.recurs(il):
            parts.append(mamba2_tensors(hp, il, conv_bias=False))
        elif hp.attends(il):
            parts.append(attention_tensors(hp, il, output_bias=True))
        else:
            parts.append(ffn_tensors(hp, il, bias=True, gated=False))
    return tensor_list(*parts)


def graph(hp: HParams, f: Forward) -> Array:
    x = f.embed()
    for il in range(hp.n_layer):
        with f.layer(il):
            out = _block(hp, f, il, f.norm(x, il, "attn_norm"))
            x, out = f.output_rows(il, x, out)
            x = x + out
    return f.logits(x)


def _block(hp: HParams, f: Forward, il: int, x: Activations) -> Array:
    if hp.recurs(il):
        return mamba2_mixer(hp, f, il, x)
    if hp.attends(il):
        return f.attention(il, x)
    up = jax.nn.relu(f.product(x, f"blk.{il}.ffn_up"))
    return f.product(jnp.square(up), f"blk.{il}.ffn_down")
