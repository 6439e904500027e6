"""One trace of one model: the pieces that families of decoders, encoders and recurrent models are
built from.

A family's `graph` function calls these from top to bottom; shapes are [n, n_embd] between them.
Everything static comes from `HParams` and `GraphParams`, everything else is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from minfer_jax.graph.inputs import Rows, StepInputs
from minfer_jax.graph.params import GraphParams
from minfer_jax.memory.view import MemoryView
from minfer_jax.models.hparams import HParams
from minfer_jax.models.mixture import mixture
from minfer_jax.models.packing import Matrix
from minfer_jax.models.weights import WeightView, head_of
from minfer_jax.ops.activation import gelu, silu, softcap
from minfer_jax.ops.attention import alibi_slopes, attend_rows
from minfer_jax.ops.cpu.tiled import TiledTensor
from minfer_jax.ops.experts import each_matrix, expert_ffn
from minfer_jax.ops.linear import ACCELERATOR_CHUNK, CPU_CHUNK, matmul
from minfer_jax.ops.norm import layer_norm, rms_norm
from minfer_jax.ops.qtensor import QTensor
from minfer_jax.ops.rope import apply_rope, rope_tables
from minfer_jax.ops.rope_spec import RopeSpec
from minfer_jax.ops.unrolled import UnrolledTensor

Activations = Any
"""What norms make and products read: an array [n, n_embd], or a form that is part of a product."""

ROPE_FACTORS = "rope_freqs.weight"

_ACTIVATIONS = {"silu": silu, "gelu": gelu}


class Forward:
    """What a family's `graph` function works with."""

    def __init__(
        self,
        hp: HParams,
        params: GraphParams,
        weights: WeightView,
        inputs: StepInputs,
        memory: MemoryView,
    ) -> None:
        self._hp = hp
        self._params = params
        self._weights = weights
        self._rows = Rows(*inputs.rows[: len(Rows._fields)])
        self._out_rows = inputs.out_rows
        self._embd = inputs.embd
        self._memory = memory
        self._matmul = self._make_matmul()
        # Traced once for all layers, as a product is.
        self._expert_ffn = jax.jit(self._trace_experts)
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

    def _trace_experts(
        self, x: Array, ids: Array, matrices: list[QTensor | UnrolledTensor]
    ) -> Array:
        assert self._hp.moe is not None
        activation = _ACTIVATIONS[self._hp.activation]
        n_expert = self._hp.moe.n_expert
        return expert_ffn(x, ids, matrices, n_expert, activation=activation, multiply=self._matmul)

    def layer(self, il: int) -> AbstractContextManager:
        """The named scope of layer `il`, which profiles and graph exports show."""
        return jax.named_scope(f"blk.{il}")

    def embed(self) -> Array:
        """Embeddings of the rows' tokens: float32 [n, n_embd]. Only their rows are dequantized.

        Rows that a caller gave as embeddings are these, scaled where the family scales such.
        """
        if self._embd is not None:
            x, scale = jnp.asarray(self._embd), self._hp.embd_input_scale
            return x if scale == 1.0 else x * scale
        with jax.named_scope("token_embd"):
            x = self._weights.matrix("token_embd.weight").take(self._rows.token)
            return x if self._hp.embd_scale == 1.0 else x * self._hp.embd_scale

    def norm(self, x: Array, il: int, name: str) -> Activations:
        """Root mean square norm of x [n, n_embd] with the weight `name` of layer `il`."""
        with jax.named_scope(name):
            return self._norm(x, f"blk.{il}.{name}")

    def add_normed(self, x: Array, y: Array, il: int, name: str) -> Array:
        """x + norm(y): the residual sum of families that have a norm behind each block."""
        with jax.named_scope(name):
            return x + self.rms_norm(y, f"blk.{il}.{name}")

    def _norm(self, x: Array, name: str) -> Activations:
        """`rms_norm` of activations that a product is to read."""
        return self.rms_norm(x, name)

    def attention(self, il: int, x: Activations) -> Array:
        """Self-attention of layer `il` on x [n, n_embd]; writes the rows' K and V."""
        with jax.named_scope("attn_qkv"):
            q, k, v = self.products(x, qkv_names(il))
        out = self.attend_projected(il, q, k, v, qk_norm_names(il) if self._hp.qk_norm else [])
        with jax.named_scope("attn_output"):
            (out,) = self._project(out, [f"blk.{il}.attn_output"])
        return out

    def attend_projected(
        self, il: int, q: Array, k: Array, v: Array, norms: Sequence[str] = ()
    ) -> Array:
        """Norm, rotation, store and attention of layer `il`: float32 [n, n_head * d_v].

        q [n, n_head * d], k and v [n, n_head_kv * d, d_v] are what products made, and `norms` the
        names of the norms on the heads of q and of k, or nothing.
        """
        hp, n = self._hp, q.shape[0]
        q = q.reshape(n, hp.n_head, hp.head_dim_k)
        k = k.reshape(n, hp.n_head_kv, hp.head_dim_k)
        if norms:
            q, k = (self.rms_norm(x, name) for x, name in zip((q, k), norms, strict=True))
        v = v.reshape(n, hp.n_head_kv, hp.head_dim_v)
        return self.attend(il, self.rope(il, q), self.rope(il, k), v)

    def rope(self, il: int, x: Array) -> Array:
        """The heads x [n, heads, d], rotated by their rows' positions as layer `il` does."""
        spec = self._hp.rope_of(il)
        if not spec.n_rot:
            return x
        with jax.named_scope("rope"):
            return apply_rope(spec, x, self._tables(spec))

    def attend(self, il: int, q: Array, k: Array, v: Array | None) -> Array:
        """Attention with q [n, h, d], which stores k [n, h_kv, d] and v [n, h_kv, d_v] in the rows'
        cells: float32 [n, h * d_v].

        `v` is None where the cache keeps values as a part of the keys.
        """
        hp = self._hp
        if hp.encoder and v is not None:
            return self._attend_rows(q, k, v).reshape(q.shape[0], -1)
        cache, layer = self._memory.cache(il)
        out = cache.attend(
            layer, q, k, v, scale=hp.attn_scale, window=hp.window(il), cap=hp.attn_softcap
        )
        return out.reshape(q.shape[0], -1)

    def _attend_rows(self, q: Array, k: Array, v: Array) -> Array:
        """Attention of the rows to each other, of models that remember nothing."""
        hp, exact = self._hp, self._params.cparams.exact
        return attend_rows(
            q,
            k,
            v,
            self.pos,
            self.seq,
            self.seq >= np.int32(0),
            scale=hp.attn_scale,
            alibi=alibi_slopes(hp.n_head, hp.alibi) if hp.alibi else None,
            causal=hp.causal,
            precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
        )

    def product(self, x: Activations, name: str) -> Array:
        """x [n, in] times the matrix `name` [out, in], plus its bias if it has one: [n, out]."""
        with jax.named_scope(name):
            (out,) = self._project(x, [name])
            return out

    def products(self, x: Activations, names: Sequence[str]) -> list[Array]:
        """`product` of x with each of the matrices named, which the family's tensor list groups:
        one for them all, unless the context wants them separate."""
        return self._project(x, names, fuse=self._params.cparams.fuse_qkv)

    def array(self, name: str) -> Array:
        """A plain tensor of the file: float32 of its shape."""
        return self._weights.vector(name)

    def has(self, name: str) -> bool:
        """Whether the file has this tensor."""
        return name in self._weights

    def rms_norm(self, x: Array, name: str) -> Array:
        """The root mean square norm over the last axis of x, with the weight of `name`."""
        return rms_norm(x, self._weights.vector(f"{name}.weight"), self._hp.norm_eps)

    def layer_norm(self, x: Array, name: str) -> Array:
        """The layer norm over the last axis of x, with the weight and any bias of `name`."""
        bias = f"{name}.bias"
        return layer_norm(
            x,
            self._weights.vector(f"{name}.weight"),
            self._weights.vector(bias) if bias in self._weights else None,
            self._hp.norm_eps,
        )

    @property
    def pos(self) -> Array:
        """Positions of the rows: int32 [n]."""
        return self._rows.pos

    @property
    def seq(self) -> Array:
        """Sequences of the rows: int32 [n], -1 for padding."""
        return self._rows.seq

    @property
    def real(self) -> Array:
        """Which rows are not padding, which must not move a state: bool [s, t].

        Recurrent layers see rows as s sequences of t rows. In a decode step every row is a
        sequence of its own; in a prefill all are of one, with the padding at the end.
        """
        return self._memory.states.real

    def by_sequence(self, x: Array) -> Array:
        """Rows [n, ...] as [s, t, ...]."""
        return x.reshape(*self._memory.states.shape, *x.shape[1:])

    def flat(self, x: Array) -> Array:
        """[s, t, ...] as rows [n, ...] again."""
        return x.reshape(-1, *x.shape[2:])

    def states(self, il: int) -> tuple[Array, ...]:
        """The states of layer `il` before these rows: float32 [s, *shape] for each of `hp.states`,
        zeros for a sequence that begins."""
        return self._memory.states.load(il)

    def set_states(self, il: int, states: Sequence[Array]) -> None:
        """Keep the states of layer `il` after these rows; once a layer. Those of padding sequences
        are dropped."""
        self._memory.states.store(il, states)

    def output_rows(self, il: int, *xs: Array) -> tuple[Array, ...]:
        """In the last layer, only the rows whose logits are wanted; before it, all of them."""
        if il < self._hp.n_layer - 1 or self._params.n_out == self._params.n_tokens:
            return xs
        return tuple(x[self._out_rows] for x in xs)

    def feed_forward(self, il: int, x: Activations) -> Array:
        """Gated feed-forward of layer `il` (Shazeer 2020): down(act(gate(x)) * up(x))."""
        with jax.named_scope("ffn_gate_up"):
            gated = self.gated(x, gate_up_names(il))
        with jax.named_scope("ffn_down"):
            (out,) = self._project(gated, [f"blk.{il}.ffn_down"])
        return out

    def gated(self, x: Activations, names: list[str]) -> Array:
        """act(gate(x)) * up(x) with the two matrices named: float32 [n, n_ff]."""
        gate, up = self._project(x, names, fuse=self._params.cparams.fuse_ffn)
        return _ACTIVATIONS[self._hp.activation](gate) * up

    def moe(self, il: int, x: Activations) -> Array:
        """Mixture of experts of layer `il`: float32 [n, n_embd]."""
        assert self._hp.moe is not None
        return mixture(self, self._hp.moe, il, self._values(x))

    def expert_answers(self, x: Array, ids: Array, names: list[str]) -> Array:
        """What experts ids [n, k] answer to x [n, n_embd]: float32 [n, k, n_embd].

        `names` are the tensors of their gate, up and down, or of the first two as one and down.
        """
        matrices = [self._planes(name) for name in names]
        return self._expert_ffn(x, ids, matrices)

    def by_group(self, x: Array, name: str) -> Array:
        """x[:, i] times the i-th of the g matrices of tensor `name` [g, out, in], x [n, g, in]:
        float32 [n, g, out]."""
        with jax.named_scope(name):
            return each_matrix(x, self._planes(name), self._matmul)

    def _planes(self, name: str) -> QTensor | UnrolledTensor:
        matrix = self._weights.matrix(f"{name}.weight")
        assert not isinstance(matrix, TiledTensor), name
        return matrix

    def _values(self, x: Activations) -> Array:
        """Activations as an array, for more than products."""
        return x

    def logits(
        self, x: Array, *, norm: Literal["rms", "layer"] = "rms", name: str = "output_norm"
    ) -> Array:
        """The final norm, whose tensor is `name`, and the head: float32 [n_out, n_vocab].

        Of a context for embeddings, the norm alone: [n_out, n_embd].
        """
        with jax.named_scope("output"):
            if norm == "layer":
                normed = self.layer_norm(x, name)
            elif self._params.cparams.embeddings:
                normed = self.rms_norm(x, name)
            else:
                normed = self._norm(x, name)
            if self._params.cparams.embeddings:
                return normed
            logits = self._head(normed, self._weights.matrix(head_of(self._weights)))
            if "output.bias" in self._weights:
                logits = logits + self._weights.vector("output.bias")[None, :]
            if self._hp.logit_scale != 1.0:
                logits = logits * self._hp.logit_scale
            return softcap(logits, self._hp.final_softcap)

    def _head(self, x: Activations, head: Matrix) -> Array:
        """The logits before bias and cap."""
        return self._matmul(x, head)

    def _tables(self, spec: RopeSpec) -> tuple[Array, Array]:
        """Angles of the rows' positions, one table for all layers that rotate alike."""
        if spec not in self._rope_tables:
            factors = self.array(ROPE_FACTORS) if self.has(ROPE_FACTORS) else None
            self._rope_tables[spec] = rope_tables(spec, self._rows.pos, factors)
        return self._rope_tables[spec]

    def _project(self, x: Activations, names: Sequence[str], *, fuse: bool = False) -> list[Array]:
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


def qk_norm_names(il: int) -> list[str]:
    return [f"blk.{il}.{name}" for name in ("attn_q_norm", "attn_k_norm")]


def gate_up_names(il: int) -> list[str]:
    return [f"blk.{il}.ffn_gate", f"blk.{il}.ffn_up"]
