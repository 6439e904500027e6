"""Cohere 2's hyperparameters, and what the golden cannot show: it has a scale of 1."""

import numpy as np
import pytest
from gguf_builder import f32_tensor, write_gguf
from tiny_models import golden, read_spec, write_tiny

from minfer_jax.errors import GGUFError
from minfer_jax.gguf import open_gguf
from minfer_jax.lm import load
from minfer_jax.models import cohere2
from minfer_jax.settings import Settings

KV = {
    "general.architecture": "cohere2",
    "cohere2.context_length": 8192,
    "cohere2.embedding_length": 64,
    "cohere2.block_count": 8,
    "cohere2.feed_forward_length": 96,
    "cohere2.attention.head_count": 4,
    "cohere2.attention.head_count_kv": 2,
    "cohere2.attention.layer_norm_epsilon": 1e-5,
    "cohere2.attention.sliding_window": 128,
    "cohere2.rope.freq_base": 5e4,
    "cohere2.logit_scale": 0.25,
}


@pytest.fixture
def hparams(tmp_path):
    """Reads the metadata above, with changes; a value of None leaves a key out."""

    def hparams(**changes):
        kv = {**KV, **{f"cohere2.{key}": value for key, value in changes.items()}}
        kv = {key: value for key, value in kv.items() if value is not None}
        table = f32_tensor("token_embd.weight", np.zeros((7, 64)))
        return cohere2.hparams(open_gguf(write_gguf(tmp_path / "x.gguf", kv, [table])))

    return hparams


def test_three_of_four_layers_have_a_window_and_only_they_rotate(hparams):
    hp = hparams()
    assert [hp.window(il) for il in range(8)] == [128, 128, 128, 0] * 2
    assert [hp.rope_of(il).n_rot for il in range(8)] == [16, 16, 16, 0] * 2
    assert (hp.rope_of(0).freq_base, hp.rope_of(0).style) == (5e4, "interleaved")
    flags = hparams(**{"attention.sliding_window_pattern": [0, 1] * 4})
    assert [flags.rope_of(il).n_rot for il in range(8)] == [0, 16] * 4


def test_epsilon_is_that_of_layer_norms(hparams):
    assert hparams(**{"attention.layer_norm_epsilon": 1e-3}).norm_eps == pytest.approx(1e-3)


@pytest.mark.parametrize("key", ["attention.sliding_window", "logit_scale"])
def test_window_and_scale_are_required(hparams, key):
    with pytest.raises(GGUFError, match=key):
        hparams(**{key: None})


def test_a_scale_of_zero_means_none(hparams):
    assert hparams(logit_scale=0.0).logit_scale == 1.0


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
def test_logits_are_scaled(tmp_path, exact):
    path = write_tiny(
        read_spec("cohere2-dense"), tmp_path / "x.gguf", kv={"cohere2.logit_scale": 0.125}
    )
    lm = load(path, n_ctx=64, exact=exact, settings=Settings(home=tmp_path))
    tokens, logits = golden("cohere2-dense")
    expected = 0.125 * logits
    tolerance = 1e-3 if exact else 5e-3  # the latter for keys and values in float16
    assert np.abs(lm.logits(tokens) - expected).max() < tolerance * expected.std()
