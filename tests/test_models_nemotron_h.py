"""Nemotron-H: one block a layer, told by two lists; the norm's epsilon under either key."""

import pytest
from tiny_models import read_spec, write_tiny

from minfer_jax.errors import GGUFError, ModelError
from minfer_jax.gguf import open_gguf
from minfer_jax.models import nemotron_h

ATTENTION = "nemotron_h.attention"
UINTS = ["ARRAY", "UINT32"]


@pytest.fixture
def hparams(tmp_path):
    def hparams(kv=None, drop=()):
        spec = read_spec("nemotron_h-dense")
        path = write_tiny(spec, tmp_path / "x.gguf", kv=kv, drop=drop)
        return nemotron_h.hparams(open_gguf(path))

    return hparams


def test_what_each_layer_is(hparams):
    """Layer 2 has key heads and a feed-forward: it is the latter."""
    hp = hparams()
    assert hp.attention_layers == (True, False, False)
    assert hp.recurrent_layers == (False, True, False)
    assert (hp.n_ff, hp.n_head, hp.rope.n_rot) == (384, 2, 0)
    names = {spec.name for spec in nemotron_h.tensors(hp).specs}
    assert {"blk.0.attn_q.weight", "blk.1.ssm_in.weight", "blk.2.ffn_up.weight"} < names
    assert not {name for name in names if "ffn_gate" in name or "ffn_norm" in name}


def test_the_epsilon_of_either_key(hparams):
    both = {f"{ATTENTION}.layer_norm_epsilon": 0.25, f"{ATTENTION}.layer_norm_rms_epsilon": 0.5}
    assert hparams(both).norm_eps == 0.5
    only = {f"{ATTENTION}.layer_norm_epsilon": 0.25}
    assert hparams(only, drop=(f"{ATTENTION}.layer_norm_rms_epsilon",)).norm_eps == 0.25
    with pytest.raises(GGUFError, match="layer_norm_epsilon"):
        hparams(drop=tuple(both))


def test_feed_forwards_of_different_widths(hparams):
    with pytest.raises(ModelError, match="a feed-forward of 192 and of 384; they must be alike"):
        hparams({"nemotron_h.feed_forward_length": [192, 0, 384]})
