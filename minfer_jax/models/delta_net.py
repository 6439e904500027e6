"""What Qwen3-Next and Qwen3.5 share: gated delta net layers, and attention behind a gate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from minfer_jax.errors import ModelError
from minfer_jax.gguf import GGUFFile
from minfer_jax.models.forward import Activations, Forward, qk_norm_names, qkv_names
from minfer_jax.models.hparams import DeltaParams, HParams, read_layered_flags
from minfer_jax.models.layers import norm_tensors, tensor_list
from minfer_jax.models.tensors import TensorList, TensorSpec
from minfer_jax.ops.activation import silu
from minfer_jax.ops.recurrent.chunks import dot
from minfer_jax.ops.recurrent.conv import causal_conv
from minfer_jax.ops.recurrent.delta import gated_delta

_NEXT = ("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head_head", "shared_head_norm")


def read_delta(file: GGUFFile, hp: HParams, *, joined: bool = False) -> HParams:
    """`hp` with the keys of its delta net layers, and without the layers that predict further
    tokens.

    Raises `GGUFError` for a key that is missing or out of range, and `ModelError` for sizes that do
    not fit each other.
    """
    key = f"{hp.arch}.ssm"
    delta = DeltaParams(
        d_conv=file.get_int(f"{key}.conv_kernel", lo=2, hi=64),
        head_dim=file.get_int(f"{key}.state_size", lo=1, hi=1 << 16),
        n_head_k=file.get_int(f"{key}.group_count", lo=1, hi=1 << 12),
        n_head_v=file.get_int(f"{key}.time_step_rank", lo=1, hi=1 << 12),
        joined=joined,
    )
    d_inner = file.get_int(f"{key}.inner_size", lo=1, hi=1 << 28)
    if delta.n_head_v % delta.n_head_k or d_inner != delta.n_head_v * delta.head_dim:
        raise ModelError(
            f"{file.path}: {delta.n_head_v} value heads of {delta.head_dim} do not make {d_inner}"
            f" channels, or cannot share {delta.n_head_k} key heads evenly"
        )
    if hp.head_dim_k != hp.head_dim_v:
        raise ModelError(
            f"{file.path}: keys of {hp.head_dim_k} and values of {hp.head_dim_v} differ in width"
        )
    n_next = file.get_int(f"{hp.arch}.nextn_predict_layers", 0, lo=0, hi=hp.n_layer - 1)
    recurrent = _recurrent_layers(file, hp.arch, hp.n_layer - n_next)
    return replace(
        hp,
        n_layer=hp.n_layer - n_next,
        n_layer_next=n_next,
        delta=delta,
        recurrent_layers=recurrent,
        attention_layers=tuple(not r for r in recurrent),
        states=(
            (delta.d_conv - 1, _channels(delta)),
            (delta.n_head_v, delta.head_dim, delta.head_dim),
        ),
    )


def _recurrent_layers(file: GGUFFile, arch: str, n_layer: int) -> tuple[bool, ...]:
    """A flag for each layer, or how many there are from one attention layer to the next."""
    key = f"{arch}.attention.recurrent_layers"
    if key in file.metadata:
        return read_layered_flags(file, key, n_layer)
    every = file.get_int(f"{arch}.full_attention_interval", 4, lo=1, hi=1 << 16)
    return tuple((il + 1) % every != 0 for il in range(n_layer))


def _delta(hp: HParams) -> DeltaParams:
    assert hp.delta is not None
    return hp.delta


def _widths(delta: DeltaParams) -> tuple[int, int]:
    """Of all keys, and of all values."""
    return delta.n_head_k * delta.head_dim, delta.n_head_v * delta.head_dim


def _channels(delta: DeltaParams) -> int:
    """That the convolution sees: queries, keys and values."""
    keys, values = _widths(delta)
    return 2 * keys + values


def delta_tensors(hp: HParams, il: int, shapes: dict[str, int]) -> TensorList:
    """The mixer of layer `il`; `shapes`: rows of the matrices that read the layer's input."""
    delta, blk = _delta(hp), f"blk.{il}"
    values = _widths(delta)[1]
    inputs = [TensorSpec(f"{blk}.{name}.weight", (n, hp.n_embd)) for name, n in shapes.items()]
    return TensorList(
        (
            *inputs,
            TensorSpec(f"{blk}.ssm_conv1d.weight", (_channels(delta), delta.d_conv), plain=True),
            TensorSpec(f"{blk}.ssm_dt.bias", (delta.n_head_v,)),
            TensorSpec(f"{blk}.ssm_a", (delta.n_head_v,)),
            TensorSpec(f"{blk}.ssm_norm.weight", (delta.head_dim,)),
            TensorSpec(f"{blk}.ssm_out.weight", (hp.n_embd, values)),
        ),
        groups=(tuple(spec.name for spec in inputs),),
    )


def input_shapes(hp: HParams) -> dict[str, int]:
    """Rows of the tensors for queries, keys and values, and for the output gates."""
    delta = _delta(hp)
    return {"attn_qkv": _channels(delta), "attn_gate": _widths(delta)[1]}


def gated_attention_tensors(hp: HParams, il: int) -> TensorList:
    """Attention of layer `il`, whose queries come with as many gates."""
    blk, heads = f"blk.{il}", (("attn_q_norm", hp.head_dim_k), ("attn_k_norm", hp.head_dim_k))
    rows = {
        "attn_q": 2 * hp.n_head * hp.head_dim_k,
        "attn_k": hp.n_head_kv * hp.head_dim_k,
        "attn_v": hp.n_head_kv * hp.head_dim_v,
    }
    specs = [TensorSpec(f"{blk}.{name}.weight", (n, hp.n_embd)) for name, n in rows.items()]
    specs += [TensorSpec(f"{blk}.{name}.bias", (n,), required=False) for name, n in rows.items()]
    out = TensorSpec(f"{blk}.attn_output.weight", (hp.n_embd, hp.n_head * hp.head_dim_v))
    group = tuple(f"{blk}.{name}.weight" for name in rows)
    return tensor_list(norm_tensors(il, *heads), TensorList((*specs, out), (group,)))


def next_names(hp: HParams, layers: Iterable[TensorList]) -> list[str]:
    """Names of the tensors of the layers that are not run: `layers` and what each has besides."""
    names = [spec.name for layer in layers for spec in layer.specs]
    for il in range(hp.n_layer, hp.n_layer + hp.n_layer_next):
        names += [f"blk.{il}.nextn.{name}.weight" for name in _NEXT]
    return names


def gated_attention(hp: HParams, f: Forward, il: int, x: Activations) -> Array:
    """Attention of layer `il` on x [n, n_embd], its output weighed by the queries' gates."""
    with jax.named_scope("attn_qkv"):
        q_gate, k, v = f.products(x, qkv_names(il))
        # A head's query and its gate lie side by side.
        q_gate = q_gate.reshape(-1, hp.n_head, 2, hp.head_dim_k)
        q, gate = (q_gate[:, :, i].reshape(k.shape[0], -1) for i in range(2))
    out = f.attend_projected(il, q, k, v, qk_norm_names(il))
    return f.product(out * jax.nn.sigmoid(gate), f"blk.{il}.attn_output")


def delta_mixer(
    hp: HParams,
    f: Forward,
    il: int,
    inputs: tuple[Array, Array, Array, Array],
    *,
    neighbours: bool,
) -> Array:
    """A gated delta net layer (Yang et al. 2025), which moves the rows' states: [n, n_embd].

    `inputs` are what the layer makes of its input: queries, keys and values [n, channels], output
    gates [n, values], and beta and alpha [n, value heads]. The value heads that share a key head
    are `neighbours`, or every n_head_k-th one.
    """
    delta, blk = _delta(hp), f"blk.{il}"
    qkv, z, beta, alpha = inputs
    log_decay = jax.nn.softplus(alpha + f.array(f"{blk}.ssm_dt.bias")[None, :])
    log_decay = log_decay * f.array(f"{blk}.ssm_a")[None, :]
    last_inputs, state = f.states(il)
    weight = f.array(f"{blk}.ssm_conv1d.weight")
    qkv, last_inputs = causal_conv(f.by_sequence(qkv), last_inputs, weight, None, f.real)
    keys = _widths(delta)[0]
    q, k, v = jnp.split(silu(qkv), [keys, 2 * keys], axis=2)
    q, k, v = (x.reshape(*x.shape[:2], -1, delta.head_dim) for x in (q, k, v))
    q, k = (_shared(delta, _unit(x, hp.norm_eps), neighbours=neighbours) for x in (q, k))
    q = q * np.float32(delta.head_dim**-0.5)
    log_decay, beta = (f.by_sequence(x) for x in (log_decay, jax.nn.sigmoid(beta)))
    y, state = gated_delta(q, k, v, log_decay, beta, state, f.real)
    f.set_states(il, (last_inputs, state))
    y = f.rms_norm(y.reshape(-1, delta.head_dim), f"{blk}.ssm_norm").reshape(z.shape)
    return f.product(y * silu(z), f"{blk}.ssm_out")


def _unit(x: Array, eps: float) -> Array:
    """Every vector [..., d] divided by its length, but not much enlarged if it is short."""
    return x * lax.rsqrt(dot(x, x) + np.float32(eps))


def _shared(delta: DeltaParams, x: Array, *, neighbours: bool) -> Array:
    """Key heads [s, t, n_head_k, d] for every value head: [s, t, n_head_v, d]."""
    times = delta.n_head_v // delta.n_head_k
    return jnp.repeat(x, times, axis=2) if neighbours else jnp.tile(x, (1, 1, times, 1))
