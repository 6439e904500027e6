"""`tokenizer.wordpiece`: words, normalization and longest pieces, worked by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax.errors import TokenizerError
from minfer_jax.tokenizer import from_metadata

TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁un", "aff", "able", "▁cafe", "▁Cafe", "▁café"]
TOKENS += ["▁!", "▁你", "▁好", "▁hi"]


def toy(**values):
    metadata = {"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": TOKENS}
    ids = {"bos": 2, "seperator": 3, "unknown": 1}
    metadata |= {f"tokenizer.ggml.{key}_token_id": value for key, value in ids.items()}
    return from_metadata(metadata | {f"tokenizer.ggml.{key}": v for key, v in values.items()})


TOY = toy()


def words(tokenizer, text):
    return [tokenizer.token_str(i) for i in tokenizer.encode(text, add_special=False)]


def test_the_longest_piece_first():
    assert words(TOY, "unaffable") == ["▁un", "aff", "able"]


def test_a_word_that_does_not_fit_is_unknown_as_a_whole():
    assert words(TOY, "unaffablex hi") == ["[UNK]", "▁hi"]


def test_punctuation_and_ideographs_are_words():
    assert words(TOY, "hi!你好hi") == ["▁hi", "▁!", "▁你", "▁好", "▁hi"]


@pytest.mark.parametrize("text", ["café", "CAFÉ", "cafe\u0301", " ca\u200dfe\0 \ufffd\x1f", "Cafe"])
def test_t11_case_accents_and_controls_are_dropped(text):
    assert words(TOY, text) == ["▁cafe"]


def test_normalization_can_be_switched_off():
    cased = toy(**{"normalizer.lowercase": False})
    assert words(cased, "Cafe café") == ["▁Cafe", "▁café"]
    accents = toy(**{"normalizer.strip_accents": False})
    assert words(accents, "CAFÉ") == ["▁café"]


def test_cls_and_sep_stand_round_every_text():
    assert TOY.encode("") == [2, 3]
    assert TOY.encode("hi") == [2, TOKENS.index("▁hi"), 3]
    assert (TOY.bos, TOY.eos, TOY.add_bos, TOY.add_eos) == (2, None, True, False)
    assert TOY.eog == {0}


def test_sep_stands_between_two_texts():
    hi = TOKENS.index("▁hi")
    assert (TOY.sep, TOY.add_sep) == (3, True)
    assert TOY.encode_pair("hi", "hi hi") == [2, hi, 3, hi, hi, 3]
    # Newer files say that the text ends with an EOS, which is the same token.
    ends = toy(eos_token_id=3, add_eos_token=True, add_sep_token=False)
    assert ends.encode_pair("hi", "hi hi") == [2, hi, 3, hi, hi, 3]


def test_decode_puts_the_spaces_back():
    assert TOY.decode(TOY.encode("unaffable hi", add_special=False)) == " unaffable hi"


def test_ids_that_the_kind_needs():
    metadata = {"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": ["a"]}
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.bos_token_id is missing"):
        from_metadata(metadata)


@pytest.mark.parametrize("run", ["a", ".", " ", "\n", "字"])
def test_t06_long_runs(run):
    TOY.encode(run * 131072)


@settings(deadline=None)
@given(st.one_of(st.text(), st.binary()))
def test_t01_any_text_can_be_encoded(text):
    TOY.encode(text)
