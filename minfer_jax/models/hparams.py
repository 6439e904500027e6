"""What a graph has to know of a model besides its tensors, read from GGUF metadata.

One frozen configuration for all families; what differs between them is a field. Knows the file,
not jax: `info` reads it without starting a backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from minfer_jax.errors import GGUFError, ModelError
from minfer_jax.gguf import GGUFFile
from minfer_jax.ops.rope_spec import RopeSpec
from minfer_jax.pooling import POOLINGS, Pooling

Gating = Literal["softmax", "sigmoid"]
NO_ROPE = RopeSpec(style="half", n_rot=0)
"""Of heads that are not rotated."""

_MAX = 1 << 24  # no dimension of a model is near it; products of two stay far from 2**63


@dataclass(frozen=True, kw_only=True)
class MLAParams:
    """Multi-head latent attention (DeepSeek-AI 2024): what is cached is a vector per token."""

    q_lora_rank: int
    """Width of the compressed query; 0: queries are not compressed."""
    kv_lora_rank: int
    head_dim_k: int
    """Of a head's key before compression, its rotated part included."""
    head_dim_v: int
    unfolded: bool = False
    """Whether the cache holds the heads' keys and values instead, for files of the older form."""


@dataclass(frozen=True, kw_only=True)
class MoEParams:
    """Mixture of experts: the layers' feed-forward, of which each token uses a part."""

    n_expert: int
    n_expert_used: int
    n_ff_exp: int
    """Width of an expert."""
    n_ff_shexp: int = 0
    """Width of what all tokens go through beside their experts; 0: there is none."""
    gating: Gating = "softmax"
    """What makes the experts' weights of the router's logits."""
    normalize: bool = False
    """Whether the weights of the experts used are made to sum up to one."""
    scale: float = 1.0
    """Factor on those weights."""
    n_group: int = 1
    """Groups that the experts are divided into, of which a token uses `n_group_used`."""
    n_group_used: int = 1
    joined: bool = False
    """Whether the experts' gate and up are one tensor, gate first."""
    n_dense: int = 0
    """Leading layers that have an ordinary feed-forward."""
    layers: tuple[bool, ...] = ()
    """Which layers have experts, of families whose files say so by their tensors; empty: all but
    the leading `n_dense`."""


@dataclass(frozen=True, kw_only=True)
class EncoderParams:
    """BERT and its kin: layers that keep nothing, with a layer norm behind each block."""

    n_token_types: int
    fused_qkv: bool
    """Whether Q, K and V are one tensor."""
    ffn: Literal["plain", "gated", "joined"]
    """act(up(x)); act(gate(x)) * up(x); or that with gate and up as one tensor."""


@dataclass(frozen=True, kw_only=True)
class SSMParams:
    """State-space layers: Mamba (Gu and Dao 2023) and Mamba-2 (Dao and Gu 2024)."""

    d_conv: int
    """Inputs that the convolution sees, the newest included."""
    d_inner: int
    """Channels."""
    d_state: int
    """Values of the state of a channel."""
    dt_rank: int
    """Width of the compressed time step; of Mamba-2, whose heads have one each: heads."""
    n_group: int = 1
    """Groups of heads that share B and C."""
    norms: bool = False
    """Whether dt, B and C are normed even without a weight."""


@dataclass(frozen=True, kw_only=True)
class DeltaParams:
    """Gated delta net layers (Yang et al. 2025), as of Qwen3-Next and Qwen3.5."""

    d_conv: int
    """Inputs that the convolution sees, the newest included."""
    head_dim: int
    """Width of keys and of values."""
    n_head_k: int
    n_head_v: int
    """A multiple of the key heads, which value heads share."""
    joined: bool = False
    """Whether queries, keys, values and output gates are one tensor (older files)."""


@dataclass(frozen=True, kw_only=True)
class RWKVParams:
    """RWKV-6 and RWKV-7 (Peng et al. 2024, 2025). Ranks are those of products of two matrices."""

    head_size: int
    decay_rank: int
    mix_rank: int = 0
    """Of the mixes with the token before (RWKV-6)."""
    rate_rank: int = 0
    """Of the rate at which a state is corrected (RWKV-7, as the following)."""
    value_rank: int = 0
    """Of the share that the first layer's values have in those of the others."""
    gate_rank: int = 0
    """0: there is no gate."""
    rescale_every: int = 0
    """Layers behind each of which activations are halved, as the weights are made for; 0: never."""
    fused_mixes: bool = True
    """Whether the mixes of the first mixer are one tensor; one each in older files (RWKV-6)."""


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
    """Factor on the embeddings of tokens."""
    embd_input_scale: float = 1.0
    """Factor on embeddings that a caller gives instead of tokens."""
    attn_softcap: float = 0.0
    final_softcap: float = 0.0
    logit_scale: float = 1.0
    """Factor on the logits."""
    residual_scale: float = 1.0
    """Factor on what a block adds to its input."""
    activation: Literal["silu", "gelu"] = "silu"
    qk_norm: bool = False
    causal: bool = True
    alibi: float = 0.0
    """Largest bias by distance on a score, as `alibi_slopes` takes it; 0: no such bias."""
    pooling: Pooling = "none"
    """How hidden states become the vector of a text, unless the caller says otherwise."""
    encoder: EncoderParams | None = None
    """Of models that make hidden states instead of logits."""
    attention_layers: tuple[bool, ...] = ()
    """Which layers attend, and keep keys and values; empty: all of them."""
    recurrent_layers: tuple[bool, ...] = ()
    """Which layers keep a recurrent state; empty: none."""
    n_layer_next: int = 0
    """Layers behind the others, which predict further tokens and are not run."""
    mla: MLAParams | None = None
    moe: MoEParams | None = None
    ssm: SSMParams | None = None
    delta: DeltaParams | None = None
    rwkv: RWKVParams | None = None
    states: tuple[tuple[int, ...], ...] = ()
    """Shapes of the float32 states that a recurrent layer keeps of every sequence."""

    def attends(self, il: int) -> bool:
        """Whether layer `il` has attention."""
        return not self.attention_layers or self.attention_layers[il]

    def recurs(self, il: int) -> bool:
        """Whether layer `il` has a recurrent state."""
        return bool(self.recurrent_layers) and self.recurrent_layers[il]

    def window(self, il: int) -> int:
        """Cells that layer `il` sees, or 0 for all."""
        return self.n_swa if self.n_swa and self.swa_layers[il] else 0

    def rope_of(self, il: int) -> RopeSpec:
        """The rotation of layer `il`."""
        return self.rope_swa if self.rope_swa and self.window(il) else self.rope


def read_hparams(
    file: GGUFFile,
    *,
    rope_style: Literal["interleaved", "half"] = "half",
    rope: bool = True,
    attention: bool = True,
    layered: bool = False,
    norm: Literal["rms", "layer"] = "rms",
    encoder: bool = False,
    experts: bool = False,
    ffn: bool = True,
) -> HParams:
    """The keys that every decoder-only model and every encoder has.

    `rope`: whether its heads are rotated; `attention`: whether it has any (its heads are of width
    0 without); `layered`: whether a file may give a count for each layer, of which this takes the
    largest; `norm`: which kind, which names the key of its epsilon; `encoder`: rows see later ones
    unless the file says otherwise; `experts`: whether it may have mixtures of them, which the
    family then reads with `models.moe`; `ffn`: whether its layers have a feed-forward. Raises
    `GGUFError` for a missing or out-of-range key and `ModelError` for a combination that no graph
    here implements.
    """
    arch = file.get_str("general.architecture")
    n_embd = file.get_int(f"{arch}.embedding_length", lo=1, hi=_MAX)
    n_layer = file.get_int(f"{arch}.block_count", lo=1, hi=1024)
    n_head, n_head_kv, head_dim_k, head_dim_v = (
        _read_heads(file, arch, n_embd, n_layer, layered) if attention else (0, 0, 0, 0)
    )
    epsilon = "layer_norm_rms_epsilon" if norm == "rms" else "layer_norm_epsilon"
    causal = file.get_bool(f"{arch}.attention.causal", not encoder)
    if causal is encoder:
        which = "encoders with" if encoder else "decoders without"
        raise ModelError(f"{file.path}: {which} causal attention do not run yet")
    if not experts:
        _refuse_experts(file, arch)
    return HParams(
        arch=arch,
        n_vocab=_n_vocab(file),
        n_ctx_train=file.get_int(f"{arch}.context_length", lo=1, hi=1 << 30),
        n_embd=n_embd,
        n_layer=n_layer,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim_k=head_dim_k,
        head_dim_v=head_dim_v,
        n_ff=_read_count(file, f"{arch}.feed_forward_length", n_layer, layered, hi=_MAX)
        if ffn
        else 0,
        norm_eps=file.get_float(f"{arch}.attention.{epsilon}", lo=0.0, hi=1.0),
        rope=read_rope(file, arch, style=rope_style, head_dim=head_dim_k)
        if rope and attention
        else NO_ROPE,
        attn_scale=head_dim_k**-0.5 if attention else 1.0,
        causal=causal,
        pooling=POOLINGS[file.get_int(f"{arch}.pooling_type", 0, lo=0, hi=len(POOLINGS) - 1)],
    )


def _read_heads(
    file: GGUFFile, arch: str, n_embd: int, n_layer: int, layered: bool
) -> tuple[int, int, int, int]:
    """Query heads, key heads, and the widths of keys and values."""
    key = f"{arch}.attention.head_count"
    n_head = _read_count(file, key, n_layer, layered, hi=4096)
    n_head_kv = _read_count(file, f"{key}_kv", n_layer, layered, n_head, hi=n_head)
    if n_head % n_head_kv:
        raise ModelError(
            f"{file.path}: {n_head} query heads cannot share {n_head_kv} key heads evenly"
        )
    even = n_embd // n_head
    head_dim_k = file.get_int(f"{arch}.attention.key_length", even, lo=1, hi=65536)
    head_dim_v = file.get_int(f"{arch}.attention.value_length", even, lo=1, hi=65536)
    if not (head_dim_k and head_dim_v):
        raise ModelError(f"{file.path}: {n_head} heads do not fit an embedding of {n_embd}")
    return n_head, n_head_kv, head_dim_k, head_dim_v


def _read_count(
    file: GGUFFile, key: str, n_layer: int, layered: bool, default: int | None = None, *, hi: int
) -> int:
    """A count of 1 to `hi`; where a layer may have its own, the largest."""
    if not layered:
        return file.get_int(key, *(() if default is None else (default,)), lo=1, hi=hi)
    counts = read_layered_int(file, key, n_layer, default, hi=hi)
    if not max(counts):
        raise GGUFError(f"{file.path}: {key} is 0 for every layer")
    return max(counts)


def read_layered_int(
    file: GGUFFile, key: str, n_layer: int, default: int | None = None, *, hi: int
) -> tuple[int, ...]:
    """A count that a file gives once for all layers or for each of them: 0 to `hi`.

    Raises `GGUFError` for a missing key without a default, and for a list that is too short.
    """
    value = file.metadata.get(key)
    if not isinstance(value, np.ndarray | list):
        return (file.get_int(key, *(() if default is None else (default,)), lo=0, hi=hi),) * n_layer
    counts = [int(count) for count in value[:n_layer] if isinstance(count, int | np.integer)]
    if len(counts) < n_layer or not all(0 <= count <= hi for count in counts):
        raise GGUFError(
            f"{file.path}: {key} must give {n_layer} layers a whole number of 0 to {hi} each"
        )
    return tuple(counts)


def read_layered_flags(file: GGUFFile, key: str, n_layer: int) -> tuple[bool, ...]:
    """A flag that a file gives for each layer, as bool or as a whole number.

    Raises `GGUFError` for a missing key, one that is no array of these, and a list that is too
    short.
    """
    flags = file.get_array(key)
    if len(flags) < n_layer:
        raise GGUFError(f"{file.path}: {key} has {len(flags)} entries for {n_layer} layers")
    if not (isinstance(flags, np.ndarray) and flags.dtype.kind in "biu"):
        raise GGUFError(f"{file.path}: {key} must be an array of bool or of whole numbers")
    return tuple(bool(flag) for flag in flags[:n_layer])


def read_swa_layers(file: GGUFFile, n_layer: int, period: int) -> tuple[bool, ...]:
    """Which layers have the sliding window: the file gives a flag for each, or how many there are
    from one global layer to the next, the last of them. `period`: unless it says so."""
    key = f"{file.get_str('general.architecture')}.attention.sliding_window_pattern"
    if isinstance(file.metadata.get(key), np.ndarray | list):
        return read_layered_flags(file, key, n_layer)
    period = file.get_int(key, period, lo=0, hi=1 << 16)
    return tuple(period == 0 or il % period < period - 1 for il in range(n_layer))


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


def _refuse_experts(file: GGUFFile, arch: str) -> None:
    """For families whose graph has none."""
    n_expert = file.get_int(f"{arch}.expert_count", 0, lo=0, hi=1 << 16)
    if n_expert:
        raise ModelError(
            f"{file.path}: mixture-of-experts models ({n_expert} experts) do not run yet"
        )
