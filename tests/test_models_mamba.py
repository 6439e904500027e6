"""Mamba and Mamba-2 as converters write them."""

import numpy as np
import pytest
from gguf_builder import f32_tensor, write_gguf

from minfer_jax.gguf import open_gguf
from minfer_jax.memory.plan import plan_memory
from minfer_jax.models import mamba, mamba2

FAMILIES = {"mamba": mamba, "mamba2": mamba2}


@pytest.fixture(params=FAMILIES)
def hp(request, tmp_path):
    arch = request.param
    kv = {
        "context_length": 1 << 20,
        "embedding_length": 768,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "block_count": 24,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 1536,
        "ssm.state_size": 16,
        "ssm.time_step_rank": 48,
        "ssm.group_count": 1,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    keys = {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in kv.items()}
    table = f32_tensor("token_embd.weight", np.zeros((7, 768)))
    return FAMILIES[arch].hparams(open_gguf(write_gguf(tmp_path / "x.gguf", keys, [table])))


def test_no_layer_attends_and_every_one_keeps_a_state(hp):
    assert not any(hp.attends(il) for il in range(24))
    assert all(hp.recurs(il) for il in range(24))
    assert (hp.n_head, hp.n_head_kv, hp.n_ff, hp.rope.n_rot) == (0, 0, 0, 0)
    assert plan_memory(hp, n_ctx=64).caches == ()
    assert len(hp.states) == 2


def test_tensors_of_every_layer(hp):
    names = {spec.name for spec in FAMILIES[hp.arch].tensors(hp).specs}
    assert {f"blk.{il}.attn_norm.weight" for il in range(24)} < names
    assert ("blk.23.ssm_x.weight" in names) == (hp.arch == "mamba")
    assert ("blk.23.ssm_norm.weight" in names) == (hp.arch == "mamba2")
