"""Qwen3-Next: its experts, and two forms of the tensors that delta net layers read with."""

import numpy as np
import pytest
from tiny_models import read_spec, write_tiny

from minfer_jax.errors import ModelError
from minfer_jax.gguf import open_gguf
from minfer_jax.models import qwen3next
from minfer_jax.models.tensors import check_tensors


@pytest.fixture
def read(tmp_path):
    """(hp, file) of a tiny model with changes."""

    def read(name, **changes):
        file = open_gguf(write_tiny(read_spec(name), tmp_path / "x.gguf", **changes))
        return qwen3next.hparams(file), file

    return read


def test_of_two_forms_the_newer_one_is_read(read):
    hp, file = read("qwen3next-moe")
    assert not hp.delta.joined
    names = {info.name for info in check_tensors(file, qwen3next.tensors(hp))}
    assert {"blk.0.attn_qkv.weight", "blk.0.attn_gate.weight"} <= names
    assert "blk.0.ssm_in.weight" in file.tensors and "blk.0.ssm_in.weight" not in names


def test_the_older_form_alone(read):
    hp, file = read("qwen3next-joined-moe")
    assert hp.delta.joined
    names = {info.name for info in check_tensors(file, qwen3next.tensors(hp))}
    assert "blk.0.ssm_in.weight" in names and "blk.0.attn_qkv.weight" not in names


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("qwen3next-moe", ("attn_qkv", "attn_gate", "ssm_ba")),
        ("qwen3next-joined-moe", ("ssm_in", "ssm_ba")),
    ],
)
def test_what_reads_a_layers_input_is_one_group(read, name, inputs):
    groups = qwen3next.tensors(read(name)[0]).groups
    assert tuple(f"blk.0.{name}.weight" for name in inputs) in groups


def test_neither_form_is_refused(read):
    hp, file = read("qwen3next-joined-moe", drop=("blk.0.ssm_in.weight",))
    with pytest.raises(ModelError, match=r"'blk.0.ssm_in.weight' is missing"):
        check_tensors(file, qwen3next.tensors(hp))


def test_experts(read):
    moe = read("qwen3next-moe")[0].moe
    assert (moe.n_expert, moe.n_expert_used, moe.n_ff_exp, moe.n_ff_shexp) == (2, 2, 384, 192)
    assert (moe.gating, moe.normalize) == ("softmax", True)


def test_the_shared_expert_is_as_wide_as_a_feed_forward_unless_the_file_says_so(read):
    drop = ("qwen3next.expert_shared_feed_forward_length",)
    assert read("qwen3next-moe", drop=drop)[0].moe.n_ff_shexp == 384


def test_without_experts_it_is_refused(read):
    with pytest.raises(ModelError, match="expert_count is 0 or missing"):
        read("qwen3next-moe", drop=("qwen3next.expert_count",))


def test_queries_keys_values_and_gates_key_head_by_key_head(read):
    hp, _ = read("qwen3next-joined-moe")  # 2 key heads, 4 value heads, 64 values each
    part = {"q": 64, "k": 64, "v": 128, "z": 128}
    columns = [f"{name}{head}" for head in range(2) for name, n in part.items() for _ in range(n)]
    codes = {name: float(i) for i, name in enumerate(sorted(set(columns)))}
    x = np.float32([[codes[name] for name in columns]])
    qkv, z = qwen3next._unjoined(hp, x)
    expected = [f"{name}{head}" for name in "qkv" for head in range(2) for _ in range(part[name])]
    assert qkv[0].tolist() == [codes[name] for name in expected]
    assert z[0].tolist() == [codes["z0"]] * 128 + [codes["z1"]] * 128
