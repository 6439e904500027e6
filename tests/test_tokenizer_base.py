"""`tokenizer.base`: what all tokenizers share: flags, ids that are none, text that is none."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax.errors import TokenizerError
from minfer_jax.tokenizer import from_metadata

TOKENS = ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "<|im_end|>"]
BASE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": np.array([2, 3, 3, 1, 1, 1, 1, 3]),
    "tokenizer.chat_template": "{{ messages }}",
}


def toy(**values):
    return from_metadata(BASE | {f"tokenizer.ggml.{key}": v for key, v in values.items()})


TOY = toy()


def test_what_a_tokenizer_says_about_itself():
    assert (TOY.n_vocab, TOY.bos, TOY.eos, TOY.eot, TOY.unk) == (8, 1, 2, 7, 0)
    assert (TOY.add_bos, TOY.add_eos, TOY.eog) == (True, False, frozenset({2, 7}))
    assert (TOY.model, TOY.pre, TOY.chat_template) == ("llama", None, "{{ messages }}")
    assert TOY.token_str(3) == "▁"


@pytest.mark.parametrize("token_id", [-1, 8, 2**31, 2**70, 1.0, True, False, "1", None, np.True_])
def test_ids_that_are_none(token_id):
    for call in (TOY.piece, TOY.token_str):
        with pytest.raises(TokenizerError, match="token id"):
            call(token_id)
    with pytest.raises(TokenizerError, match="token id"):
        TOY.decode([4, token_id])


@pytest.mark.parametrize("dtype", ["int32", "uint8", "int64"])
def test_ids_from_an_array(dtype):
    assert TOY.decode(np.array([4, 5, 6], dtype)) == "abab"


def test_a_negative_id_of_an_array_does_not_count_from_the_end():
    with pytest.raises(TokenizerError, match="token id -1"):
        TOY.decode_bytes(np.array([-1]))


def test_t01_a_lone_surrogate_is_one_line():
    with pytest.raises(TokenizerError, match="lone surrogate") as error:
        TOY.encode("a\ud83d")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", [None, 1, ["a"]])
def test_text_that_is_none(text):
    with pytest.raises(TokenizerError, match="str or bytes"):
        TOY.encode(text)


def test_special_tokens_are_spelled_out_unless_skipped():
    ids = TOY.encode("ab</s>")
    assert ids == [1, 3, 6, 2]
    assert TOY.decode(ids) == "<s>ab</s>"
    assert TOY.decode(ids, skip_special=True) == "ab"


def test_special_text_is_text_unless_parsed():
    assert 2 not in TOY.encode("</s>", parse_special=False)
    assert TOY.encode("</s>", add_special=False, parse_special=True) == [2]


def test_flags_of_the_file_win_over_defaults():
    tokenizer = toy(add_bos_token=False, add_eos_token=True)
    assert tokenizer.encode("ab") == [3, 6, 2]


@pytest.mark.parametrize(
    ("flags", "ids"),
    [
        ({}, [1, 3, 4, 3, 5]),
        ({"add_eos_token": True}, [1, 3, 4, 2, 3, 5, 2]),
        ({"add_sep_token": True}, [1, 3, 4, 3, 5]),
        ({"add_sep_token": True, "seperator_token_id": 7}, [1, 3, 4, 7, 3, 5]),
        ({"add_sep_token": False, "seperator_token_id": 7}, [1, 3, 4, 3, 5]),
        (
            {"add_bos_token": False, "add_eos_token": True, "add_sep_token": True}
            | {"seperator_token_id": 7},
            [3, 4, 2, 7, 3, 5, 2],
        ),
    ],
)
def test_two_texts_with_what_the_model_wants_between_them(flags, ids):
    tokenizer = toy(**flags)
    assert tokenizer.encode_pair("a", "b") == ids
    assert tokenizer.sep == flags.get("seperator_token_id")
    assert tokenizer.add_sep == (7 in ids)


def test_a_separator_flag_that_is_none():
    with pytest.raises(TokenizerError, match="add_sep_token must be true or false"):
        toy(seperator_token_id=7, add_sep_token=1)


def test_g05_add_bos_without_a_bos_id():
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a"]}
    with pytest.raises(TokenizerError, match=r"add_bos_token is true, but there is no BOS id"):
        from_metadata(metadata | {"tokenizer.ggml.add_bos_token": True})
    assert from_metadata(metadata).add_bos is False


def test_g05_one_token_and_an_eos_id_outside():
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a"]}
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.eos_token_id is 4294967295"):
        from_metadata(metadata | {"tokenizer.ggml.eos_token_id": 4294967295})


def test_g05_duplicate_strings_keep_the_first_id():
    tokens = [*TOKENS, "ab"]
    tokenizer = toy(tokens=tokens, token_type=np.array([2, 3, 3, 1, 1, 1, 1, 3, 1], np.uint32))
    assert tokenizer.encode("ab", add_special=False) == [3, 6]
    assert tokenizer.piece(8) == b"ab"


def test_a_template_must_be_a_string():
    with pytest.raises(TokenizerError, match=r"tokenizer\.chat_template must be a string"):
        from_metadata(BASE | {"tokenizer.chat_template": 3})


@settings(deadline=None)
@given(st.text(alphabet=st.characters(), max_size=30), st.booleans(), st.booleans())
def test_encode_raises_nothing_but_its_own_error(text, add_special, parse_special):
    try:
        TOY.encode(text, add_special, parse_special)
    except TokenizerError:
        assert any("\ud800" <= char <= "\udfff" for char in text)
