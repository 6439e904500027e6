"""DeepSeek V2, V3, R1 and their kin (DeepSeek-AI 2024): latent attention, mixtures of experts.

A token's keys and values of all heads are projections of one latent vector. Files in today's form
have the two projections as tensors of their own; they move to the other side of the scores, and the
cache holds the latent vector and the one rotated part that all heads share:

    q . k = q_nope . (K latent) + q_rot . k_rot = (K' q_nope) . latent + q_rot . k_rot
    out   = sum of p (V latent) = V (sum of p latent)

Older files have both in one tensor (`attn_kv_b`); their keys and values are unfolded and cached as
those of any other model.
"""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from minfer_jax.errors import ModelError
from minfer_jax.gguf import GGUFFile
from minfer_jax.models.forward import Activations, Forward
from minfer_jax.models.hparams import HParams, MLAParams, read_hparams
from minfer_jax.models.layers import ffn_tensors, norm_tensors, outer_tensors, tensor_list
from minfer_jax.models.moe import moe_tensors, read_moe
from minfer_jax.models.tensors import TensorList, TensorSpec
from minfer_jax.ops.rope_spec import RopeSpec

_MAX = 1 << 24
_FLASH = ((47, 48), 154880)
"""Layers and vocabulary of GLM 4.7 Flash, whose files give no gating and mean sigmoids. Others that
give none, as those of V2 and V2.5, mean a softmax."""
_NEXT = ("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head_head", "shared_head_norm")


def hparams(file: GGUFFile) -> HParams:
    hp = read_hparams(file, rope_style="interleaved", experts=True)
    flash = hp.n_layer in _FLASH[0] and hp.n_vocab == _FLASH[1]
    moe = read_moe(file, hp.n_ff, gating="sigmoid" if flash else "softmax")
    n_dense = file.get_int("deepseek2.leading_dense_block_count", 0, lo=0, hi=1 << 16)
    if moe is None and n_dense < hp.n_layer:
        raise ModelError(
            f"{file.path}: deepseek2.expert_count is 0 or missing, but the layers from {n_dense} on"
            " have experts"
        )
    if file.get_float("deepseek2.attention.temperature_scale", 0.0, lo=0.0, hi=1e6):
        raise ModelError(f"{file.path}: attention with a temperature by position is not supported")
    mla = _read_mla(file, hp)
    n_next = file.get_int("deepseek2.nextn_predict_layers", 0, lo=0, hi=hp.n_layer - 1)
    rope, factor = _yarn(file, hp.rope)
    folded = (1, mla.kv_lora_rank + rope.n_rot, mla.kv_lora_rank)
    n_head_kv, head_dim_k, head_dim_v = (
        (hp.n_head, mla.head_dim_k, mla.head_dim_v) if mla.unfolded else folded
    )
    return replace(
        hp,
        n_layer=hp.n_layer - n_next,
        n_layer_next=n_next,
        n_head_kv=n_head_kv,
        head_dim_k=head_dim_k,
        head_dim_v=head_dim_v,
        moe=moe,
        mla=mla,
        rope=rope,
        attn_scale=factor**2 * mla.head_dim_k**-0.5,
    )


def _read_mla(file: GGUFFile, hp: HParams) -> MLAParams:
    key = "deepseek2.attention"
    head_dim_k = file.get_int(f"{key}.key_length_mla", 0, lo=0, hi=65536)
    head_dim_v = file.get_int(f"{key}.value_length_mla", 0, lo=0, hi=65536)
    unfolded = not (head_dim_k and head_dim_v)
    if unfolded:
        head_dim_k, head_dim_v = hp.head_dim_k, hp.head_dim_v
    if head_dim_k <= hp.rope.n_rot:
        raise ModelError(
            f"{file.path}: heads of {head_dim_k} values have no room beside {hp.rope.n_rot} that"
            " are rotated"
        )
    lite = "blk.0.attn_q.weight" in file.tensors
    return MLAParams(
        q_lora_rank=0 if lite else file.get_int(f"{key}.q_lora_rank", lo=1, hi=_MAX),
        kv_lora_rank=file.get_int(f"{key}.kv_lora_rank", lo=1, hi=65536),
        head_dim_k=head_dim_k,
        head_dim_v=head_dim_v,
        unfolded=unfolded,
    )


def _yarn(file: GGUFFile, rope: RopeSpec) -> tuple[RopeSpec, float]:
    """The rotation, and the factor on queries and on keys that is part of the scores' scale.

    With `yarn_log_multiplier`, YaRN's temperature is on all of a head and not on its rotated part,
    which `RopeSpec` would have it on. Files hold a tenth of the multiplier.
    """
    stretch = math.log(1.0 / rope.freq_scale)
    log_mul = 10.0 * file.get_float(
        "deepseek2.rope.scaling.yarn_log_multiplier", 0.0, lo=0.0, hi=1e6
    )
    temperature = 1.0 + 0.1 * stretch
    factor = rope.attn_factor * (1.0 + 0.1 * log_mul * stretch)
    if rope.yarn and log_mul:
        return replace(rope, attn_factor=rope.attn_factor / temperature), factor
    return rope, factor * temperature


def _is_dense(hp: HParams, il: int) -> bool:
    """Whether the feed-forward of layer `il` is an ordinary one."""
    return hp.moe is None or il < hp.moe.n_dense


def tensors(hp: HParams) -> TensorList:
    layers = [
        tensor_list(
            norm_tensors(il, ("attn_norm", hp.n_embd), ("ffn_norm", hp.n_embd)),
            _attention_tensors(hp, il),
            ffn_tensors(hp, il) if _is_dense(hp, il) else moe_tensors(hp, il),
        )
        for il in range(hp.n_layer + hp.n_layer_next)
    ]
    behind = [spec.name for part in layers[hp.n_layer :] for spec in part.specs]
    behind += [
        f"blk.{il}.nextn.{name}.weight"
        for il in range(hp.n_layer, hp.n_layer + hp.n_layer_next)
        for name in _NEXT
    ]
    return tensor_list(outer_tensors(hp), *layers[: hp.n_layer], ignored=behind)


def _attention_tensors(hp: HParams, il: int) -> TensorList:
    mla, n_head = hp.mla, hp.n_head
    assert mla is not None
    rank, nope = mla.kv_lora_rank, mla.head_dim_k - hp.rope.n_rot
    norms = [("attn_kv_a_norm", rank)]
    matrices: dict[str, tuple[int, ...]] = {
        "attn_kv_a_mqa": (rank + hp.rope.n_rot, hp.n_embd),
        "attn_output": (hp.n_embd, n_head * mla.head_dim_v),
    }
    if mla.q_lora_rank:
        norms.append(("attn_q_a_norm", mla.q_lora_rank))
        matrices["attn_q_a"] = (mla.q_lora_rank, hp.n_embd)
        matrices["attn_q_b"] = (n_head * mla.head_dim_k, mla.q_lora_rank)
    else:
        matrices["attn_q"] = (n_head * mla.head_dim_k, hp.n_embd)
    if mla.unfolded:
        matrices["attn_kv_b"] = (n_head * (nope + mla.head_dim_v), rank)
    else:
        heads = (n_head,) if n_head > 1 else ()  # a file leaves out a last dimension of one
        matrices["attn_k_b"] = (*heads, rank, nope)
        matrices["attn_v_b"] = (*heads, mla.head_dim_v, rank)
    specs = [TensorSpec(f"blk.{il}.{name}.weight", shape) for name, shape in matrices.items()]
    group = tuple(f"{name}.weight" for name in _input_names(mla, il))
    return tensor_list(norm_tensors(il, *norms), TensorList(tuple(specs), (group,)))


def _input_names(mla: MLAParams, il: int) -> list[str]:
    """The matrices that read the layer's input: for queries, and for keys and values."""
    queries = "attn_q_a" if mla.q_lora_rank else "attn_q"
    return [f"blk.{il}.{name}" for name in (queries, "attn_kv_a_mqa")]


def graph(hp: HParams, f: Forward) -> Array:
    x = f.embed()
    for il in range(hp.n_layer):
        with f.layer(il):
            attn = _attention(hp, f, il, f.norm(x, il, "attn_norm"))
            x, attn = f.output_rows(il, x, attn)
            x = x + attn
            normed = f.norm(x, il, "ffn_norm")
            x = x + (f.feed_forward if _is_dense(hp, il) else f.moe)(il, normed)
    return f.logits(x)


def _attention(hp: HParams, f: Forward, il: int, x: Activations) -> Array:
    blk, mla = f"blk.{il}", hp.mla
    assert mla is not None
    rank, nope = mla.kv_lora_rank, mla.head_dim_k - hp.rope.n_rot
    with jax.named_scope("attn_qkv_a"):
        q, joint = f.products(x, _input_names(mla, il))
    if mla.q_lora_rank:
        q = f.product(f.norm(q, il, "attn_q_a_norm"), f"{blk}.attn_q_b")
    q = q.reshape(q.shape[0], hp.n_head, mla.head_dim_k)
    q_nope, q_rot = q[..., :nope], q[..., nope:]
    latent = f.rms_norm(joint[:, :rank], f"{blk}.attn_kv_a_norm")
    k_rot = joint[:, None, rank:]  # [n, 1, n_rot]
    if mla.unfolded:
        out = _attend_unfolded(f, il, q_nope, q_rot, latent, k_rot)
    else:
        q_nope = f.by_group(q_nope, f"{blk}.attn_k_b")
        q = jnp.concatenate([q_nope, f.rope(il, q_rot)], axis=-1)
        k = jnp.concatenate([latent[:, None], f.rope(il, k_rot)], axis=-1)
        seen = f.attend(il, q, k, None).reshape(*q.shape[:2], rank)
        out = f.by_group(seen, f"{blk}.attn_v_b").reshape(q.shape[0], -1)
    return f.product(out, f"{blk}.attn_output")


def _attend_unfolded(
    f: Forward, il: int, q_nope: Array, q_rot: Array, latent: Array, k_rot: Array
) -> Array:
    """Attention of all heads with keys and values of their own: float32 [n, h * d_v].

    q_nope [n, h, nope], q_rot [n, h, n_rot] and k_rot [n, 1, n_rot] are not rotated yet.
    """
    n, n_head, nope = q_nope.shape
    kv = f.product(latent, f"blk.{il}.attn_kv_b").reshape(n, n_head, -1)
    # What rotates comes first, as in other models' heads.
    q = jnp.concatenate([q_rot, q_nope], axis=-1)
    k = jnp.concatenate([jnp.broadcast_to(k_rot, q_rot.shape), kv[..., :nope]], axis=-1)
    q, k, v = (x.reshape(n, -1) for x in (q, k, kv[..., nope:]))
    return f.attend_projected(il, q, k, v)
