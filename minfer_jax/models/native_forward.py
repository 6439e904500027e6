"""The same pieces made of native kernels: fewer nodes, each of which does more.

A family's `graph` function does not know which of the two it is handed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from minfer_jax.errors import ModelError
from minfer_jax.models.forward import Activations, Forward
from minfer_jax.models.packing import Matrix
from minfer_jax.ops.cpu.library import TILE_ROWS
from minfer_jax.ops.cpu.tiled import Normed, TiledTensor, add_normed, experts, linear
from minfer_jax.ops.norm import rms_norm

_HEAD_MARGIN = 10.0
"""Of a split head: tokens exp(10) times less likely than the best may have rough logits."""


class NativeForward(Forward):
    """A `Forward` over tiled weights, on the CPU."""

    def _make_matmul(self) -> Callable[[Activations, Matrix], Array]:
        return lambda x, w: linear(x, [_tiled(w)])

    def _norm(self, x: Array, name: str) -> Normed:
        return Normed(x, self._weights.vector(f"{name}.weight"), self._hp.norm_eps)

    def _head(self, x: Activations, head: Matrix) -> Array:
        return linear(x, [_tiled(head)], margin=_HEAD_MARGIN)

    def add_normed(self, x: Array, y: Array, il: int, name: str) -> Array:
        with jax.named_scope(name):
            return add_normed(x, self._norm(y, f"blk.{il}.{name}"))

    def attend_projected(
        self, il: int, q: Array, k: Array, v: Array, norms: Sequence[str] = ()
    ) -> Array:
        """In one kernel."""
        if not self._params.cparams.flash_attn:
            return super().attend_projected(il, q, k, v, norms)
        hp = self._hp
        spec = hp.rope_of(il)
        cache, layer = self._memory.cache(il)
        return cache.attend_joined(
            layer,
            # XLA takes the product itself where these are the parts of one.
            jnp.concatenate([q, k, v], axis=1),
            self._tables(spec),
            [self._weights.vector(f"{name}.weight") for name in norms],
            n_head=hp.n_head,
            interleaved=spec.style == "interleaved",
            eps=hp.norm_eps,
            scale=hp.attn_scale,
            window=hp.window(il),
            cap=hp.attn_softcap,
        )

    def gated(self, x: Activations, names: list[str]) -> Array:
        weights = self._weights
        if not self._params.cparams.fuse_ffn or any(f"{name}.bias" in weights for name in names):
            return super().gated(x, names)
        parts = [_tiled(weights.matrix(f"{name}.weight")) for name in names]
        return linear(x, parts, gate=self._hp.activation)

    def expert_answers(self, x: Array, ids: Array, names: list[str]) -> Array:
        moe = self._hp.moe
        assert moe is not None
        flat, n, width = ids.reshape(-1), moe.n_expert, moe.n_ff_exp
        *gate_up, down = [_tiled(self._weights.matrix(f"{name}.weight")) for name in names]
        stride = _rows_of_each(gate_up[0], n)
        parts = [w.rows(0, width) for w in gate_up]
        if len(parts) == 1:
            parts.append(gate_up[0].rows(width, 2 * width))
        gated = experts(x, flat, parts, n, stride, gate=self._hp.activation)
        rows = _rows_of_each(down, n)
        out = experts(gated, flat, [down.rows(0, rows)], n, rows)
        return out.reshape(*ids.shape, rows)

    def by_group(self, x: Array, name: str) -> Array:
        n, g, n_in = x.shape
        w = _tiled(self._weights.matrix(f"{name}.weight"))
        rows = _rows_of_each(w, g)
        ids = jnp.asarray(np.tile(np.arange(g, dtype=np.int32), n))
        with jax.named_scope(name):
            y = experts(x.reshape(n * g, n_in), ids, [w.rows(0, rows)], g, rows)
        return y.reshape(n, g, rows)

    def _values(self, x: Activations) -> Array:
        return rms_norm(x.x, x.weight, x.eps) if isinstance(x, Normed) else x

    def _project(self, x: Activations, names: Sequence[str], *, fuse: bool = False) -> list[Array]:
        widths = [self._weights.matrix(f"{name}.weight").shape[0] for name in names]
        ends = [sum(widths[: i + 1]) for i in range(len(widths) - 1)]
        return jnp.split(self._joined(x, names, fuse=fuse), ends, axis=1)

    def _joined(self, x: Activations, names: Sequence[str], *, fuse: bool) -> Array:
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


def _rows_of_each(w: TiledTensor, n: int) -> int:
    """Rows of each of the n matrices that w consists of."""
    rows = w.shape[0] // n
    if rows % TILE_ROWS:
        raise ModelError(
            f"the native kernels take experts and heads of a multiple of {TILE_ROWS} rows, not of"
            f" {rows}; MINFER_KERNELS=xla runs this model without them"
        )
    return rows
