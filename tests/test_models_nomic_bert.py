"""Nomic BERT: rotation, gate, tensors."""

import numpy as np
import pytest
from gguf_builder import f32_tensor, write_gguf

from minfer_jax.gguf import open_gguf
from minfer_jax.models import bert, nomic_bert

KV = {
    "general.architecture": "nomic-bert",
    "nomic-bert.context_length": 2048,
    "nomic-bert.embedding_length": 48,
    "nomic-bert.block_count": 2,
    "nomic-bert.feed_forward_length": 96,
    "nomic-bert.attention.head_count": 3,
    "nomic-bert.attention.layer_norm_epsilon": 1e-5,
    "nomic-bert.attention.causal": False,
    "nomic-bert.rope.freq_base": 1000.0,
    "tokenizer.ggml.token_type_count": 2,
}


@pytest.fixture
def hp(tmp_path):
    table = f32_tensor("token_embd.weight", np.zeros((7, 48)))
    fused = f32_tensor("blk.0.attn_qkv.weight", np.zeros((144, 48)))
    return nomic_bert.hparams(open_gguf(write_gguf(tmp_path / "x.gguf", KV, [table, fused])))


def test_heads_are_rotated_and_the_gate_is_silu(hp):
    assert (hp.rope.style, hp.rope.n_rot, hp.rope.freq_base) == ("half", 16, 1000.0)
    assert (hp.activation, hp.encoder.ffn, hp.encoder.fused_qkv) == ("silu", "gated", True)
    assert (hp.causal, hp.alibi) == (False, 0.0)


def test_tensors(hp):
    known = {spec.name: spec for spec in nomic_bert.tensors(hp).specs}
    assert known["blk.1.ffn_gate.weight"].shape == known["blk.1.ffn_up.weight"].shape == (96, 48)
    assert ("blk.1.ffn_gate.weight", "blk.1.ffn_up.weight") in nomic_bert.tensors(hp).groups
    assert "position_embd.weight" not in known
    # llama.cpp would load these and leave them out of the graph.
    assert not {"blk.1.ffn_up.bias", "blk.1.ffn_down.bias"} & set(known)


def test_the_graph_is_berts():
    assert nomic_bert.graph is bert.graph
