"""Jamba: single experts, layers by key heads, attention without positions."""

import pytest
from tiny_models import read_spec, write_tiny

from minfer_jax.errors import ModelError
from minfer_jax.gguf import open_gguf
from minfer_jax.models import jamba


@pytest.fixture
def hparams(tmp_path):
    def hparams(n_expert):
        spec = read_spec("jamba-dense")
        spec["kv"].append(["jamba.expert_count", ["UINT32"], n_expert])
        return jamba.hparams(open_gguf(write_tiny(spec, tmp_path / "x.gguf")))

    return hparams


def test_a_single_expert_is_an_ordinary_feed_forward(hparams):
    hp = hparams(1)
    assert hp.attention_layers == (True, False) and hp.recurrent_layers == (False, True)
    assert hp.rope.n_rot == 0
    names = {spec.name for spec in jamba.tensors(hp).specs}
    assert {"blk.0.ffn_gate.weight", "blk.1.ffn_gate.weight", "blk.1.ssm_b_norm.weight"} < names
    assert {"blk.1.attn_q.weight", "blk.0.ssm_in.weight"}.isdisjoint(names)


def test_several_experts_are_refused(hparams):
    with pytest.raises(ModelError, match="16 experts"):
        hparams(16)
