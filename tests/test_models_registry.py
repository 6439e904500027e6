"""From `general.architecture` to a family."""

import pytest
from gguf_builder import write_gguf

from minfer_jax.errors import GGUFError, ModelError
from minfer_jax.gguf import open_gguf
from minfer_jax.models import gemma3, llama, qwen2, qwen3
from minfer_jax.models.registry import ARCHITECTURES, architecture

FAMILIES = {"gemma3": gemma3, "llama": llama, "qwen2": qwen2, "qwen3": qwen3}


def open_with(tmp_path, kv):
    return open_gguf(write_gguf(tmp_path / "x.gguf", kv))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_by_its_name(tmp_path, name):
    module = FAMILIES[name]
    family = architecture(open_with(tmp_path, {"general.architecture": name}))
    assert family == (module.hparams, module.tensors, module.graph)


def test_these_are_all():
    assert ARCHITECTURES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", ["mamba", "Llama", "llama ", ""])
def test_an_unknown_name_lists_the_known_ones(tmp_path, name):
    expected = (
        rf"x\.gguf: architecture '{name}' is not supported; supported: gemma3, llama, qwen2, qwen3$"
    )
    with pytest.raises(ModelError, match=expected):
        architecture(open_with(tmp_path, {"general.architecture": name}))


def test_no_name(tmp_path):
    with pytest.raises(GGUFError, match=r"x\.gguf: missing key 'general\.architecture'"):
        architecture(open_with(tmp_path, {"general.name": "x"}))


def test_a_name_that_is_no_string(tmp_path):
    with pytest.raises(GGUFError, match=r"key 'general\.architecture' is 7, allowed: a string"):
        architecture(open_with(tmp_path, {"general.architecture": 7}))
