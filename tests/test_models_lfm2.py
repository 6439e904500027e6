"""LFM2: which layers see the window, and the final norm's name."""

import pytest
from tiny_models import read_spec, write_tiny

from minfer_jax.gguf import open_gguf
from minfer_jax.models import lfm2


@pytest.fixture
def hparams(tmp_path):
    def hparams(drop=()):
        return lfm2.hparams(
            open_gguf(write_tiny(read_spec("lfm2-dense"), tmp_path / "x.gguf", drop=drop))
        )

    return hparams


def test_attention_layers_see_the_window(hparams):
    hp = hparams()
    assert [hp.window(il) for il in range(2)] == [32, 0]
    assert hp.attention_layers == (True, False) and hp.recurrent_layers == (False, True)
    assert (hp.qk_norm, hp.rope.style, hp.states) == (True, "half", ((2, 256),))


def test_without_a_window_they_see_everything(hparams):
    hp = hparams(drop=("lfm2.attention.sliding_window",))
    assert (hp.n_swa, hp.swa_layers) == (0, ())


def test_the_final_norm_is_called_like_one_of_the_embeddings(hparams):
    names = {spec.name for spec in lfm2.tensors(hparams()).specs}
    assert "token_embd_norm.weight" in names and "output_norm.weight" not in names
    assert "blk.1.shortconv.conv.weight" in names and "blk.1.attn_q_norm.weight" not in names
