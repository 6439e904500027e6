"""`minfer_jax.tokenizer`: from a file, and files whose tokenizer is not supported."""

import re
import subprocess
import sys

import gguf
import pytest

import minfer_jax.gguf
from minfer_jax.errors import TokenizerError
from minfer_jax.tokenizer import from_metadata, load_tokenizer


@pytest.fixture
def vocabulary(tmp_path):
    path = tmp_path / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", "a", "b", "ab"])
    writer.add_token_scores([0.0] * 6)
    writer.add_token_types([2, 3, 3, 1, 1, 1])
    writer.add_add_space_prefix(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_from_a_path_or_an_open_file(vocabulary):
    assert load_tokenizer(vocabulary).encode("ab") == [1, 5]
    assert load_tokenizer(str(vocabulary)).encode("ab") == [1, 5]
    with minfer_jax.gguf.open_gguf(vocabulary) as file:
        assert load_tokenizer(file).encode("ab") == [1, 5]


@pytest.mark.parametrize("model", ["test", "none", "no_vocab", "t5", 3])
def test_an_unsupported_model_is_named(model):
    message = f"unsupported tokenizer model {model!r}; supported: bert, gpt2, llama, rwkv"
    with pytest.raises(TokenizerError, match=re.escape(message)):
        from_metadata({"tokenizer.ggml.model": model})


def test_a_file_without_a_tokenizer():
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.model is missing"):
        from_metadata({"general.architecture": "llama"})


def test_importing_the_room_imports_neither_readers_nor_merges():
    code = (
        "import sys, minfer_jax.tokenizer as room;"
        "assert room.load_tokenizer;"
        "assert not {'tokenizers', 'minfer_jax.gguf', 'jax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
