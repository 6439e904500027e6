"""One trace of one model: the pieces that every decoder-only family is built from.

A family's `graph` function calls these from top to bottom; shapes are [n, n_embd] between them.
Everything static comes from `HParams` and `GraphParams`, everything else is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax import Array

from minfer_jax.graph.inputs import Rows
from minfer_jax.graph.params import GraphParams
from minfer_jax.memory.kv_view import KVView
from minfer_jax.models.hparams import HParams
from minfer_jax.models.packing import Matrix
from minfer_jax.models.weights import WeightView, head_of
from minfer_jax.ops.activation import gelu, silu, softcap
from minfer_jax.ops.linear import ACCELERATOR_CHUNK, CPU_CHUNK, matmul
from minfer_jax.ops.norm import rms_norm
from minfer_jax.ops.qtensor import QTensor
from minfer_jax.ops.rope import apply_rope, rope_tables
from minfer_jax.ops.rope_spec import RopeSpec
from minfer_jax.ops.unrolled import UnrolledTensor

Activations = Any
"""What norms make and products read: an array [n, n_embd], or a form that is part of a product."""

_ACTIVATIONS = {"silu": silu, "gelu": gelu}


class Forward:
    """What a family's `graph` function works with."""

    def __init__(
        self,
        hp: HParams,
        params: GraphParams,
        weights: WeightView,
        rows: Rows,
        out_rows: Array,
        memory: KVView,
    ) -> None:
        self._hp = hp
        self._params = params
        self._weights = weights
        self._rows = rows
        self._out_rows = out_rows
        self._memory = memory
        self._matmul = self._make_matmul()
        self._rope_tables: dict[RopeSpec, tuple[Array, Array]] = {}

    def _make_matmul(self) -> Callable[[Activations, Matrix], Array]:
        """What multiplies x [n, in] with a matrix [out, in]: float32 [n, out].

        Equal shapes are traced once within a graph, not once a layer. The jit object is this
        trace's own: one that outlived it would answer for later traces too.
        """
        cparams = self._params.cparams
        chunk = CPU_CHUNK if cparams.backend == "cpu" else ACCELERATOR_CHUNK

        def multiply(x: Array, w: Matrix) -> Array:
            if isinstance(w, UnrolledTensor):
                return w.matmul(x)
            assert isinstance(w, QTensor)
            return matmul(x, w, exact=cparams.exact, chunk=chunk)

        return jax.jit(multiply)

    def layer(self, il: int) -> AbstractContextManager:
        """The named scope of layer `il`, which profiles and graph exports show."""
        return jax.named_scope(f"blk.{il}")

    def embed(self) -> Array:
        """Embeddings of the rows' tokens: float32 [n, n_embd]. Only their rows are dequantized."""
        with jax.named_scope("token_embd"):
            x = self._weights.matrix("token_embd.weight").take(self._rows.token)
            return x if self._hp.embd_scale == 1.0 else x * self._hp.embd_scale

    def norm(self, x: Array, il: int, name: str) -> Activations:
        """Root mean square norm of x [n, n_embd] with the weight `name` of layer `il`."""
        with jax.named_scope(name):
            return self._norm(x, f"blk.{il}.{name}.weight")

    def add_normed(self, x: Array, y: Array, il: int, name: str) -> Array:
        """x + norm(y): the residual sum of families that have a norm behind each block."""
        with jax.named_scope(name):
            return x + self._heads_norm(y, f"blk.{il}.{name}.weight")

    def _norm(self, x: Array, weight: str) -> Activations:
        """The norm of activations that a product is to read."""
        return self._heads_norm(x, weight)

    def _heads_norm(self, x: Array, weight: str) -> Array:
        """The norm over the last axis of x."""
        return rms_norm(x, self._weights.vector(weight), self._hp.norm_eps)

    def attention(self, il: int, x: Activations) -> Array:
        """Self-attention of layer `il` on x [n, n_embd]; writes the rows' K and V."""
        hp = self._hp
        with jax.named_scope("attn_qkv"):
            q, k, v = self._project(x, qkv_names(il), fuse=self._params.cparams.fuse_qkv)
            n = q.shape[0]
            q = q.reshape(n, hp.n_head, hp.head_dim_k)
            k = k.reshape(n, hp.n_head_kv, hp.head_dim_k)
            v = v.reshape(n, hp.n_head_kv, hp.head_dim_v)
        if hp.qk_norm:
            q, k = (
                self._heads_norm(heads, f"blk.{il}.{name}.weight")
                for heads, name in ((q, "attn_q_norm"), (k, "attn_k_norm"))
            )
        with jax.named_scope("rope"):
            spec = hp.rope_of(il)
            tables = self._tables(spec)
            q, k = apply_rope(spec, q, tables), apply_rope(spec, k, tables)
        out = self._memory.attend(
            il, q, k, v, scale=hp.attn_scale, window=hp.window(il), cap=hp.attn_softcap
        )
        return self._attention_output(il, out.reshape(n, -1))

    def _attention_output(self, il: int, x: Array) -> Array:
        with jax.named_scope("attn_output"):
            (out,) = self._project(x, [f"blk.{il}.attn_output"])
            return out

    def output_rows(self, il: int, *xs: Array) -> tuple[Array, ...]:
        """In the last layer, only the rows whose logits are wanted; before it, all of them."""
        if il < self._hp.n_layer - 1 or self._params.n_out == self._params.n_tokens:
            return xs
        return tuple(x[self._out_rows] for x in xs)

    def feed_forward(self, il: int, x: Activations) -> Array:
        """Gated feed-forward of layer `il` (Shazeer 2020): down(act(gate(x)) * up(x))."""
        with jax.named_scope("ffn_gate_up"):
            gated = self._gated(il, x)
        with jax.named_scope("ffn_down"):
            (out,) = self._project(gated, [f"blk.{il}.ffn_down"])
        return out

    def _gated(self, il: int, x: Activations) -> Array:
        """act(gate(x)) * up(x): float32 [n, n_ff]."""
        gate, up = self._project(x, gate_up_names(il), fuse=self._params.cparams.fuse_ffn)
        return _ACTIVATIONS[self._hp.activation](gate) * up

    def logits(self, x: Array) -> Array:
        """The final norm and the head: float32 [n_out, n_vocab]."""
        with jax.named_scope("output"):
            normed = self._norm(x, "output_norm.weight")
            logits = self._head(normed, self._weights.matrix(head_of(self._weights)))
            if "output.bias" in self._weights:
                logits = logits + self._weights.vector("output.bias")[None, :]
            return softcap(logits, self._hp.final_softcap)

    def _head(self, x: Activations, head: Matrix) -> Array:
        """The logits before bias and cap."""
        return self._matmul(x, head)

    def _tables(self, spec: RopeSpec) -> tuple[Array, Array]:
        """Angles of the rows' positions, one table for all layers that rotate alike."""
        if spec not in self._rope_tables:
            name = "rope_freqs.weight"
            factors = self._weights.vector(name) if name in self._weights else None
            self._rope_tables[spec] = rope_tables(spec, self._rows.pos, factors)
        return self._rope_tables[spec]

    def _project(self, x: Activations, names: list[str], *, fuse: bool = False) -> list[Array]:
        """x times each of the named matrices, plus its bias if the model has one.

        With `fuse` every packed array is multiplied whole, once, and the result cut into the
        tensors' columns. Each output column sums the same products either way.
        """
        weights = self._weights
        whole: dict[str, Array] = {}
        out = []
        for name in names:
            r = weights.ranges[f"{name}.weight"]
            if fuse:
                if r.array not in whole:
                    whole[r.array] = self._matmul(x, weights.packed(r.array))
                y = whole[r.array][:, r.start : r.stop]
            else:
                y = self._matmul(x, weights.matrix(f"{name}.weight"))
            bias = f"{name}.bias"
            out.append(y + weights.vector(bias)[None, :] if bias in weights else y)
        return out


def qkv_names(il: int) -> list[str]:
    return [f"blk.{il}.{name}" for name in ("attn_q", "attn_k", "attn_v")]


def gate_up_names(il: int) -> list[str]:
    return [f"blk.{il}.ffn_gate", f"blk.{il}.ffn_up"]
