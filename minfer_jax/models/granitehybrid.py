"""Granite 4 hybrids (IBM 2025) and Bamba: Mamba-2 layers, some attention layers between them, a
feed-forward or a mixture of experts behind each, and four scales.
"""

from __future__ import annotations

from dataclasses import replace

from jax import Array

from minfer_jax.gguf import GGUFFile
from minfer_jax.models.forward import Forward
from minfer_jax.models.hparams import HParams, read_hparams
from minfer_jax.models.layers import (
    attending_layers,
    attention_tensors,
    ffn_tensors,
    norm_tensors,
    outer_tensors,
    tensor_list,
)
from minfer_jax.models.moe import moe_tensors, read_moe
from minfer_jax.models.ssm import mamba2_mixer, mamba2_states, mamba2_tensors, read_ssm2
from minfer_jax.models.tensors import TensorList, TensorSpec


def hparams(file: GGUFFile) -> HParams:
    # The key is about something else, but it is what files switch the rotation off with.
    rope = file.get_bool("granitehybrid.rope.scaling.finetuned", True)
    hp = read_hparams(file, rope_style="interleaved", rope=rope, layered=True, experts=True)
    scale = _scale(file, "embedding_scale")
    ssm, attends = read_ssm2(file), attending_layers(file, hp)
    return replace(
        hp,
        ssm=ssm,
        moe=read_moe(file, hp.n_ff, normalize=True),
        attention_layers=attends,
        recurrent_layers=tuple(not a for a in attends),
        states=mamba2_states(ssm),
        embd_scale=scale,
        embd_input_scale=scale,
        residual_scale=_scale(file, "residual_scale"),
        logit_scale=1.0 / _scale(file, "logit_scale"),
        attn_scale=_scale(file, "attention.scale", hp.attn_scale),
    )


def _scale(file: GGUFFile, name: str, otherwise: float = 1.0) -> float:
    """A factor that the file may leave out, or give as 0."""
    return file.get_float(f"granitehybrid.{name}", 0.0, lo=0.0, hi=1e6) or otherwise


def tensors(hp: HParams) -> TensorList:
    rope_freqs = TensorSpec("rope_freqs.weight", (hp.rope.n_rot // 2,), required=False)
    parts = [outer_tensors(hp), TensorList((rope_freqs,) if hp.rope.n_rot else ())]
    for il in range(hp.n_layer):
        parts.append(norm_tensors(il, ("attn_norm", hp.n_embd), ("ffn_norm", hp.n_embd)))
        if hp.attends(il):
            parts.append(attention_tensors(hp, il, output_bias=True))
        else:
            parts.append(mamba2_tensors(hp, il, conv_bias=False))
        if hp.moe:
            parts.append(moe_tensors(hp, il))
        else:
            parts.append(ffn_tensors(hp, il, bias=True))
    return tensor_list(*parts, ignored=() if hp.rope.n_rot else ["rope_freqs.weight"])


def graph(hp: HParams, f: Forward) -> Array:
    x = f.embed()
    for il in range(hp.n_layer):
        with f.layer(il):
            normed = f.norm(x, il, "attn_norm")
            out = f.attention(il, normed) if hp.attends(il) else mamba2_mixer(hp, f, il, normed)
            x, out = f.output_rows(il, x, out)
            x = x + out * hp.residual_scale
            normed = f.norm(x, il, "ffn_norm")
            ffn = f.moe(il, normed) if hp.moe else f.feed_forward(il, normed)
            x = x + ffn * hp.residual_scale
    return f.logits(x)
