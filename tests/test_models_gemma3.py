"""Gemma 3's hyperparameters: window pattern, two rotations, scales."""

import math

import numpy as np
import pytest
from gguf_builder import f32_tensor, write_gguf

from minfer_jax.errors import GGUFError
from minfer_jax.gguf import open_gguf
from minfer_jax.models import gemma3

KV = {
    "general.architecture": "gemma3",
    "gemma3.context_length": 32768,
    "gemma3.embedding_length": 640,
    "gemma3.block_count": 8,
    "gemma3.feed_forward_length": 2048,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 1,
    "gemma3.attention.key_length": 256,
    "gemma3.attention.value_length": 256,
    "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma3.attention.sliding_window": 512,
    "gemma3.rope.freq_base": 1e6,
}
PATTERN = "attention.sliding_window_pattern"


@pytest.fixture
def hparams(tmp_path):
    """Reads the metadata above, with changes; a value of None leaves a key out."""

    def hparams(changes=None):
        kv = {**KV, **{f"gemma3.{key}": value for key, value in (changes or {}).items()}}
        kv = {key: value for key, value in kv.items() if value is not None}
        table = f32_tensor("token_embd.weight", np.zeros((7, 640)))
        return gemma3.hparams(open_gguf(write_gguf(tmp_path / "x.gguf", kv, [table])))

    return hparams


def swa_layers(hp):
    """One letter a layer: w for the window, g for global."""
    return "".join("w" if hp.window(il) else "g" for il in range(hp.n_layer))


def test_every_sixth_layer_is_global(hparams):
    hp = hparams({"block_count": 14})
    assert swa_layers(hp) == "wwwwwgwwwwwgww"
    assert {hp.window(0), hp.window(5)} == {512, 0}


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [
        ([1, 0, 1, 1, 0, 0, 1, 1], "wgwwggww"),
        ([True, False, True, True, False, False, True, True], "wgwwggww"),
        ([0] * 7 + [1] * 93, "gggggggw"),
        (3, "wwgwwgww"),
        (1, "gggggggg"),
        (0, "wwwwwwww"),
    ],
)
def test_a_pattern_of_flags_or_a_period(hparams, pattern, layers):
    assert swa_layers(hparams({PATTERN: pattern})) == layers


def test_a_pattern_for_fewer_layers(hparams):
    with pytest.raises(GGUFError, match=rf"x\.gguf: gemma3\.{PATTERN} has 7 entries for 8 layers$"):
        hparams({PATTERN: [1] * 7})


@pytest.mark.parametrize("value", ["6", -1, 1.5])
def test_a_pattern_of_another_type(hparams, value):
    with pytest.raises(GGUFError, match=rf"x\.gguf: key 'gemma3\.{PATTERN}' is "):
        hparams({PATTERN: value})


@pytest.mark.parametrize("window", [None, 0])
def test_without_a_window_every_layer_is_global(hparams, window):
    hp = hparams({"attention.sliding_window": window, PATTERN: [1] * 8})
    assert swa_layers(hp) == "gggggggg"
    assert all(hp.rope_of(il) == hp.rope for il in range(8))


def test_window_layers_rotate_with_their_own_base_and_unscaled(hparams):
    hp = hparams({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
    local, everywhere = hp.rope_of(0), hp.rope_of(5)
    assert (local.freq_base, local.freq_scale) == (10000.0, 1.0)
    assert (everywhere.freq_base, everywhere.freq_scale) == (1e6, 0.125)
    assert local.style == everywhere.style == "half"
    assert hparams({"rope.freq_base_swa": 5000.0}).rope_of(0).freq_base == 5000.0


def test_scales(hparams):
    hp = hparams()
    assert hp.attn_scale == 1.0 / 16.0  # the head's width is 256
    assert hp.embd_scale == float(np.float32(math.sqrt(640.0))) != math.sqrt(640.0)
    assert (hp.attn_softcap, hp.final_softcap) == (0.0, 0.0)
    assert hparams({"final_logit_softcapping": 30.0}).final_softcap == 30.0


def test_the_27b_model_scales_by_its_embedding_per_head(hparams):
    sizes = {"embedding_length": 5376, "attention.head_count": 32, "attention.key_length": 128}
    assert hparams({**sizes, "block_count": 62}).attn_scale == pytest.approx(168**-0.5, rel=1e-12)
    assert hparams({**sizes, "block_count": 61}).attn_scale == pytest.approx(128**-0.5, rel=1e-12)


def test_kind_of_layer(hparams):
    hp = hparams()
    assert hp.activation == "gelu" and hp.qk_norm
    specs = {spec.name: spec for spec in gemma3.tensors(hp).specs}
    for name in ("attn_q_norm", "attn_k_norm"):
        assert specs[f"blk.7.{name}.weight"].shape == (256,)
    for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
        assert specs[f"blk.7.{name}.weight"].shape == (640,)
    assert not specs["output.weight"].required
