"""Jamba (Lieber et al. 2024): Mamba layers with norms on dt, B and C, some attention layers between
them that see no positions, and a feed-forward or a mixture of experts behind each.
"""

from __future__ import annotations

from dataclasses import replace

from jax import Array

from minfer_jax.gguf import GGUFFile
from minfer_jax.models.forward import Forward
from minfer_jax.models.hparams import HParams, MoEParams, read_hparams
from minfer_jax.models.layers import (
    attending_layers,
    attention_tensors,
    ffn_tensors,
    norm_tensors,
    outer_tensors,
    tensor_list,
)
from minfer_jax.models.moe import moe_tensors, read_moe
from minfer_jax.models.ssm import mamba_mixer, mamba_states, mamba_tensors, read_ssm
from minfer_jax.models.tensors import TensorList


def hparams(file: GGUFFile) -> HParams:
    hp = read_hparams(file, rope=False, layered=True, experts=True)
    ssm, attends = read_ssm(file), attending_layers(file, hp)
    return replace(
        hp,
        ssm=ssm,
        moe=_read_moe(file, hp),
        attention_layers=attends,
        recurrent_layers=tuple(not a for a in attends),
        states=mamba_states(ssm),
    )


def _read_moe(file: GGUFFile, hp: HParams) -> MoEParams | None:
    """Experts, of which only layers with a router have more than one: a single expert is an
    ordinary feed-forward, and its tensors are called so."""
    routed = tuple(f"blk.{il}.ffn_gate_inp.weight" in file.tensors for il in range(hp.n_layer))
    moe = read_moe(file, hp.n_ff) if any(routed) else None
    return replace(moe, layers=routed) if moe else None


def _routed(hp: HParams, il: int) -> bool:
    return hp.moe is not None and hp.moe.layers[il]


def tensors(hp: HParams) -> TensorList:
    parts = [outer_tensors(hp)]
    for il in range(hp.n_layer):
        parts.append(norm_tensors(il, ("attn_norm", hp.n_embd), ("ffn_norm", hp.n_embd)))
        attends = hp.attends(il)
        parts.append(attention_tensors(hp, il) if attends else mamba_tensors(hp, il, norms=True))
        parts.append(moe_tensors(hp, il) if _routed(hp, il) else ffn_tensors(hp, il))
    return tensor_list(*parts)


def graph(hp: HParams, f: Forward) -> Array:
    x = f.embed()
    for il in range(hp.n_layer):
        with f.layer(il):
            normed = f.norm(x, il, "attn_norm")
            out = f.attention(il, normed) if hp.attends(il) else mamba_mixer(hp, f, il, normed)
            x, out = f.output_rows(il, x, out)
            x = x + out
            normed = f.norm(x, il, "ffn_norm")
            x = x + (f.moe if _routed(hp, il) else f.feed_forward)(il, normed)
    return f.logits(x)
