"""Qwen3-Next (Qwen Team 2025): gated delta net layers, gated attention between them, and a mixture
of experts behind each.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from minfer_jax.errors import ModelError
from minfer_jax.gguf import GGUFFile
from minfer_jax.models.delta_net import (
    delta_mixer,
    delta_tensors,
    gated_attention,
    gated_attention_tensors,
    input_shapes,
    next_names,
    read_delta,
)
from minfer_jax.models.forward import Activations, Forward
from minfer_jax.models.hparams import HParams, read_hparams
from minfer_jax.models.layers import norm_tensors, outer_tensors, tensor_list
from minfer_jax.models.moe import moe_tensors, read_moe
from minfer_jax.models.tensors import TensorList


def hparams(file: GGUFFile) -> HParams:
    hp = read_hparams(file, experts=True)
    moe = read_moe(file, hp.n_ff, normalize=True)
    if moe is None:
        raise ModelError(f"{file.path}: qwen3next.expert_count is 0 or missing")
    moe = replace(moe, n_ff_shexp=moe.n_ff_shexp or hp.n_ff)
    # Files may have both forms, of which the newer one is meant.
    joined = not any(name.endswith(".attn_gate.weight") for name in file.tensors)
    return read_delta(file, replace(hp, moe=moe), joined=joined)


def tensors(hp: HParams) -> TensorList:
    assert hp.delta is not None
    layers = [_layer_tensors(hp, il) for il in range(hp.n_layer + hp.n_layer_next)]
    ignored = next_names(hp, layers[hp.n_layer :])
    if not hp.delta.joined:
        ignored += [f"blk.{il}.ssm_in.weight" for il in range(hp.n_layer)]
    return tensor_list(outer_tensors(hp), *layers[: hp.n_layer], ignored=ignored)


def _layer_tensors(hp: HParams, il: int) -> TensorList:
    assert hp.delta is not None
    shapes = input_shapes(hp)
    if hp.delta.joined:
        shapes = {"ssm_in": sum(shapes.values())}
    shapes["ssm_ba"] = 2 * hp.delta.n_head_v
    recurs = il < hp.n_layer and hp.recurs(il)
    return tensor_list(
        norm_tensors(il, ("attn_norm", hp.n_embd), ("post_attention_norm", hp.n_embd)),
        delta_tensors(hp, il, shapes) if recurs else gated_attention_tensors(hp, il),
        moe_tensors(hp, il),
    )


def graph(hp: HParams, f: Forward) -> Array:
    x = f.embed()
    for il in range(hp.n_layer):
        with f.layer(il):
            normed = f.norm(x, il, "attn_norm")
            if hp.recurs(il):
                out = delta_mixer(hp, f, il, _inputs(hp, f, il, normed), neighbours=True)
            else:
                out = gated_attention(hp, f, il, normed)
            x, out = f.output_rows(il, x, out)
            x = x + out
            x = x + f.moe(il, f.norm(x, il, "post_attention_norm"))
    return f.logits(x)


def _inputs(hp: HParams, f: Forward, il: int, x: Activations) -> tuple[Array, Array, Array, Array]:
    assert hp.delta is not None
    names = ("ssm_in", "ssm_ba") if hp.delta.joined else ("attn_qkv", "attn_gate", "ssm_ba")
    with jax.named_scope("ssm_in"):
        *qkvz, beta_alpha = f.products(x, [f"blk.{il}.{name}" for name in names])
    qkv, z = _unjoined(hp, *qkvz) if hp.delta.joined else qkvz
    # The value heads of a key head: first what they write with, then how they forget.
    n = qkv.shape[0]
    beta_alpha = beta_alpha.reshape(n, hp.delta.n_head_k, 2, -1)
    beta, alpha = (beta_alpha[:, :, i].reshape(n, -1) for i in range(2))
    return qkv, z, beta, alpha


def _unjoined(hp: HParams, x: Array) -> tuple[Array, Array]:
    """Queries, keys and values, and gates, of x that has them key head by key head."""
    delta = hp.delta
    assert delta is not None
    values = delta.n_head_v // delta.n_head_k * delta.head_dim
    ends = [delta.head_dim, 2 * delta.head_dim, 2 * delta.head_dim + values]
    parts = jnp.split(x.reshape(x.shape[0], delta.n_head_k, -1), ends, axis=2)
    q, k, v, z = (part.reshape(x.shape[0], -1) for part in parts)
    return jnp.concatenate([q, k, v], axis=1), z
