"""Command R7B and its kin (Cohere 2024): one layer norm feeds attention and feed-forward side by
side; three of four layers see a sliding window and rotate, the fourth sees all and does not.
"""

from __future__ import annotations

from dataclasses import replace

from jax import Array

from minfer_jax.gguf import GGUFFile
from minfer_jax.models.forward import Forward
from minfer_jax.models.hparams import NO_ROPE, HParams, read_hparams, read_swa_layers
from minfer_jax.models.tensors import TensorList, decoder_tensors

_GLOBAL_EVERY = 4


def hparams(file: GGUFFile) -> HParams:
    hp = read_hparams(file, rope_style="interleaved", norm="layer")
    return replace(
        hp,
        n_swa=file.get_int("cohere2.attention.sliding_window", lo=1, hi=1 << 30),
        swa_layers=read_swa_layers(file, hp.n_layer, _GLOBAL_EVERY),
        rope=NO_ROPE,
        rope_swa=hp.rope,
        # 0 means none.
        logit_scale=file.get_float("cohere2.logit_scale", lo=0.0, hi=1e6) or 1.0,
    )


def tensors(hp: HParams) -> TensorList:
    decoder = decoder_tensors(hp, bias=("attn_q", "attn_k", "attn_v"))
    specs = (spec for spec in decoder.specs if not spec.name.endswith(".ffn_norm.weight"))
    return replace(decoder, specs=tuple(specs))


def graph(hp: HParams, f: Forward) -> Array:
    x = f.embed()
    for il in range(hp.n_layer):
        with f.layer(il):
            normed = f.layer_norm(x, f"blk.{il}.attn_norm")
            attn = f.attention(il, normed)
            x, attn, normed = f.output_rows(il, x, attn, normed)
            x = x + f.feed_forward(il, normed) + attn
    return f.logits(x, norm="layer")
