"""Granite hybrids: scales, the switch of the rotation, experts."""

import numpy as np
import pytest
from tiny_models import golden, read_spec, write_tiny

from minfer_jax.errors import GGUFError
from minfer_jax.gguf import open_gguf
from minfer_jax.lm import load
from minfer_jax.models import granitehybrid
from minfer_jax.settings import Settings

UINT, FLOAT, BOOL = ["UINT32"], ["FLOAT32"], ["BOOL"]


@pytest.fixture
def path(tmp_path):
    """Writes the tiny model with keys (name, type, value) added or changed."""

    def path(*keys):
        spec = read_spec("granitehybrid-dense")
        named = {f"granitehybrid.{name}": [kind, value] for name, kind, value in keys}
        spec["kv"] = [entry for entry in spec["kv"] if entry[0] not in named]
        spec["kv"] += [[name, *entry] for name, entry in named.items()]
        return write_tiny(spec, tmp_path / "x.gguf")

    return path


@pytest.fixture
def hparams(path):
    return lambda *keys: granitehybrid.hparams(open_gguf(path(*keys)))


def test_scales(hparams):
    hp = hparams(
        ("embedding_scale", FLOAT, 12.0),
        ("residual_scale", FLOAT, 0.25),
        ("logit_scale", FLOAT, 8.0),
        ("attention.scale", FLOAT, 0.0625),
    )
    assert (hp.embd_scale, hp.residual_scale, hp.logit_scale, hp.attn_scale) == (
        12.0,
        0.25,
        0.125,
        0.0625,
    )
    assert hp.embd_input_scale == 12.0


def test_a_scale_of_zero_is_none(hparams):
    names = ("embedding_scale", "residual_scale", "logit_scale", "attention.scale")
    hp = hparams(*((name, FLOAT, 0.0) for name in names))
    assert (hp.embd_scale, hp.residual_scale, hp.logit_scale) == (1.0, 1.0, 1.0)
    assert hp.attn_scale == 128**-0.5


def test_a_scale_out_of_range(hparams):
    with pytest.raises(GGUFError, match=r"granitehybrid\.logit_scale' is -1\.0, allowed"):
        hparams(("logit_scale", FLOAT, -1.0))


@pytest.mark.parametrize("rope", [True, False])
def test_the_switch_of_the_rotation(hparams, rope):
    hp = hparams(("rope.scaling.finetuned", BOOL, rope))
    assert hp.rope.n_rot == (128 if rope else 0)
    wanted = granitehybrid.tensors(hp)
    loaded = {spec.name for spec in wanted.specs}
    assert ("rope_freqs.weight" in loaded) == rope
    assert ("rope_freqs.weight" in wanted.ignored) != rope


def test_experts_with_weights_that_sum_up_to_one(hparams):
    hp = hparams(
        ("expert_count", UINT, 8),
        ("expert_used_count", UINT, 2),
        ("expert_shared_feed_forward_length", UINT, 192),
    )
    assert hp.moe is not None
    assert (hp.moe.n_expert, hp.moe.n_expert_used, hp.moe.n_ff_exp) == (8, 2, 384)
    assert (hp.moe.gating, hp.moe.normalize, hp.moe.n_ff_shexp) == ("softmax", True, 192)
    shapes = {spec.name: spec.shape for spec in granitehybrid.tensors(hp).specs}
    assert shapes["blk.1.ffn_down_exps.weight"] == (8, 256, 384)
    assert shapes["blk.0.ffn_up_shexp.weight"] == (192, 256)
    assert "blk.0.ffn_up.weight" not in shapes


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
def test_logits_are_scaled_whatever_computes_them(path, tmp_path, exact):
    """A head whose products are not the logits yet must not be read only in part."""
    settings = Settings(home=tmp_path / "home")
    lm = load(path(("logit_scale", FLOAT, 8.0)), n_ctx=64, exact=exact, settings=settings)
    tokens, want = golden("granitehybrid-dense")
    error = np.abs(lm.logits(tokens) * 8 - want).max()
    assert error < (1e-3 if exact else 0.2) * want.std()
