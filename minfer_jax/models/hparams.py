"""What a graph has to know of a model besides its tensors, read from GGUF metadata.

One frozen configuration for all families; what differs between them is a field. Knows the file,
not jax: `info` reads it without starting a backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minfer_jax.errors import ModelError
from minfer_jax.gguf import GGUFFile
from minfer_jax.ops.rope_spec import RopeSpec

_MAX = 1 << 24  # no dimension of a model is near it; products of two stay far from 2**63


@dataclass(frozen=True, kw_only=True)
class HParams:
    """Hyperparameters. Every field is topology: fixed for a model, part of no `GraphParams`."""

    arch: str
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    n_ff: int
    norm_eps: float
    rope: RopeSpec
    attn_scale: float
    """Factor on q . k before the softmax."""
    rope_swa: RopeSpec | None = None
    """Rotation in the sliding-window layers, where it differs."""
    n_swa: int = 0
    """Width of the sliding window in tokens, the query's own included; 0: no such layers."""
    swa_layers: tuple[bool, ...] = ()
    """Which layers see only the window."""
    embd_scale: float = 1.0
    attn_softcap: float = 0.0
    final_softcap: float = 0.0
    activation: Literal["silu", "gelu"] = "silu"
    qk_norm: bool = False

    def window(self, il: int) -> int:
        """Cells that layer `il` sees, or 0 for all."""
        return self.n_swa if self.n_swa and self.swa_layers[il] else 0

    def rope_of(self, il: int) -> RopeSpec:
        """The rotation of layer `il`."""
        return self.rope_swa if self.rope_swa and self.window(il) else self.rope

    def kv_bytes_per_cell(self, itemsize: int) -> int:
        """Bytes that one token occupies in the KV regions of all layers."""
        return self.n_layer * self.n_head_kv * (self.head_dim_k + self.head_dim_v) * itemsize


def read_hparams(file: GGUFFile, *, rope_style: Literal["interleaved", "half"] = "half") -> HParams:
    """The keys that every decoder-only transformer has.

    Raises `GGUFError` for a missing or out-of-range key and `ModelError` for a combination that
    no graph here implements.
    """
    arch = file.get_str("general.architecture")
    n_embd = file.get_int(f"{arch}.embedding_length", lo=1, hi=_MAX)
    n_head = file.get_int(f"{arch}.attention.head_count", lo=1, hi=4096)
    n_head_kv = file.get_int(f"{arch}.attention.head_count_kv", n_head, lo=1, hi=n_head)
    if n_head % n_head_kv:
        raise ModelError(
            f"{file.path}: {n_head} query heads cannot share {n_head_kv} key heads evenly"
        )
    even = n_embd // n_head
    head_dim_k = file.get_int(f"{arch}.attention.key_length", even, lo=1, hi=65536)
    head_dim_v = file.get_int(f"{arch}.attention.value_length", even, lo=1, hi=65536)
    if not (head_dim_k and head_dim_v):
        raise ModelError(f"{file.path}: {n_head} heads do not fit an embedding of {n_embd}")
    _refuse_unsupported(file, arch)
    return HParams(
        arch=arch,
        n_vocab=_n_vocab(file),
        n_ctx_train=file.get_int(f"{arch}.context_length", lo=1, hi=1 << 30),
        n_embd=n_embd,
        n_layer=file.get_int(f"{arch}.block_count", lo=1, hi=1024),
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim_k=head_dim_k,
        head_dim_v=head_dim_v,
        n_ff=file.get_int(f"{arch}.feed_forward_length", lo=1, hi=_MAX),
        norm_eps=file.get_float(f"{arch}.attention.layer_norm_rms_epsilon", lo=0.0, hi=1.0),
        rope=read_rope(file, arch, style=rope_style, head_dim=head_dim_k),
        attn_scale=head_dim_k**-0.5,
    )


def read_rope(
    file: GGUFFile, arch: str, *, style: Literal["interleaved", "half"], head_dim: int
) -> RopeSpec:
    """The rotation and its scaling (`*.rope.*` keys)."""
    n_rot = file.get_int(f"{arch}.rope.dimension_count", head_dim, lo=2, hi=head_dim)
    if n_rot % 2:
        raise ModelError(f"{file.path}: {arch}.rope.dimension_count is {n_rot}, must be even")
    scaling = file.get_str(f"{arch}.rope.scaling.type", "linear")
    if scaling not in ("none", "linear", "yarn"):
        raise ModelError(
            f"{file.path}: rope scaling {scaling!r} is not supported (none, linear, yarn are)"
        )
    # The second key is the older name of the first.
    factor = file.get_float(f"{arch}.rope.scaling.factor", 0.0, lo=0.0, hi=1e6)
    factor = factor or file.get_float(f"{arch}.rope.scale_linear", 0.0, lo=0.0, hi=1e6)
    n_ctx_train = file.get_int(f"{arch}.context_length", lo=1, hi=1 << 30)
    key = f"{arch}.rope.scaling"
    return RopeSpec(
        style=style,
        n_rot=n_rot,
        # With a base of 1 all pairs would turn alike, and YaRN's ramp would divide by log(1).
        freq_base=file.get_float(f"{arch}.rope.freq_base", 10000.0, lo=1.001, hi=1e12),
        freq_scale=1.0 if scaling == "none" or factor == 0.0 else 1.0 / factor,
        yarn=scaling == "yarn",
        n_ctx_orig=file.get_int(f"{key}.original_context_length", n_ctx_train, lo=1, hi=1 << 30),
        beta_fast=file.get_float(f"{key}.yarn_beta_fast", 32.0, lo=1e-6, hi=1e6),
        beta_slow=file.get_float(f"{key}.yarn_beta_slow", 1.0, lo=1e-6, hi=1e6),
        attn_factor=file.get_float(f"{key}.attn_factor", 1.0, lo=0.0, hi=1e6),
    )


def _n_vocab(file: GGUFFile) -> int:
    """Rows of the embedding table, which is what a token id indexes."""
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing")
    tokens = file.get_array("tokenizer.ggml.tokens", None)
    if tokens is not None and len(tokens) != table.shape[0]:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.tokens has {len(tokens)} entries and token_embd.weight"
            f" {table.shape[0]} rows; they must be as many"
        )
    return table.shape[0]


def _refuse_unsupported(file: GGUFFile, arch: str) -> None:
    """Metadata that changes the graph in a way that none here implements."""
    n_expert = file.get_int(f"{arch}.expert_count", 0, lo=0, hi=1 << 16)
    if n_expert:
        raise ModelError(
            f"{file.path}: mixture-of-experts models ({n_expert} experts) do not run yet"
        )
    if not file.get_bool(f"{arch}.attention.causal", True):
        raise ModelError(f"{file.path}: models without causal attention do not run yet")
