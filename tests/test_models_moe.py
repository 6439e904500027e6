"""Mixtures of experts as files describe them."""

from dataclasses import replace

import numpy as np
import pytest
from gguf_builder import f32_tensor, write_gguf

from minfer_jax.errors import GGUFError, ModelError
from minfer_jax.gguf import open_gguf
from minfer_jax.models.hparams import MoEParams, read_hparams
from minfer_jax.models.moe import moe_tensors, read_moe

KV = {
    "general.architecture": "llama",
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.expert_count": 8,
    "llama.expert_used_count": 2,
}


@pytest.fixture
def opened(tmp_path):
    """A file of the metadata above, with changes, and of tensors called `names`."""

    def opened(names=(), **changes):
        kv = {**KV, **{f"llama.{key}": value for key, value in changes.items()}}
        kv = {key: value for key, value in kv.items() if value is not None}
        tensors = [f32_tensor(name, np.zeros((7, 64))) for name in ("token_embd.weight", *names)]
        return open_gguf(write_gguf(tmp_path / "x.gguf", kv, tensors))

    return opened


def test_a_file_that_says_little(opened):
    assert read_moe(opened(), 96) == MoEParams(n_expert=8, n_expert_used=2, n_ff_exp=96)


def test_a_file_without_experts(opened):
    assert read_moe(opened(expert_count=0), 96) is None
    assert read_moe(opened(expert_count=None), 96) is None


def test_a_file_that_says_everything(opened):
    file = opened(
        names=["blk.1.ffn_gate_up_exps.weight"],
        expert_feed_forward_length=32,
        expert_shared_count=2,
        expert_gating_func=2,
        expert_weights_norm=True,
        expert_weights_scale=2.5,
        expert_group_count=4,
        expert_group_used_count=3,
        leading_dense_block_count=1,
    )
    assert read_moe(file, 96) == MoEParams(
        n_expert=8,
        n_expert_used=2,
        n_ff_exp=32,
        n_ff_shexp=64,
        gating="sigmoid",
        normalize=True,
        scale=2.5,
        n_group=4,
        n_group_used=3,
        joined=True,
        n_dense=1,
    )


def test_the_familys_habits_count_where_the_file_says_nothing(opened):
    moe = read_moe(opened(), 96, gating="sigmoid", normalize=True)
    assert moe is not None and (moe.gating, moe.normalize) == ("sigmoid", True)
    moe = read_moe(opened(expert_gating_func=1, expert_weights_norm=False), 96, normalize=True)
    assert moe is not None and (moe.gating, moe.normalize) == ("softmax", False)


def test_a_width_of_the_shared_expert_goes_before_a_count(opened):
    moe = read_moe(opened(expert_shared_count=2, expert_shared_feed_forward_length=80), 96)
    assert moe is not None and moe.n_ff_shexp == 80


def test_a_scale_of_zero_means_none_and_so_do_no_groups(opened):
    moe = read_moe(opened(expert_weights_scale=0.0, expert_group_count=0), 96)
    assert moe is not None and (moe.scale, moe.n_group) == (1.0, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_used_count": 9}, r"llama\.expert_used_count' is 9"),
        ({"expert_used_count": 0}, r"llama\.expert_used_count' is 0"),
        ({"expert_used_count": None}, "expert_used_count"),
        ({"expert_count": -1}, r"llama\.expert_count' is -1"),
        ({"expert_group_count": 3}, "8 experts do not make 3 equal groups"),
        ({"expert_group_count": 4}, "expert_group_used_count"),
        ({"expert_gating_func": 3}, r"expert_gating_func 3 is not supported \(1, softmax, and 2"),
        (
            {"expert_group_count": 8, "expert_group_used_count": 1},
            "1 of 8 groups have fewer experts than the 2 that a token uses",
        ),
    ],
)
def test_what_does_not_fit_is_refused(opened, changes, message):
    with pytest.raises((GGUFError, ModelError), match=rf"x\.gguf: .*{message}"):
        read_moe(opened(**changes), 96)


def test_only_families_that_know_experts_take_such_a_file(opened):
    with pytest.raises(ModelError, match=r"8 experts\) do not run yet"):
        read_hparams(opened())
    assert read_hparams(opened(), experts=True).n_embd == 64


def shapes(opened, **changes):
    file = opened(**changes)
    hp = read_hparams(file, experts=True)
    wanted = moe_tensors(replace(hp, moe=read_moe(file, hp.n_ff)), 1)
    assert all(spec.name.startswith("blk.1.") for spec in wanted.specs)
    required = {s.name[6:]: s.shape for s in wanted.specs if s.required}
    return required, {s.name[6:]: s.shape for s in wanted.specs if not s.required}, wanted.groups


def test_tensors_of_a_layer(opened):
    required, optional, groups = shapes(opened, expert_feed_forward_length=32)
    assert required == {
        "ffn_gate_inp.weight": (8, 64),
        "ffn_gate_exps.weight": (8, 32, 64),
        "ffn_up_exps.weight": (8, 32, 64),
        "ffn_down_exps.weight": (8, 64, 32),
    }
    assert optional == {"exp_probs_b.bias": (8,)} and groups == ()


def test_tensors_of_a_layer_with_all_there_can_be(opened):
    names = ["blk.0.ffn_gate_up_exps.weight"]
    required, optional, groups = shapes(opened, names=names, expert_shared_count=1)
    assert required["ffn_gate_up_exps.weight"] == (8, 192, 64)
    assert "ffn_gate_exps.weight" not in required
    shared = {name: required[f"ffn_{name}_shexp.weight"] for name in ("gate", "up", "down")}
    assert shared == {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}
    assert optional == {"exp_probs_b.bias": (8,), "ffn_gate_inp_shexp.weight": (64,)}
    assert groups == (("blk.1.ffn_gate_shexp.weight", "blk.1.ffn_up_shexp.weight"),)
