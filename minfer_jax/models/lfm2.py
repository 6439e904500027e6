"""LFM2 (Liquid AI 2025): short gated convolutions, some attention layers between them, and a
feed-forward behind each.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax import Array

from minfer_jax.gguf import GGUFFile
from minfer_jax.models.forward import Activations, Forward
from minfer_jax.models.hparams import HParams, read_hparams
from minfer_jax.models.layers import (
    attending_layers,
    attention_tensors,
    ffn_tensors,
    norm_tensors,
    outer_tensors,
    tensor_list,
)
from minfer_jax.models.tensors import TensorList, TensorSpec
from minfer_jax.ops.recurrent.conv import causal_conv

_FINAL_NORM = "token_embd_norm"  # the name that files have it under: it is not of the embeddings


def hparams(file: GGUFFile) -> HParams:
    hp = read_hparams(file, layered=True)
    attends = attending_layers(file, hp)
    n_conv = file.get_int("lfm2.shortconv.l_cache", lo=2, hi=64)
    n_swa = file.get_int("lfm2.attention.sliding_window", 0, lo=0, hi=1 << 30)
    return replace(
        hp,
        qk_norm=True,
        n_swa=n_swa,
        swa_layers=attends if n_swa else (),
        attention_layers=attends,
        recurrent_layers=tuple(not a for a in attends),
        states=((n_conv - 1, hp.n_embd),),
    )


def tensors(hp: HParams) -> TensorList:
    parts = [outer_tensors(hp, norm=_FINAL_NORM)]
    for il in range(hp.n_layer):
        parts.append(norm_tensors(il, ("attn_norm", hp.n_embd), ("ffn_norm", hp.n_embd)))
        if hp.attends(il):
            heads = (("attn_q_norm", hp.head_dim_k), ("attn_k_norm", hp.head_dim_k))
            parts += [norm_tensors(il, *heads), attention_tensors(hp, il)]
        else:
            parts.append(_conv_tensors(hp, il))
        parts.append(ffn_tensors(hp, il))
    return tensor_list(*parts)


def _conv_tensors(hp: HParams, il: int) -> TensorList:
    blk, k = f"blk.{il}.shortconv", hp.states[0][0] + 1
    return TensorList(
        (
            TensorSpec(f"{blk}.in_proj.weight", (3 * hp.n_embd, hp.n_embd)),
            TensorSpec(f"{blk}.conv.weight", (hp.n_embd, k), plain=True),
            TensorSpec(f"{blk}.out_proj.weight", (hp.n_embd, hp.n_embd)),
        )
    )


def graph(hp: HParams, f: Forward) -> Array:
    x = f.embed()
    for il in range(hp.n_layer):
        with f.layer(il):
            normed = f.norm(x, il, "attn_norm")
            out = f.attention(il, normed) if hp.attends(il) else _short_conv(f, il, normed)
            x, out = f.output_rows(il, x, out)
            x = x + out
            x = x + f.feed_forward(il, f.norm(x, il, "ffn_norm"))
    return f.logits(x, name=_FINAL_NORM)


def _short_conv(f: Forward, il: int, x: Activations) -> Array:
    """A causal convolution between two gates on x [n, n_embd], which moves the rows' states."""
    blk = f"blk.{il}.shortconv"
    before, behind, x = jnp.split(f.product(x, f"{blk}.in_proj"), 3, axis=1)
    (last_inputs,) = f.states(il)
    weight = f.array(f"{blk}.conv.weight")
    y, last_inputs = causal_conv(f.by_sequence(before * x), last_inputs, weight, None, f.real)
    f.set_states(il, (last_inputs,))
    return f.product(behind * f.flat(y), f"{blk}.out_proj")
