"""State-space layers: keys, tensors, states, and the norms of FalconMamba."""

from dataclasses import replace

import numpy as np
import pytest
from gguf_builder import f32_tensor, write_gguf
from tiny_models import golden, read_spec, tensor_values, write_tiny

from minfer_jax.errors import GGUFError, ModelError
from minfer_jax.gguf import open_gguf
from minfer_jax.lm import load
from minfer_jax.models.hparams import read_hparams
from minfer_jax.models.ssm import (
    mamba2_states,
    mamba2_tensors,
    mamba_states,
    mamba_tensors,
    read_ssm,
    read_ssm2,
)
from minfer_jax.settings import Settings

KV = {
    "general.architecture": "any",
    "any.context_length": 256,
    "any.embedding_length": 768,
    "any.block_count": 1,
    "any.attention.layer_norm_rms_epsilon": 1e-5,
    "any.ssm.conv_kernel": 4,
    "any.ssm.inner_size": 1536,
}
MAMBA_130M = {"state_size": 16, "time_step_rank": 48}
MAMBA2_130M = {"state_size": 128, "time_step_rank": 24, "group_count": 1}


@pytest.fixture
def read(tmp_path):
    """The file and hyperparameters of `KV` with `any.ssm.*` keys added or changed."""

    def read(changes):
        kv = {**KV, **{f"any.ssm.{key}": value for key, value in changes.items()}}
        table = f32_tensor("token_embd.weight", np.zeros((7, 768)))
        file = open_gguf(write_gguf(tmp_path / "x.gguf", kv, [table]))
        return file, read_hparams(file, rope=False, attention=False, ffn=False)

    return read


def test_mamba_130m(read):
    file, hp = read(MAMBA_130M)
    ssm = read_ssm(file)
    assert (ssm.d_conv, ssm.d_inner, ssm.d_state, ssm.dt_rank) == (4, 1536, 16, 48)
    assert (ssm.n_group, ssm.norms) == (1, False)
    assert mamba_states(ssm) == ((3, 1536), (16, 1536))
    specs = mamba_tensors(replace(hp, ssm=ssm), 0).specs
    assert {spec.name.removeprefix("blk.0."): spec.shape for spec in specs} == {
        "ssm_in.weight": (3072, 768),
        "ssm_conv1d.weight": (1536, 4),
        "ssm_conv1d.bias": (1536,),
        "ssm_x.weight": (80, 1536),
        "ssm_dt.weight": (1536, 48),
        "ssm_dt.bias": (1536,),
        "ssm_a": (1536, 16),
        "ssm_d": (1536,),
        "ssm_out.weight": (768, 1536),
    }
    plain = {spec.name.removeprefix("blk.0.") for spec in specs if spec.plain}
    assert plain == {"ssm_conv1d.weight", "ssm_dt.weight", "ssm_a"}
    assert all(spec.required for spec in specs)


def test_time_steps_of_whole_blocks_are_a_matrix(read):
    """Their rows may be quantized: of a 7B model, kept as floats, they would be 0.5 GB."""
    file, hp = read({**MAMBA_130M, "time_step_rank": 64})
    specs = mamba_tensors(replace(hp, ssm=read_ssm(file)), 0).specs
    assert [spec.plain for spec in specs if spec.name == "blk.0.ssm_dt.weight"] == [False]


def test_mamba2_130m(read):
    file, hp = read(MAMBA2_130M)
    ssm = read_ssm2(file)
    assert mamba2_states(ssm) == ((3, 1792), (1, 128, 1536))
    specs = mamba2_tensors(replace(hp, ssm=ssm), 0, norm=False).specs
    assert {spec.name.removeprefix("blk.0."): spec.shape for spec in specs} == {
        "ssm_in.weight": (3352, 768),
        "ssm_conv1d.weight": (1792, 4),
        "ssm_conv1d.bias": (1792,),
        "ssm_dt.bias": (24,),
        "ssm_a": (24, 1),
        "ssm_d": (24, 1),
        "ssm_norm.weight": (1, 1536),
        "ssm_out.weight": (768, 1536),
    }
    assert [spec.name for spec in specs if not spec.required] == ["blk.0.ssm_norm.weight"]


def test_groups_share_out_the_state(read):
    ssm = read_ssm2(read({**MAMBA2_130M, "group_count": 8})[0])
    assert mamba2_states(ssm) == ((3, 1536 + 2 * 8 * 128), (8, 128, 192))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"time_step_rank": 25}, "25 state-space heads do not divide 1536 channels evenly"),
        ({"group_count": 5}, "or 5 groups not them"),
    ],
)
def test_heads_and_groups_that_do_not_divide(read, changes, error):
    with pytest.raises(ModelError, match=error):
        read_ssm2(read({**MAMBA2_130M, **changes})[0])


@pytest.mark.parametrize("key", ["conv_kernel", "inner_size", "state_size", "time_step_rank"])
def test_keys_out_of_range(read, key):
    with pytest.raises(GGUFError, match=rf"any\.ssm\.{key}' is 0, allowed"):
        read_ssm(read({**MAMBA_130M, key: 0})[0])


@pytest.mark.slow
def test_with_norms_the_size_of_dt_b_and_c_does_not_matter(tmp_path):
    """FalconMamba's have no weight. Without them the same change is another model."""

    def logits(name, norms, factor):
        spec = read_spec("mamba-dense")
        spec["kv"].append(["mamba.ssm.dt_b_c_rms", ["BOOL"], norms])
        spec["kv"] = [kv for kv in spec["kv"] if "rms_epsilon" not in kv[0]]
        spec["kv"].append(["mamba.attention.layer_norm_rms_epsilon", ["FLOAT32"], 0.0])
        names = [f"blk.{il}.ssm_x.weight" for il in range(2)]
        scaled = {n: tensor_values(n, 258 * 512).reshape(258, 512) * factor for n in names}
        path = write_tiny(spec, tmp_path / f"{name}.gguf", drop=tuple(names), extra=scaled)
        lm = load(path, n_ctx=64, exact=True, settings=Settings(home=tmp_path / "home"))
        return lm.logits(golden("mamba-dense")[0])

    one, scaled = (logits(str(f), True, np.float32(f)) for f in (1, 3))
    np.testing.assert_allclose(scaled, one, atol=1e-4 * one.std())
    plain, scaled = (logits(f"plain{f}", False, np.float32(f)) for f in (1, 3))
    assert np.abs(scaled - plain).max() > 0.01 * plain.std()
    assert np.abs(one - plain).max() > 0.01 * plain.std()
