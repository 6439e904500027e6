"""Mamba-2 (Dao and Gu 2024): nothing but state-space layers, whose decay is one number a head."""

from __future__ import annotations

from dataclasses import replace

from jax import Array

from minfer_jax.gguf import GGUFFile
from minfer_jax.models.forward import Forward
from minfer_jax.models.hparams import HParams, read_hparams
from minfer_jax.models.layers import norm_tensors, outer_tensors, tensor_list
from minfer_jax.models.ssm import mamba2_mixer, mamba2_states, mamba2_tensors, read_ssm2
from minfer_jax.models.tensors import TensorList


def hparams(file: GGUFFile) -> HParams:
    hp = read_hparams(file, rope=False, attention=False, ffn=False)
    ssm = read_ssm2(file)
    return replace(
        hp,
        ssm=ssm,
        attention_layers=(False,) * hp.n_layer,
        recurrent_layers=(True,) * hp.n_layer,
        states=mamba2_states(ssm),
    )


def tensors(hp: HParams) -> TensorList:
    layers = [
        part
        for il in range(hp.n_layer)
        for part in (norm_tensors(il, ("attn_norm", hp.n_embd)), mamba2_tensors(hp, il))
    ]
    return tensor_list(outer_tensors(hp), *layers)


def graph(hp: HParams, f: Forward) -> Array:
    x = f.embed()
    for il in range(hp.n_layer):
        with f.layer(il):
            out = mamba2_mixer(hp, f, il, f.norm(x, il, "attn_norm"))
            x, out = f.output_rows(il, x, out)
            x = x + out
    return f.logits(x)
