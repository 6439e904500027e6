"""Jina BERT v2: ALiBi, and the three forms of its feed-forward."""

import numpy as np
import pytest
from gguf_builder import f32_tensor, write_gguf

from minfer_jax.gguf import open_gguf
from minfer_jax.models import bert, jina_bert_v2

KV = {
    "general.architecture": "jina-bert-v2",
    "jina-bert-v2.context_length": 8192,
    "jina-bert-v2.embedding_length": 48,
    "jina-bert-v2.block_count": 2,
    "jina-bert-v2.feed_forward_length": 96,
    "jina-bert-v2.attention.head_count": 3,
    "jina-bert-v2.attention.layer_norm_epsilon": 1e-12,
    "jina-bert-v2.attention.causal": False,
    "tokenizer.ggml.token_type_count": 2,
}


@pytest.fixture
def hparams(tmp_path):
    def hparams(**rows):
        """Of a file whose first layer has the named matrices, of so many rows."""
        tensors = [f32_tensor("token_embd.weight", np.zeros((7, 48)))]
        tensors += [f32_tensor(f"blk.0.{k}.weight", np.zeros((n, 48))) for k, n in rows.items()]
        return jina_bert_v2.hparams(open_gguf(write_gguf(tmp_path / "x.gguf", KV, tensors)))

    return hparams


@pytest.mark.parametrize(
    ("rows", "ffn", "up"),
    [
        ({"ffn_up": 96, "ffn_gate": 96}, "gated", 96),
        ({"ffn_up": 192}, "joined", 192),
        ({"ffn_up": 96}, "plain", 96),
        ({}, "plain", 96),
    ],
)
def test_forms_of_the_feed_forward(hparams, rows, ffn, up):
    hp = hparams(**rows)
    known = {spec.name: spec for spec in jina_bert_v2.tensors(hp).specs}
    assert hp.encoder.ffn == ffn
    assert known["blk.1.ffn_up.weight"].shape == (up, 48)
    assert known["blk.1.ffn_up.bias"].shape == (up,)
    assert ("blk.1.ffn_gate.weight" in known) == (ffn == "gated")
    assert known["blk.1.ffn_down.weight"].shape == (48, 96)


def test_bias_by_distance_instead_of_positions(hparams):
    hp = hparams()
    assert (hp.alibi, hp.rope.n_rot, hp.activation, hp.causal) == (8.0, 0, "gelu", False)
    assert "position_embd.weight" not in {spec.name for spec in jina_bert_v2.tensors(hp).specs}


def test_norms_that_only_some_files_have(hparams):
    known = {spec.name: spec for spec in jina_bert_v2.tensors(hparams()).specs}
    for name in ("attn_q_norm", "attn_k_norm", "attn_norm_2"):
        for part in ("weight", "bias"):
            spec = known[f"blk.1.{name}.{part}"]
            assert spec.shape == (48,) and not spec.required


def test_the_graph_is_berts():
    assert jina_bert_v2.graph is bert.graph
