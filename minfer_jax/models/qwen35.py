"""Qwen3.5 (Qwen Team 2026), dense: gated delta net layers, gated attention between them, and a
feed-forward behind each.
"""

from __future__ import annotations

import jax
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
from minfer_jax.models.layers import ffn_tensors, norm_tensors, outer_tensors, tensor_list
from minfer_jax.models.tensors import TensorList


def hparams(file: GGUFFile) -> HParams:
    hp = read_delta(file, read_hparams(file))
    _check_sections(file, hp.rope.n_rot // 2)
    return hp


def _check_sections(file: GGUFFile, n_pairs: int) -> None:
    """Refuse pairs that rotate with something else than a token's place in time and space, which
    are one and the same number for text."""
    key = "qwen35.rope.dimension_sections"
    sections = [int(n) for n in file.get_array(key, [n_pairs] * 3, kind="int")]
    if len(sections) < 3 or min(sections) < 0 or not sum(sections):
        raise ModelError(f"{file.path}: {key} {sections} does not divide the rotated pairs")
    turns = (pair % sum(sections) for pair in range(n_pairs))
    if any(pair >= 3 * sections[pair % 3] for pair in turns):
        raise ModelError(f"{file.path}: {key} {sections} leaves some of {n_pairs} pairs out")


def tensors(hp: HParams) -> TensorList:
    layers = [_layer_tensors(hp, il) for il in range(hp.n_layer + hp.n_layer_next)]
    behind = next_names(hp, layers[hp.n_layer :])
    return tensor_list(outer_tensors(hp), *layers[: hp.n_layer], ignored=behind)


def _layer_tensors(hp: HParams, il: int) -> TensorList:
    assert hp.delta is not None
    heads = hp.delta.n_head_v
    shapes = {**input_shapes(hp), "ssm_alpha": heads, "ssm_beta": heads}
    recurs = il < hp.n_layer and hp.recurs(il)
    return tensor_list(
        norm_tensors(il, ("attn_norm", hp.n_embd), ("post_attention_norm", hp.n_embd)),
        delta_tensors(hp, il, shapes) if recurs else gated_attention_tensors(hp, il),
        ffn_tensors(hp, il),
    )


def graph(hp: HParams, f: Forward) -> Array:
    x = f.embed()
    for il in range(hp.n_layer):
        with f.layer(il):
            normed = f.norm(x, il, "attn_norm")
            if hp.recurs(il):
                out = delta_mixer(hp, f, il, _inputs(f, il, normed), neighbours=False)
            else:
                out = gated_attention(hp, f, il, normed)
            x, out = f.output_rows(il, x, out)
            x = x + out
            x = x + f.feed_forward(il, f.norm(x, il, "post_attention_norm"))
    return f.logits(x)


def _inputs(f: Forward, il: int, x: Activations) -> tuple[Array, Array, Array, Array]:
    names = ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha")
    with jax.named_scope("ssm_in"):
        qkv, z, beta, alpha = f.products(x, [f"blk.{il}.{name}" for name in names])
    return qkv, z, beta, alpha
