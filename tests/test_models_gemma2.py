"""Gemma 2's hyperparameters: windows, caps, scales. The golden judges the graph."""

import math

import numpy as np
import pytest
from gguf_builder import f32_tensor, write_gguf

from minfer_jax.errors import GGUFError
from minfer_jax.gguf import open_gguf
from minfer_jax.models import gemma2

KV = {
    "general.architecture": "gemma2",
    "gemma2.context_length": 8192,
    "gemma2.embedding_length": 2304,
    "gemma2.block_count": 6,
    "gemma2.feed_forward_length": 9216,
    "gemma2.attention.head_count": 8,
    "gemma2.attention.head_count_kv": 4,
    "gemma2.attention.key_length": 256,
    "gemma2.attention.value_length": 256,
    "gemma2.attention.layer_norm_rms_epsilon": 1e-6,
}
PATTERN = "attention.sliding_window_pattern"


@pytest.fixture
def hparams(tmp_path):
    """Reads the metadata above, with changes."""

    def hparams(**changes):
        kv = {**KV, **{f"gemma2.{key}": value for key, value in changes.items()}}
        table = f32_tensor("token_embd.weight", np.zeros((7, kv["gemma2.embedding_length"])))
        return gemma2.hparams(open_gguf(write_gguf(tmp_path / "x.gguf", kv, [table])))

    return hparams


def windows(hp):
    return [hp.window(il) for il in range(hp.n_layer)]


def test_every_other_layer_has_a_window_of_4096_unless_the_file_says_otherwise(hparams):
    assert windows(hparams()) == [4096, 0] * 3
    assert windows(hparams(**{"attention.sliding_window": 512})) == [512, 0] * 3
    assert windows(hparams(**{PATTERN: [0, 1, 1, 0, 0, 1]})) == [0, 4096, 4096, 0, 0, 4096]
    assert windows(hparams(**{PATTERN: 3})) == [4096, 4096, 0] * 2
    assert windows(hparams(**{"attention.sliding_window": 0})) == [0] * 6


def test_flags_of_layers_are_no_words(hparams):
    with pytest.raises(GGUFError, match=f"{PATTERN} must be an array of bool"):
        hparams(**{PATTERN: ["false"] * 6})


def test_caps(hparams):
    hp = hparams()
    assert (hp.attn_softcap, hp.final_softcap) == (50.0, 30.0)
    hp = hparams(attn_logit_softcapping=20.0, final_logit_softcapping=15.0)
    assert (hp.attn_softcap, hp.final_softcap) == (20.0, 15.0)


def test_the_27b_model_scales_queries_by_its_embedding_per_head(hparams):
    assert hparams().attn_scale == 256**-0.5
    sizes = {"embedding_length": 4608, "attention.head_count": 32, "attention.head_count_kv": 16}
    assert hparams(**sizes, block_count=46).attn_scale == 144**-0.5
    assert hparams(**sizes, block_count=42).attn_scale == 256**-0.5


def test_embeddings_are_scaled_by_a_float32_root(hparams):
    hp = hparams(embedding_length=2312)
    assert hp.embd_scale == float(np.sqrt(np.float32(2312))) != math.sqrt(2312)
    assert hp.embd_input_scale == hp.embd_scale  # given ones too


def test_window_layers_may_have_a_rotation_of_their_own(hparams):
    hp = hparams(**{"rope.freq_base": 5e5})
    assert hp.rope_of(0) == hp.rope_of(1) == hp.rope
    hp = hparams(**{"rope.freq_base_swa": 1e3, "rope.scaling.factor": 4.0})
    assert [hp.rope_of(il).freq_base for il in (0, 1)] == [1e3, 1e4]
    assert [hp.rope_of(il).freq_scale for il in (0, 1)] == [0.25, 0.25]
