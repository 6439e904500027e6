"""Qwen3.5: rotation by sections, which for text is rotation by positions."""

import pytest
from tiny_models import read_spec, write_tiny

from minfer_jax.errors import ModelError
from minfer_jax.gguf import open_gguf
from minfer_jax.models import qwen35

SECTIONS = "qwen35.rope.dimension_sections"


@pytest.fixture
def hparams(tmp_path):
    def hparams(n_rot, sections):
        kv = {"qwen35.rope.dimension_count": n_rot, SECTIONS: sections}
        path = write_tiny(read_spec("qwen35-dense"), tmp_path / "x.gguf", kv=kv)
        return qwen35.hparams(open_gguf(path))

    return hparams


@pytest.mark.parametrize(
    ("n_rot", "sections"), [(64, [11, 11, 10, 0]), (64, [11, 11, 10]), (128, [32, 32, 32, 32])]
)
def test_sections_of_time_and_space_are_one(hparams, n_rot, sections):
    hp = hparams(n_rot, sections)
    assert (hp.rope.style, hp.rope.n_rot) == ("half", n_rot)


@pytest.mark.parametrize(
    "sections", [[11, 11, 9, 1], [8, 8, 8, 8], [0, 16, 16, 0], [10, 11, 11, 0]]
)
def test_pairs_of_a_fourth_kind_are_refused(hparams, sections):
    with pytest.raises(ModelError, match=r"leaves some of 32 pairs out"):
        hparams(64, sections)


def test_what_reads_a_layers_input_is_one_group(hparams):
    groups = {frozenset(group) for group in qwen35.tensors(hparams(64, [11, 11, 10])).groups}
    inputs = {
        "blk.0": ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta"),
        "blk.1": ("attn_q", "attn_k", "attn_v"),
    }
    for blk, names in inputs.items():
        assert frozenset(f"{blk}.{name}.weight" for name in names) in groups


@pytest.mark.parametrize("sections", [[11, 11], [0, 0, 0, 0], [-1, 20, 20, 0]])
def test_sections_that_divide_nothing_are_refused(hparams, sections):
    with pytest.raises(ModelError, match="does not divide the rotated pairs"):
        hparams(64, sections)
