"""BERT (Devlin et al. 2019), and the graph that its kin shares.

Rows see all rows of their text; learned positions and token types, layer norms behind each block,
GELU. The graph makes hidden states: how they become a vector is not its business.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from minfer_jax.gguf import GGUFFile
from minfer_jax.models.forward import Forward, gate_up_names, qkv_names
from minfer_jax.models.hparams import EncoderParams, HParams, read_hparams
from minfer_jax.models.tensors import TensorList, TensorSpec
from minfer_jax.ops.activation import gelu, silu

_ACTIVATIONS = {"gelu": gelu, "silu": silu}


def hparams(file: GGUFFile) -> HParams:
    return replace(read_encoder(file, rope=False, ffn="plain"), activation="gelu")


def read_encoder(
    file: GGUFFile, *, rope: bool, ffn: Literal["plain", "gated", "joined"]
) -> HParams:
    """The keys that all encoders have; raises as `read_hparams`."""
    hp = read_hparams(file, rope=rope, norm="layer", encoder=True)
    n_types = file.get_int("tokenizer.ggml.token_type_count", lo=1, hi=1 << 16)
    fused = "blk.0.attn_qkv.weight" in file.tensors
    return replace(hp, encoder=EncoderParams(n_token_types=n_types, fused_qkv=fused, ffn=ffn))


def tensors(hp: HParams) -> TensorList:
    positions = TensorSpec("position_embd.weight", (hp.n_ctx_train, hp.n_embd), plain=True)
    return encoder_tensors(hp, extra=[positions], bias=("attn_output", "ffn_up", "ffn_down"))


def encoder_tensors(
    hp: HParams,
    *,
    extra: list[TensorSpec],
    bias: tuple[str, ...],
    norms: tuple[tuple[str, int], ...] = (),
) -> TensorList:
    """The tensors of an encoder: `extra` beside the layers, optional biases and layer `norms`
    (name, width) within.

    The classifier of a re-ranker is no part of the graph.
    """
    assert hp.encoder is not None
    types = (hp.encoder.n_token_types, hp.n_embd)
    specs = [
        TensorSpec("token_embd.weight", (hp.n_vocab, hp.n_embd)),
        TensorSpec("token_types.weight", types, required=False, plain=True),
        *_norm("token_embd_norm", hp.n_embd),
        *extra,
    ]
    matrices = _matrices(hp)
    groups = []
    for il in range(hp.n_layer):
        blk = f"blk.{il}"
        specs += [TensorSpec(f"{blk}.{name}.weight", shape) for name, shape in matrices.items()]
        specs += [
            TensorSpec(f"{blk}.{name}.bias", shape[:1], required=False)
            for name, shape in matrices.items()
            if name.startswith(("attn_q", "attn_k", "attn_v")) or name in bias
        ]
        for name in ("attn_output_norm", "layer_output_norm"):
            specs += _norm(f"{blk}.{name}", hp.n_embd)
        for name, width in norms:
            specs += _norm(f"{blk}.{name}", width, required=False)
        for group in (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up")):
            groups.append(tuple(f"{blk}.{name}.weight" for name in group if name in matrices))
    ignored = ("cls.weight", "cls.bias", "cls.output.weight", "cls.output.bias")
    return TensorList(tuple(specs), tuple(groups), ignored)


def _norm(name: str, width: int, *, required: bool = True) -> list[TensorSpec]:
    return [TensorSpec(f"{name}.{part}", (width,), required) for part in ("weight", "bias")]


def _matrices(hp: HParams) -> dict[str, tuple[int, int]]:
    """Shapes [out, in] of a layer's matrices by name."""
    assert hp.encoder is not None
    q, k, v = hp.n_head * hp.head_dim_k, hp.n_head_kv * hp.head_dim_k, hp.n_head_kv * hp.head_dim_v
    separate = {"attn_q": q, "attn_k": k, "attn_v": v}
    heads = {"attn_qkv": q + k + v} if hp.encoder.fused_qkv else separate
    ffn = {"ffn_up": 2 * hp.n_ff if hp.encoder.ffn == "joined" else hp.n_ff}
    if hp.encoder.ffn == "gated":
        ffn["ffn_gate"] = hp.n_ff
    return {
        **{name: (rows, hp.n_embd) for name, rows in (heads | ffn).items()},
        "attn_output": (hp.n_embd, hp.n_head * hp.head_dim_v),
        "ffn_down": (hp.n_embd, hp.n_ff),
    }


def graph(hp: HParams, f: Forward) -> Array:
    x = f.embed()
    if f.has("token_types.weight"):
        x = x + f.array("token_types.weight")[:1]  # every token is of "sentence A"
    if f.has("position_embd.weight"):
        x = x + f.array("position_embd.weight")[f.pos]
    x = f.layer_norm(x, "token_embd_norm")
    for il in range(hp.n_layer):
        with f.layer(il):
            x, attn = f.output_rows(il, x, _attention(hp, f, il, x))
            y = f.layer_norm(x + attn, f"blk.{il}.attn_output_norm")
            if f.has(f"blk.{il}.attn_norm_2.weight"):
                y = f.layer_norm(x + y, f"blk.{il}.attn_norm_2")
            x = f.layer_norm(y + _feed_forward(hp, f, il, y), f"blk.{il}.layer_output_norm")
    return x


def _attention(hp: HParams, f: Forward, il: int, x: Array) -> Array:
    """Attention of layer `il` on x [n, n_embd], its output product included."""
    blk = f"blk.{il}"
    q, k, v = _qkv(hp, f, il, x)
    if f.has(f"{blk}.attn_q_norm.weight"):
        q = f.layer_norm(q, f"{blk}.attn_q_norm")
    if f.has(f"{blk}.attn_k_norm.weight"):
        k = f.layer_norm(k, f"{blk}.attn_k_norm")
    n = x.shape[0]
    q = q.reshape(n, hp.n_head, hp.head_dim_k)
    k = k.reshape(n, hp.n_head_kv, hp.head_dim_k)
    v = v.reshape(n, hp.n_head_kv, hp.head_dim_v)
    out = f.attend(il, f.rope(il, q), f.rope(il, k), v)
    return f.product(out, f"{blk}.attn_output")


def _qkv(hp: HParams, f: Forward, il: int, x: Array) -> tuple[Array, Array, Array]:
    """Queries, keys and values, flat: [n, heads * d] each."""
    assert hp.encoder is not None
    if not hp.encoder.fused_qkv:
        with jax.named_scope("attn_qkv"):
            q, k, v = f.products(x, qkv_names(il))
        return q, k, v
    n_q, n_k = hp.n_head * hp.head_dim_k, hp.n_head_kv * hp.head_dim_k
    q, k, v = jnp.split(f.product(x, f"blk.{il}.attn_qkv"), (n_q, n_q + n_k), axis=-1)
    return q, k, v


def _feed_forward(hp: HParams, f: Forward, il: int, x: Array) -> Array:
    """Feed-forward of layer `il` on x [n, n_embd], with a gate where the model has one."""
    assert hp.encoder is not None
    act, blk = _ACTIVATIONS[hp.activation], f"blk.{il}"
    if hp.encoder.ffn == "gated":
        with jax.named_scope("ffn_gate_up"):
            hidden = f.gated(x, gate_up_names(il))
    elif hp.encoder.ffn == "joined":
        gate, up = jnp.split(f.product(x, f"{blk}.ffn_up"), 2, axis=-1)
        hidden = act(gate) * up
    else:
        hidden = act(f.product(x, f"{blk}.ffn_up"))
    return f.product(hidden, f"{blk}.ffn_down")
