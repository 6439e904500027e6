"""What RWKV-6 and RWKV-7 share: hyperparameters, tensors outside the mixers, shifts and norms."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from minfer_jax.errors import ModelError
from minfer_jax.gguf import GGUFFile
from minfer_jax.models.forward import Forward
from minfer_jax.models.hparams import HParams, RWKVParams, read_hparams
from minfer_jax.models.tensors import TensorList, TensorSpec
from minfer_jax.ops.norm import layer_norm
from minfer_jax.ops.recurrent.shift import token_shift

MAX_RANK = 1 << 16
_BLOCK = 32
_HEAD_EPS = 64e-5
"""Of the norm of a head's output: 1e-5 for each of 8**2, which the trainers divide it by."""


def read_rwkv(file: GGUFFile) -> tuple[HParams, int]:
    """The keys that both have, and the width of a head."""
    hp = read_hparams(file, rope=False, attention=False, norm="layer")
    head_size = file.get_int(f"{hp.arch}.wkv.head_size", lo=1, hi=hp.n_embd)
    if hp.n_embd % head_size:
        raise ModelError(
            f"{file.path}: {hp.arch}.wkv.head_size {head_size} does not divide the embedding"
            f" of {hp.n_embd}"
        )
    n_shift = file.get_int(f"{hp.arch}.token_shift_count", 2, lo=0, hi=1 << 16)
    if n_shift != 2:
        raise ModelError(
            f"{file.path}: {hp.arch}.token_shift_count is {n_shift}, only 2 is supported"
        )
    state = (hp.n_embd // head_size, head_size, head_size)
    hp = replace(
        hp,
        attention_layers=(False,) * hp.n_layer,
        recurrent_layers=(True,) * hp.n_layer,
        # The last input of either mixer, and what the heads hold.
        states=((hp.n_embd,), (hp.n_embd,), state),
    )
    return hp, head_size


def rwkv_params(hp: HParams) -> RWKVParams:
    assert hp.rwkv is not None
    return hp.rwkv


def outer_tensors(hp: HParams) -> TensorList:
    """Embeddings, head, and the norm behind each, whose bias is not optional."""
    return TensorList(
        (
            TensorSpec("token_embd.weight", (hp.n_vocab, hp.n_embd)),
            *norm_specs("token_embd_norm", hp.n_embd),
            *norm_specs("output_norm", hp.n_embd),
            TensorSpec("output.weight", (hp.n_vocab, hp.n_embd)),
        )
    )


def norm_specs(name: str, width: int) -> tuple[TensorSpec, TensorSpec]:
    return TensorSpec(f"{name}.weight", (width,)), TensorSpec(f"{name}.bias", (width,))


def shifted(f: Forward, x: Array, last: Array) -> tuple[Array, Array]:
    """The token before each of x [n, n_embd] in its sequence, and the last one [s, n_embd]."""
    previous, last = token_shift(f.by_sequence(x), last, f.real)
    return f.flat(previous), last


def heads(x: Array, size: int) -> Array:
    """[..., n_embd] -> [..., heads, size]."""
    return x.reshape(*x.shape[:-1], -1, size)


def small_spec(name: str, shape: tuple[int, ...]) -> TensorSpec:
    """One of the two matrices of a product of low rank, or several of them [n, out, in]."""
    return TensorSpec(f"{name}.weight", shape, plain=not _in_blocks(shape[-1]))


def low_rank(f: Forward, x: Array, name: str) -> Array:
    """x [n, in] times such a matrix [out, in]: [n, out]."""
    if _in_blocks(x.shape[-1]):
        return f.product(x, name)
    return jnp.einsum("ni,oi->no", x, f.array(f"{name}.weight"), precision=lax.Precision.HIGHEST)


def low_ranks(f: Forward, x: Array, name: str) -> Array:
    """x[:, i] times the i-th of g such matrices [g, out, in], x [n, g, in]: [n, g, out]."""
    if _in_blocks(x.shape[-1]):
        return f.by_group(x, name)
    weight = f.array(f"{name}.weight")
    return jnp.einsum("ngi,goi->ngo", x, weight, precision=lax.Precision.HIGHEST)


def _in_blocks(n_in: int) -> bool:
    """Whether rows of so many values are whole blocks, as packed matrices have them. Ranks are not
    in models that are too small to matter."""
    return n_in % _BLOCK == 0


def normed_heads(f: Forward, y: Array, name: str) -> Array:
    """Layer norm of every head of y [n, heads, d], with one weight and bias: [n, heads * d]."""
    n, h, d = y.shape
    ones = jnp.ones(d, y.dtype)
    flat = layer_norm(y.reshape(n * h, d), ones, None, _HEAD_EPS).reshape(n, h * d)
    return flat * f.array(f"{name}.weight")[None, :] + f.array(f"{name}.bias")[None, :]


def squared_relu(x: Array) -> Array:
    return jnp.square(jnp.maximum(x, np.float32(0.0)))
