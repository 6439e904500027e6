"""RWKV-6 (Peng et al. 2024, "Eagle and Finch"): no attention, a matrix per head that decays.

Each layer looks one token back: what its two mixers read is x moved towards the x before, for the
first mixer by an amount that x itself decides.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from minfer_jax.gguf import GGUFFile
from minfer_jax.models.forward import Forward
from minfer_jax.models.hparams import HParams, RWKVParams
from minfer_jax.models.layers import tensor_list
from minfer_jax.models.rwkv import (
    MAX_RANK,
    heads,
    low_rank,
    low_ranks,
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
from minfer_jax.ops.activation import silu
from minfer_jax.ops.recurrent.wkv import wkv6

_MIXED = "wkvrg"
"""What is made of x in the first mixer: decay, key, value, receptance, gate."""


def hparams(file: GGUFFile) -> HParams:
    hp, head_size = read_rwkv(file)
    rwkv = RWKVParams(
        head_size=head_size,
        decay_rank=file.get_int("rwkv6.time_decay_extra_dim", lo=1, hi=MAX_RANK),
        mix_rank=file.get_int("rwkv6.time_mix_extra_dim", lo=1, hi=MAX_RANK),
        rescale_every=file.get_int("rwkv6.rescale_every_n_layers", 0, lo=0, hi=1 << 16),
        fused_mixes=any(name.endswith(".time_mix_lerp_fused.weight") for name in file.tensors),
    )
    return replace(hp, rwkv=rwkv)


def tensors(hp: HParams) -> TensorList:
    return tensor_list(outer_tensors(hp), *(_layer_tensors(hp, il) for il in range(hp.n_layer)))


def _layer_tensors(hp: HParams, il: int) -> TensorList:
    rwkv, n, blk = rwkv_params(hp), hp.n_embd, f"blk.{il}"
    matrices = {
        **{f"time_mix_{name}": (n, n) for name in ("key", "value", "receptance", "gate", "output")},
        "channel_mix_key": (hp.n_ff, n),
        "channel_mix_value": (n, hp.n_ff),
        "channel_mix_receptance": (n, n),
    }
    plain: dict[str, tuple[int, ...]] = {
        "time_mix_lerp_x": (n,),
        "time_mix_first": (n // rwkv.head_size, rwkv.head_size),
        "time_mix_decay": (n,),
        "channel_mix_lerp_k": (n,),
        "channel_mix_lerp_r": (n,),
    }
    if rwkv.fused_mixes:
        plain["time_mix_lerp_fused"] = (len(_MIXED), 1, 1, n)
    else:
        plain |= {f"time_mix_lerp_{name}": (n,) for name in _MIXED}
    small = {
        "time_mix_w1": (len(_MIXED) * rwkv.mix_rank, n),
        "time_mix_w2": (len(_MIXED), n, rwkv.mix_rank),
        "time_mix_decay_w1": (rwkv.decay_rank, n),
        "time_mix_decay_w2": (n, rwkv.decay_rank),
    }
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
    every = rwkv_params(hp).rescale_every
    x = f.layer_norm(f.embed(), "token_embd_norm")
    for il in range(hp.n_layer):
        with f.layer(il):
            time_last, channel_last, state = f.states(il)
            normed = f.layer_norm(x, f"blk.{il}.attn_norm")
            previous, time_last = shifted(f, normed, time_last)
            out, state = _time_mix(hp, f, il, normed, previous, state)
            x = x + out
            normed = f.layer_norm(x, f"blk.{il}.attn_norm_2")
            previous, channel_last = shifted(f, normed, channel_last)
            f.set_states(il, (time_last, channel_last, state))
            x, normed, previous = f.output_rows(il, x, normed, previous)
            x = x + _channel_mix(f, il, normed, previous)
            if every and (il + 1) % every == 0:
                x = x * 0.5
    return f.logits(x, norm="layer")


def _time_mix(
    hp: HParams, f: Forward, il: int, x: Array, previous: Array, state: Array
) -> tuple[Array, Array]:
    """The mixer of tokens on x [n, n_embd]: its output, and the state [s, heads, d, d] after it."""
    blk, size = f"blk.{il}.time_mix", rwkv_params(hp).head_size
    x_w, x_k, x_v, x_r, x_g = _mixed(hp, f, blk, x, previous - x)
    r, k, v = (
        f.by_sequence(heads(f.product(mixed, f"{blk}_{name}"), size))
        for mixed, name in ((x_r, "receptance"), (x_k, "key"), (x_v, "value"))
    )
    gate = silu(f.product(x_g, f"{blk}_gate"))
    decay = low_rank(f, jnp.tanh(low_rank(f, x_w, f"{blk}_decay_w1")), f"{blk}_decay_w2")
    log_w = -jnp.exp(decay + f.array(f"{blk}_decay.weight")[None, :])
    bonus = f.array(f"{blk}_first.weight")
    y, state = wkv6(r, k, v, f.by_sequence(heads(log_w, size)), bonus, state, f.real)
    y = normed_heads(f, f.flat(y), f"{blk}_ln")
    return f.product(y * gate, f"{blk}_output"), state


def _mixed(hp: HParams, f: Forward, blk: str, x: Array, delta: Array) -> Array:
    """What is made of x [n, n_embd], in the order of `_MIXED`: [5, n, n_embd]."""
    first = x + delta * f.array(f"{blk}_lerp_x.weight").reshape(1, -1)
    low = jnp.tanh(low_rank(f, first, f"{blk}_w1"))
    amount = low_ranks(f, low.reshape(x.shape[0], len(_MIXED), -1), f"{blk}_w2")
    return x[None] + delta[None] * (jnp.swapaxes(amount, 0, 1) + _mixes(hp, f, blk))


def _mixes(hp: HParams, f: Forward, blk: str) -> Array:
    """The constant part of the amounts: [5, 1, n_embd]."""
    if rwkv_params(hp).fused_mixes:
        return f.array(f"{blk}_lerp_fused.weight").reshape(len(_MIXED), 1, -1)
    return jnp.stack([f.array(f"{blk}_lerp_{name}.weight").reshape(1, -1) for name in _MIXED])


def _channel_mix(f: Forward, il: int, x: Array, previous: Array) -> Array:
    """The feed-forward on x [n, n_embd]."""
    blk, delta = f"blk.{il}.channel_mix", previous - x
    x_k, x_r = (x + delta * f.array(f"{blk}_lerp_{name}.weight").reshape(1, -1) for name in "kr")
    k = squared_relu(f.product(x_k, f"{blk}_key"))
    return jax.nn.sigmoid(f.product(x_r, f"{blk}_receptance")) * f.product(k, f"{blk}_value")
