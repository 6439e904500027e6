"""`tokenizer.vocab`: the token table, and metadata that disagrees with itself (G05)."""

import numpy as np
import pytest

from minfer_jax.errors import TokenizerError
from minfer_jax.tokenizer import vocab
from minfer_jax.tokenizer.vocab import read_bool, read_numbers, read_vocab


def metadata(**values):
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int32", "int64", "uint64"])
def test_g05_token_type_of_any_integer_width(dtype):
    types = np.array([1, 2, 3, 4, 5, 6, 0, 99], dtype)
    table = read_vocab(metadata(tokens=list("abcdefgh"), token_type=types))
    assert table.attrs.tolist() == [
        *(vocab.NORMAL, vocab.UNKNOWN, vocab.CONTROL, vocab.USER_DEFINED),
        *(vocab.UNUSED, vocab.BYTE, 0, 0),
    ]


def test_without_token_types_all_are_normal():
    assert read_vocab(metadata(tokens=["a", "b"])).attrs.tolist() == [vocab.NORMAL] * 2


def test_g05_of_equal_strings_the_first_id_counts():
    table = read_vocab(metadata(tokens=["x", "a", "b", "a", "x"]))
    assert dict(table.ids) == {"x": 0, "a": 1, "b": 2}
    assert len(table) == 5


def test_empty_strings_get_a_name():
    table = read_vocab(metadata(tokens=["a", "", "", "a"]))
    assert list(table.tokens) == ["a", "[EMPTY_1]", "[EMPTY_2]", "a"]
    assert table.ids == {"a": 0, "[EMPTY_1]": 1, "[EMPTY_2]": 2}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, r"tokenizer\.ggml\.tokens is missing"),
        ({"tokens": []}, r"tokenizer\.ggml\.tokens is empty"),
        ({"tokens": "abc"}, r"tokenizer\.ggml\.tokens must be an array of strings"),
        ({"tokens": ["a", 1]}, r"tokenizer\.ggml\.tokens must be an array of strings"),
        ({"tokens": np.arange(3)}, r"tokenizer\.ggml\.tokens must be an array of strings"),
        (
            {"tokens": ["a", "b"], "token_type": np.array([1])},
            r"token_type has 1 entries, tokenizer\.ggml\.tokens has 2",
        ),
        ({"tokens": ["a"], "token_type": np.array([1, 1])}, "token_type has 2 entries"),
        ({"tokens": ["a"], "token_type": np.array([1.0])}, "token_type must be .* integers"),
        ({"tokens": ["a"], "token_type": ["1"]}, "token_type must be an array of numbers"),
    ],
)
def test_g05_inconsistent_tables_are_refused(values, message):
    with pytest.raises(TokenizerError, match=message):
        read_vocab(metadata(**values))


def test_g05_scores_shorter_than_tokens():
    with pytest.raises(TokenizerError, match=r"ggml\.scores has 1 entries"):
        read_numbers(metadata(scores=np.zeros(1, np.float32)), "scores", 2)


def test_flags_are_true_or_false():
    assert read_bool(metadata(add_bos_token=False), "add_bos_token", True) is False
    assert read_bool({}, "add_bos_token", True) is True
    with pytest.raises(TokenizerError, match=r"add_bos_token must be true or false, not 1"):
        read_bool(metadata(add_bos_token=1), "add_bos_token", True)


@pytest.mark.parametrize(
    ("token", "value"), [("<0x0A>", 10), ("<0xff>", 255), ("<0xZZ>", None), ("0x0A", None)]
)
def test_byte_tokens(token, value):
    assert vocab.byte_value(token) == value
