"""Layers of several kinds: which attend, and what tensors each kind has."""

import numpy as np
import pytest
from gguf_builder import f32_tensor, write_gguf

from minfer_jax.errors import GGUFError, ModelError
from minfer_jax.gguf import open_gguf
from minfer_jax.models.hparams import read_hparams
from minfer_jax.models.layers import (
    attending_layers,
    attention_tensors,
    ffn_tensors,
    norm_tensors,
    outer_tensors,
    tensor_list,
)

KV = {
    "general.architecture": "any",
    "any.context_length": 256,
    "any.embedding_length": 64,
    "any.block_count": 3,
    "any.feed_forward_length": 96,
    "any.attention.head_count": 4,
    "any.attention.layer_norm_rms_epsilon": 1e-5,
}


@pytest.fixture
def read(tmp_path):
    """The file and hyperparameters of `KV` with changes."""

    def read(**changes):
        kv = {**KV, **{f"any.attention.{key}": value for key, value in changes.items()}}
        table = f32_tensor("token_embd.weight", np.zeros((7, 64)))
        file = open_gguf(write_gguf(tmp_path / "x.gguf", kv, [table]))
        return file, read_hparams(file, layered=True)

    return read


def counts(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


@pytest.mark.parametrize(
    ("changes", "attends"),
    [
        ({}, (True, True, True)),
        ({"head_count_kv": 2}, (True, True, True)),
        ({"head_count_kv": counts(0, 2, 0)}, (False, True, False)),
        ({"head_count": counts(4, 0, 4)}, (True, False, True)),
        ({"head_count": counts(4, 0, 4), "head_count_kv": counts(2, 0, 2)}, (True, False, True)),
    ],
)
def test_layers_without_key_heads_do_not_attend(read, changes, attends):
    file, hp = read(**changes)
    assert attending_layers(file, hp) == attends
    assert (hp.n_head, hp.n_head_kv) == (4, 2 if "head_count_kv" in changes else 4)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"head_count_kv": counts(2, 0, 4)}, "layer 0 has 4 query and 2 key heads and another one"),
        ({"head_count": counts(4, 0, 2), "head_count_kv": counts(2, 0, 2)}, "layer 2 has 2 query"),
    ],
)
def test_layers_must_be_alike(read, changes, error):
    file, hp = read(**changes)
    with pytest.raises(ModelError, match=error):
        attending_layers(file, hp)


def test_a_list_that_is_too_short(read):
    with pytest.raises(GGUFError, match="head_count_kv must give 3 layers"):
        read(head_count_kv=counts(2, 0))


def test_the_tensors_of_each_kind(read):
    _, hp = read(head_count_kv=2, key_length=24, value_length=8)
    parts = tensor_list(
        outer_tensors(hp, norm="last_norm"),
        norm_tensors(0, ("attn_norm", 64)),
        attention_tensors(hp, 0, output_bias=True),
        ffn_tensors(hp, 1, bias=True),
        ffn_tensors(hp, 2, gated=False),
        ignored=["unused"],
    )
    shapes = {spec.name: spec.shape for spec in parts.specs}
    assert shapes == {
        "token_embd.weight": (7, 64),
        "last_norm.weight": (64,),
        "output.weight": (7, 64),
        "blk.0.attn_norm.weight": (64,),
        "blk.0.attn_q.weight": (96, 64),
        "blk.0.attn_k.weight": (48, 64),
        "blk.0.attn_v.weight": (16, 64),
        "blk.0.attn_output.weight": (64, 32),
        "blk.0.attn_q.bias": (96,),
        "blk.0.attn_k.bias": (48,),
        "blk.0.attn_v.bias": (16,),
        "blk.0.attn_output.bias": (64,),
        "blk.1.ffn_gate.weight": (96, 64),
        "blk.1.ffn_up.weight": (96, 64),
        "blk.1.ffn_down.weight": (64, 96),
        "blk.1.ffn_gate.bias": (96,),
        "blk.1.ffn_up.bias": (96,),
        "blk.1.ffn_down.bias": (64,),
        "blk.2.ffn_up.weight": (96, 64),
        "blk.2.ffn_down.weight": (64, 96),
    }
    optional = {spec.name for spec in parts.specs if not spec.required}
    assert optional == {"output.weight", *(name for name in shapes if name.endswith("bias"))}
    assert parts.ignored == ("unused",)
    assert parts.groups == (
        ("blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight"),
        ("blk.1.ffn_gate.weight", "blk.1.ffn_up.weight"),
    )
