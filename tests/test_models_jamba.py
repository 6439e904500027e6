"""Jamba: experts by layer, layers by key heads, attention without positions."""

import pytest
from tiny_models import read_spec, write_tiny

from minfer_jax.errors import ModelError
from minfer_jax.gguf import open_gguf
from minfer_jax.models import jamba
from minfer_jax.models.hparams import MoEParams
from minfer_jax.models.tensors import check_tensors


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


def test_without_a_router_in_the_file_experts_are_none(hparams):
    assert hparams(0).moe is hparams(1).moe is hparams(16).moe is None


def test_a_layer_has_experts_if_it_has_a_router(tiny_path):
    file = open_gguf(tiny_path("jamba-experts-moe"))
    hp = jamba.hparams(file)
    assert hp.moe == MoEParams(
        n_expert=4,
        n_expert_used=2,
        n_ff_exp=64,
        gating="softmax",
        normalize=False,
        layers=(False, True),
    )
    shapes = {spec.name: spec.shape for spec in jamba.tensors(hp).specs}
    assert shapes["blk.0.ffn_gate.weight"] == (64, 256)
    assert shapes["blk.1.ffn_gate_inp.weight"] == (4, 256)
    assert shapes["blk.1.ffn_down_exps.weight"] == (4, 256, 64)
    assert {"blk.0.ffn_gate_inp.weight", "blk.1.ffn_gate.weight"}.isdisjoint(shapes)


def test_a_router_without_experts_is_refused(tmp_path):
    path = write_tiny(
        read_spec("jamba-experts-moe"), tmp_path / "x.gguf", kv={"jamba.expert_count": 0}
    )
    file = open_gguf(path)
    with pytest.raises(ModelError, match=r"no tensor 'blk\.1\.ffn_gate_inp\.weight'"):
        check_tensors(file, jamba.tensors(jamba.hparams(file)))
