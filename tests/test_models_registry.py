"""From `general.architecture` to a family."""

import importlib

import pytest
from gguf_builder import write_gguf

from minfer_jax.errors import GGUFError, ModelError
from minfer_jax.gguf import open_gguf
from minfer_jax.models.registry import ARCHITECTURES, architecture

NAMES = (
    "bert cohere2 deepseek2 falcon-h1 gemma2 gemma3 granitehybrid jamba jina-bert-v2 lfm2 llama"
    " mamba mamba2 nemotron_h nomic-bert qwen2 qwen3 qwen35 qwen3next rwkv6 rwkv7"
)
FAMILIES = tuple(NAMES.split())


def open_with(tmp_path, kv):
    return open_gguf(write_gguf(tmp_path / "x.gguf", kv))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_by_its_name(tmp_path, name):
    module = importlib.import_module(f"minfer_jax.models.{name.replace('-', '_')}")
    family = architecture(open_with(tmp_path, {"general.architecture": name}))
    assert family == (module.hparams, module.tensors, module.graph)


def test_these_are_all():
    assert tuple(ARCHITECTURES) == FAMILIES


@pytest.mark.parametrize("name", ["mamba3", "Llama", "llama ", ""])
def test_an_unknown_name_lists_the_known_ones(tmp_path, name):
    known = ", ".join(FAMILIES)
    expected = rf"x\.gguf: architecture '{name}' is not supported; supported: {known}$"
    with pytest.raises(ModelError, match=expected):
        architecture(open_with(tmp_path, {"general.architecture": name}))


def test_no_name(tmp_path):
    with pytest.raises(GGUFError, match=r"x\.gguf: missing key 'general\.architecture'"):
        architecture(open_with(tmp_path, {"general.name": "x"}))


def test_a_name_that_is_no_string(tmp_path):
    with pytest.raises(GGUFError, match=r"key 'general\.architecture' is 7, allowed: a string"):
        architecture(open_with(tmp_path, {"general.architecture": 7}))
