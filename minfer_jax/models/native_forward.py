"""The same pieces made of native kernels: fewer nodes, each of which does more.

A family's `graph` function does not know which of the two it is handed.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from minfer_jax.models.forward import Activations, Forward, gate_up_names, qkv_names
from minfer_jax.models.packing import Matrix
from minfer_jax.ops.cpu.tiled import Normed, TiledTensor, add_normed, linear

_HEAD_MARGIN = 10.0
"""Of a split head: tokens exp(10) times less likely than the best may have rough logits."""


class NativeForward(Forward):
    """A `Forward` over tiled weights, on the CPU."""

    def _make_matmul(self) -> Callable[[Activations, Matrix], Array]:
        return lambda x, w: linear(x, [_tiled(w)])

    def _norm(self, x: Array, weight: str) -> Normed:
        return Normed(x, self._weights.vector(weight), self._hp.norm_eps)

    def _head(self, x: Activations, head: Matrix) -> Array:
        return linear(x, [_tiled(head)], margin=_HEAD_MARGIN)

    def add_normed(self, x: Array, y: Array, il: int, name: str) -> Array:
        with jax.named_scope(name):
            return add_normed(x, self._norm(y, f"blk.{il}.{name}.weight"))

    def attention(self, il: int, x: Activations) -> Array:
        """One kernel norms, rotates and stores the heads and attends with them."""
        if not self._params.cparams.flash_attn:
            return super().attention(il, x)
        hp = self._hp
        with jax.named_scope("attn_qkv"):
            qkv = self._joined(x, qkv_names(il), fuse=self._params.cparams.fuse_qkv)
        spec = hp.rope_of(il)
        names = [f"blk.{il}.{name}.weight" for name in ("attn_q_norm", "attn_k_norm")]
        out = self._memory.attend_joined(
            il,
            qkv,
            self._tables(spec),
            [self._weights.vector(name) for name in names] if hp.qk_norm else [],
            n_head=hp.n_head,
            n_head_kv=hp.n_head_kv,
            interleaved=spec.style == "interleaved",
            eps=hp.norm_eps,
            scale=hp.attn_scale,
            window=hp.window(il),
            cap=hp.attn_softcap,
        )
        return self._attention_output(il, out)

    def _gated(self, il: int, x: Activations) -> Array:
        weights, names = self._weights, gate_up_names(il)
        if not self._params.cparams.fuse_ffn or any(f"{name}.bias" in weights for name in names):
            return super()._gated(il, x)
        parts = [_tiled(weights.matrix(f"{name}.weight")) for name in names]
        return linear(x, parts, gate=self._hp.activation)

    def _project(self, x: Activations, names: list[str], *, fuse: bool = False) -> list[Array]:
        widths = [self._weights.matrix(f"{name}.weight").shape[0] for name in names]
        ends = [sum(widths[: i + 1]) for i in range(len(widths) - 1)]
        return jnp.split(self._joined(x, names, fuse=fuse), ends, axis=1)

    def _joined(self, x: Activations, names: list[str], *, fuse: bool) -> Array:
        """x times each of the named matrices, plus biases, side by side: float32 [n, columns]."""
        weights = self._weights
        parts = [_tiled(weights.matrix(f"{name}.weight")) for name in names]
        if fuse:
            y = linear(x, parts)
        else:
            y = jnp.concatenate([linear(x, [part]) for part in parts], axis=1)
        if not any(f"{name}.bias" in weights for name in names):
            return y
        biases = [
            weights.vector(f"{name}.bias")
            if f"{name}.bias" in weights
            else jnp.zeros(part.shape[0], jnp.float32)
            for name, part in zip(names, parts, strict=True)
        ]
        return y + jnp.concatenate(biases)[None, :]


def _tiled(matrix: Matrix) -> TiledTensor:
    assert isinstance(matrix, TiledTensor)
    return matrix
