"""RWKV-7 (Peng et al. 2025, "Goose"): RWKV-6 whose state corrects what it holds.

The values of the first layer have a share in those of all others.
"""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from minfer_jax.gguf import GGUFFile
from minfer_jax.models.forward import Forward
from minfer_jax.models.hparams import HParams, RWKVParams
from minfer_jax.models.layers import tensor_list
from minfer_jax.models.rwkv import (
    MAX_RANK,
    heads,
    low_rank,
    norm_specs,
    normed_heads,
    outer_tensors,
    read_rwkv,
    rwkv_params,
    shifted,
    small_spec,
    squared_relu,
)
from minfer_jax.models.tensors import TensorList, TensorSpec
from minfer_jax.ops.recurrent.chunks import dot
from minfer_jax.ops.recurrent.wkv import wkv7

_MIXED = "rwkvag"
"""What is made of x in the first mixer: receptance, decay, key, value, rate, gate."""
_LOG_DECAY_MIN = -math.exp(-0.5)
"""No channel forgets faster than by exp of this."""


def hparams(file: GGUFFile) -> HParams:
    hp, head_size = read_rwkv(file)

    def rank(name: str, *default: int) -> int:
        return file.get_int(f"rwkv7.attention.{name}_lora_rank", *default, lo=0, hi=MAX_RANK)

    rwkv = RWKVParams(
        head_size=head_size,
        decay_rank=rank("decay"),
        rate_rank=rank("iclr"),
        value_rank=rank("value_residual_mix"),
        gate_rank=rank("gate", 0),
    )
    return replace(hp, rwkv=rwkv)


def tensors(hp: HParams) -> TensorList:
    # The first layer's values are those that others take a share of: it has none to take itself.
    unused = [f"blk.0.time_mix_v{i}.weight" for i in range(3)]
    layers = (_layer_tensors(hp, il) for il in range(hp.n_layer))
    return tensor_list(outer_tensors(hp), *layers, ignored=unused)


def _layer_tensors(hp: HParams, il: int) -> TensorList:
    rwkv, n, blk = rwkv_params(hp), hp.n_embd, f"blk.{il}"
    matrices = {
        **{f"time_mix_{name}": (n, n) for name in ("key", "value", "receptance", "output")},
        "channel_mix_key": (hp.n_ff, n),
        "channel_mix_value": (n, hp.n_ff),
    }
    plain: dict[str, tuple[int, ...]] = {
        "time_mix_lerp_fused": (len(_MIXED), 1, 1, n),
        **{f"time_mix_{name}": (n,) for name in ("w0", "a0", "k_k", "k_a", "r_k")},
        "channel_mix_lerp_k": (n,),
    }
    ranks = {"w": rwkv.decay_rank, "a": rwkv.rate_rank}
    if il:
        plain["time_mix_v0"] = (n,)
        ranks["v"] = rwkv.value_rank
    if rwkv.gate_rank:
        ranks["g"] = rwkv.gate_rank
    small = {f"time_mix_{name}1": (rank, n) for name, rank in ranks.items()}
    small |= {f"time_mix_{name}2": (n, rank) for name, rank in ranks.items()}
    return TensorList(
        (
            *norm_specs(f"{blk}.attn_norm", n),
            *norm_specs(f"{blk}.attn_norm_2", n),
            *norm_specs(f"{blk}.time_mix_ln", n),
            *(TensorSpec(f"{blk}.{k}.weight", shape) for k, shape in matrices.items()),
            *(TensorSpec(f"{blk}.{k}.weight", shape, plain=True) for k, shape in plain.items()),
            *(small_spec(f"{blk}.{k}", shape) for k, shape in small.items()),
        )
    )


def graph(hp: HParams, f: Forward) -> Array:
    x = f.layer_norm(f.embed(), "token_embd_norm")
    first_value = None
    for il in range(hp.n_layer):
        with f.layer(il):
            time_last, channel_last, state = f.states(il)
            normed = f.layer_norm(x, f"blk.{il}.attn_norm")
            previous, time_last = shifted(f, normed, time_last)
            mixed = _mixed(f, il, normed, previous)
            value = _value(f, il, mixed[_MIXED.index("v")], first_value)
            first_value = value if first_value is None else first_value
            out, state = _time_mix(hp, f, il, mixed, value, state)
            x = x + out
            normed = f.layer_norm(x, f"blk.{il}.attn_norm_2")
            previous, channel_last = shifted(f, normed, channel_last)
            f.set_states(il, (time_last, channel_last, state))
            x, normed, previous = f.output_rows(il, x, normed, previous)
            x = x + _channel_mix(f, il, normed, previous)
    return f.logits(x, norm="layer")


def _mixed(f: Forward, il: int, x: Array, previous: Array) -> Array:
    """What is made of x [n, n_embd], in the order of `_MIXED`: [6, n, n_embd]."""
    mixes = f.array(f"blk.{il}.time_mix_lerp_fused.weight").reshape(len(_MIXED), 1, -1)
    return x[None] + (previous - x)[None] * mixes


def _value(f: Forward, il: int, x: Array, first: Array | None) -> Array:
    """The values of layer `il` [n, n_embd], moved towards those of the first layer."""
    blk = f"blk.{il}.time_mix"
    value = f.product(x, f"{blk}_value")
    if first is None:
        return value
    share = low_rank(f, low_rank(f, x, f"{blk}_v1"), f"{blk}_v2") + _row(f, f"{blk}_v0")
    return value + (first - value) * jax.nn.sigmoid(share)


def _time_mix(
    hp: HParams, f: Forward, il: int, mixed: Array, value: Array, state: Array
) -> tuple[Array, Array]:
    """The mixer of tokens: its output [n, n_embd], and the state [s, heads, d, d] after it."""
    blk, size = f"blk.{il}.time_mix", rwkv_params(hp).head_size
    x_r, x_w, x_k, _, x_a, x_g = mixed
    r = f.product(x_r, f"{blk}_receptance")
    k = f.product(x_k, f"{blk}_key")
    decay = low_rank(f, jnp.tanh(low_rank(f, x_w, f"{blk}_w1")), f"{blk}_w2")
    log_w = jax.nn.sigmoid(decay + _row(f, f"{blk}_w0")) * np.float32(_LOG_DECAY_MIN)
    rate = low_rank(f, low_rank(f, x_a, f"{blk}_a1"), f"{blk}_a2") + _row(f, f"{blk}_a0")
    rate = jax.nn.sigmoid(rate)
    removed = _unit(heads(k * _row(f, f"{blk}_k_k"), size))
    k = k + k * _row(f, f"{blk}_k_a") * (rate - 1.0)
    r, log_w, k, v, rate = (heads(x, size) for x in (r, log_w, k, value, rate))
    rows = [f.by_sequence(x) for x in (r, log_w, k, v, -removed, removed * rate)]
    y, state = wkv7(*rows, state=state, real=f.real, log_w_min=_LOG_DECAY_MIN)
    y = normed_heads(f, f.flat(y), f"{blk}_ln")
    own = dot(r * heads(_row(f, f"{blk}_r_k"), size), k) * v
    y = y + own.reshape(y.shape)
    if rwkv_params(hp).gate_rank:
        y = y * low_rank(f, jax.nn.sigmoid(low_rank(f, x_g, f"{blk}_g1")), f"{blk}_g2")
    return f.product(y, f"{blk}_output"), state


def _row(f: Forward, name: str) -> Array:
    """A vector of the file as one row: [1, n_embd]."""
    return f.array(f"{name}.weight")[None, :]


def _unit(x: Array) -> Array:
    """Every vector [..., d] divided by its length."""
    return x / jnp.maximum(jnp.sqrt(dot(x, x)), np.float32(1e-12))


def _channel_mix(f: Forward, il: int, x: Array, previous: Array) -> Array:
    """The feed-forward on x [n, n_embd]."""
    blk = f"blk.{il}.channel_mix"
    mixed = x + (previous - x) * f.array(f"{blk}_lerp_k.weight").reshape(1, -1)
    return f.product(squared_relu(f.product(mixed, f"{blk}_key")), f"{blk}_value")
