"""State-space layers of both Mambas: hyperparameters, tensors, and their part of a graph."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from minfer_jax.errors import ModelError
from minfer_jax.gguf import GGUFFile
from minfer_jax.models.forward import Activations, Forward
from minfer_jax.models.hparams import HParams, SSMParams
from minfer_jax.models.tensors import TensorList, TensorSpec
from minfer_jax.ops.norm import rms_norm
from minfer_jax.ops.recurrent.conv import causal_conv
from minfer_jax.ops.recurrent.ssm import selective_scan, ssd_scan

_MAX_WIDTH = 1 << 20
_BLOCK = 32
"""No quantized format has shorter blocks: shorter rows are stored as floats."""


def read_ssm(file: GGUFFile) -> SSMParams:
    """The `*.ssm.*` keys; raises `GGUFError` for one that is missing or out of range."""
    arch = file.get_str("general.architecture")
    key = f"{arch}.ssm"
    return SSMParams(
        d_conv=file.get_int(f"{key}.conv_kernel", lo=2, hi=64),
        d_inner=file.get_int(f"{key}.inner_size", lo=1, hi=_MAX_WIDTH),
        d_state=file.get_int(f"{key}.state_size", lo=1, hi=1 << 16),
        dt_rank=file.get_int(f"{key}.time_step_rank", lo=1, hi=_MAX_WIDTH),
        norms=file.get_bool(f"{key}.dt_b_c_rms", False),
    )


def read_ssm2(file: GGUFFile) -> SSMParams:
    """The same for Mamba-2; raises `ModelError` for heads that do not divide what they share."""
    arch = file.get_str("general.architecture")
    ssm = read_ssm(file)
    n_group = file.get_int(f"{arch}.ssm.group_count", lo=1, hi=ssm.dt_rank)
    if ssm.d_inner % ssm.dt_rank or ssm.dt_rank % n_group:
        raise ModelError(
            f"{file.path}: {ssm.dt_rank} state-space heads do not divide {ssm.d_inner} channels"
            f" evenly, or {n_group} groups not them"
        )
    return replace(ssm, n_group=n_group)


def mamba_states(ssm: SSMParams) -> tuple[tuple[int, ...], ...]:
    """Shapes of what a Mamba layer keeps of a sequence: the last inputs of the convolution, and
    the state."""
    return (ssm.d_conv - 1, ssm.d_inner), (ssm.d_state, ssm.d_inner)


def mamba_tensors(hp: HParams, il: int, *, norms: bool = False) -> TensorList:
    """The mixer of layer `il`; with `norms` of dt, B and C."""
    ssm, blk = _ssm(hp), f"blk.{il}"
    # As a matrix it would have to be padded to whole blocks: it is small, and exact as it is.
    plain = ssm.dt_rank % _BLOCK != 0
    specs = [
        TensorSpec(f"{blk}.ssm_in.weight", (2 * ssm.d_inner, hp.n_embd)),
        TensorSpec(f"{blk}.ssm_conv1d.weight", (ssm.d_inner, ssm.d_conv), plain=True),
        TensorSpec(f"{blk}.ssm_conv1d.bias", (ssm.d_inner,)),
        TensorSpec(f"{blk}.ssm_x.weight", (ssm.dt_rank + 2 * ssm.d_state, ssm.d_inner)),
        TensorSpec(f"{blk}.ssm_dt.weight", (ssm.d_inner, ssm.dt_rank), plain=plain),
        TensorSpec(f"{blk}.ssm_dt.bias", (ssm.d_inner,)),
        TensorSpec(f"{blk}.ssm_a", (ssm.d_inner, ssm.d_state), plain=True),
        TensorSpec(f"{blk}.ssm_d", (ssm.d_inner,)),
        TensorSpec(f"{blk}.ssm_out.weight", (hp.n_embd, ssm.d_inner)),
    ]
    if norms:
        widths = {"dt": ssm.dt_rank, "b": ssm.d_state, "c": ssm.d_state}
        specs += [TensorSpec(f"{blk}.ssm_{k}_norm.weight", (n,)) for k, n in widths.items()]
    return TensorList(tuple(specs))


def mamba_mixer(hp: HParams, f: Forward, il: int, x: Activations) -> Array:
    """Mamba's block (Gu and Dao 2023) on x [n, n_embd], which moves the rows' states."""
    ssm, blk = _ssm(hp), f"blk.{il}"
    x, z = jnp.split(f.product(x, f"{blk}.ssm_in"), 2, axis=1)
    last_inputs, state = f.states(il)
    weight, bias = (f.array(f"{blk}.ssm_conv1d.{kind}") for kind in ("weight", "bias"))
    x, last_inputs = causal_conv(f.by_sequence(x), last_inputs, weight, bias, f.real)
    x = _silu(x)
    ends = [ssm.dt_rank, ssm.dt_rank + ssm.d_state]
    parts = jnp.split(f.product(f.flat(x), f"{blk}.ssm_x"), ends, axis=1)
    dt, b, c = (
        _select(hp, f, f"{blk}.ssm_{name}_norm", part)
        for name, part in zip(("dt", "b", "c"), parts, strict=True)
    )
    dt, b, c = (f.by_sequence(v) for v in (_time_steps(hp, f, il, dt), b, c))
    y, state = selective_scan(x, dt, f.array(f"{blk}.ssm_a"), b, c, state, f.real)
    f.set_states(il, (last_inputs, state))
    y = y + x * f.array(f"{blk}.ssm_d")[None, None, :]
    return f.product(f.flat(y) * _silu(z), f"{blk}.ssm_out")


def _select(hp: HParams, f: Forward, norm: str, x: Array) -> Array:
    """dt, B or C behind its norm, where the model has one. FalconMamba's have no weight."""
    if f.has(f"{norm}.weight"):
        return f.rms_norm(x, norm)
    return _rms(x, hp.norm_eps) if _ssm(hp).norms else x


def _time_steps(hp: HParams, f: Forward, il: int, dt: Array) -> Array:
    """dt [n, dt_rank] widened to every channel, before its softplus: [n, d_inner]."""
    name = f"blk.{il}.ssm_dt"
    if _ssm(hp).dt_rank % _BLOCK == 0:
        return f.product(dt, name)
    weight = f.array(f"{name}.weight")
    wide = jnp.einsum("nr,dr->nd", dt, weight, precision=lax.Precision.HIGHEST)
    return wide + f.array(f"{name}.bias")[None, :]


def mamba2_states(ssm: SSMParams) -> tuple[tuple[int, ...], ...]:
    """Shapes of what a Mamba-2 layer keeps of a sequence: the last inputs of the convolution, and
    the state."""
    per_group = ssm.d_inner // ssm.n_group
    return (ssm.d_conv - 1, _mamba2_channels(ssm)), (ssm.n_group, ssm.d_state, per_group)


def mamba2_tensors(
    hp: HParams, il: int, *, conv_bias: bool = True, norm: bool = True
) -> TensorList:
    """The mixer of layer `il`; whether the convolution's bias and the norm must be there."""
    ssm, blk, channels = _ssm(hp), f"blk.{il}", _mamba2_channels(_ssm(hp))
    norm_shape = (ssm.n_group, ssm.d_inner // ssm.n_group)
    return TensorList(
        (
            TensorSpec(f"{blk}.ssm_in.weight", (ssm.d_inner + channels + ssm.dt_rank, hp.n_embd)),
            TensorSpec(f"{blk}.ssm_conv1d.weight", (channels, ssm.d_conv), plain=True),
            TensorSpec(f"{blk}.ssm_conv1d.bias", (channels,), required=conv_bias),
            TensorSpec(f"{blk}.ssm_dt.bias", (ssm.dt_rank,)),
            TensorSpec(f"{blk}.ssm_a", (ssm.dt_rank, 1), plain=True),
            TensorSpec(f"{blk}.ssm_d", (ssm.dt_rank, 1), plain=True),
            TensorSpec(f"{blk}.ssm_norm.weight", norm_shape, required=norm, plain=True),
            TensorSpec(f"{blk}.ssm_out.weight", (hp.n_embd, ssm.d_inner)),
        )
    )


def mamba2_mixer(hp: HParams, f: Forward, il: int, x: Activations) -> Array:
    """Mamba-2's block (Dao and Gu 2024) on x [n, n_embd], which moves the rows' states."""
    ssm, blk, channels = _ssm(hp), f"blk.{il}", _mamba2_channels(_ssm(hp))
    ends = [ssm.d_inner, ssm.d_inner + channels]
    z, xbc, dt = jnp.split(f.product(x, f"{blk}.ssm_in"), ends, axis=1)
    last_inputs, state = f.states(il)
    bias = f.array(f"{blk}.ssm_conv1d.bias") if f.has(f"{blk}.ssm_conv1d.bias") else None
    xbc, last_inputs = causal_conv(
        f.by_sequence(xbc), last_inputs, f.array(f"{blk}.ssm_conv1d.weight"), bias, f.real
    )
    ends = [ssm.d_inner, ssm.d_inner + ssm.n_group * ssm.d_state]
    x, b, c = jnp.split(_silu(xbc), ends, axis=2)
    s, t, _ = x.shape
    x = x.reshape(s, t, ssm.dt_rank, -1)
    b, c = (v.reshape(s, t, ssm.n_group, ssm.d_state) for v in (b, c))
    dt = f.by_sequence(dt + f.array(f"{blk}.ssm_dt.bias")[None, :])
    y, state = ssd_scan(x, dt, f.array(f"{blk}.ssm_a")[:, 0], b, c, state, f.real)
    f.set_states(il, (last_inputs, state))
    y = y + x * f.array(f"{blk}.ssm_d")[None, None]
    y = y.reshape(s * t, ssm.d_inner) * _silu(z)
    if f.has(f"{blk}.ssm_norm.weight"):
        groups = y.reshape(s * t, ssm.n_group, -1)
        normed = _rms(groups, hp.norm_eps) * f.array(f"{blk}.ssm_norm.weight")[None]
        y = normed.reshape(y.shape)
    return f.product(y, f"{blk}.ssm_out")


def _mamba2_channels(ssm: SSMParams) -> int:
    """Channels that the convolution sees: the inputs, B and C."""
    return ssm.d_inner + 2 * ssm.n_group * ssm.d_state


def _silu(x: Array) -> Array:
    """x * sigmoid(x), as a quotient, of which XLA's CPU compiler keeps the result.

    A product, and the convolution before it, it computes again for every value of the state that is
    made of it.
    """
    return x / (np.float32(1.0) + jnp.exp(-x))


def _rms(x: Array, eps: float) -> Array:
    """The root mean square norm over the last axis, without a weight."""
    return rms_norm(x, jnp.ones(x.shape[-1], np.float32), eps)


def _ssm(hp: HParams) -> SSMParams:
    assert hp.ssm is not None
    return hp.ssm
