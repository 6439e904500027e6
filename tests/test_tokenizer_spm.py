"""`tokenizer.spm`: merges by score, byte fallback and the space that is put before a text."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax.errors import TokenizerError
from minfer_jax.tokenizer import from_metadata

BYTES = [f"<0x{i:02X}>" for i in range(256)]
WORDS = ["▁", "a", "b", "c", "h", "i", "▁h", "▁hi", "ab", "bc", "aa", "▁▁", "'a"]
TOKENS = ["<unk>", "<s>", "</s>", "<tool>", *BYTES, *WORDS]
TYPES = [2, 3, 3, 4] + [6] * 256 + [1] * len(WORDS)
SCORES = {"▁h": -1.0, "▁hi": -2.0, "bc": -3.0, "ab": -4.0, "aa": -5.0, "▁▁": -6.0, "'a": -7.0}


def toy(tokens=TOKENS, types=TYPES, scores=SCORES, **values):
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": np.array(types),
        "tokenizer.ggml.scores": np.array([scores.get(t, -99.0) for t in tokens], np.float32),
    }
    return from_metadata(metadata | {f"tokenizer.ggml.{key}": v for key, v in values.items()})


def pieces(tokenizer, text, **options):
    ids = tokenizer.encode(text, add_special=False, **options)
    return [tokenizer.token_str(i) for i in ids]


BARE = toy(add_space_prefix=False)


def test_t09_the_best_score_merges_first():
    assert pieces(BARE, "abc") == ["a", "bc"]
    assert pieces(toy(scores=SCORES | {"ab": -1.0}, add_space_prefix=False), "abc") == ["ab", "c"]


def test_t09_the_leftmost_merges_first_on_ties():
    assert pieces(BARE, "aaa") == ["aa", "a"]
    assert pieces(toy(scores={}, add_space_prefix=False), "abc") == ["ab", "c"]


def test_t04_a_space_after_each_special_token_if_the_file_says_so():
    with_prefix = toy()
    assert with_prefix.add_space_prefix
    assert pieces(with_prefix, "hi<s>hi") == ["▁hi", "<s>", "▁hi"]
    assert pieces(with_prefix, "hi<tool>hi", parse_special=False) == ["▁hi", "<tool>", "▁hi"]
    assert pieces(BARE, "hi<s>hi") == ["h", "i", "<s>", "h", "i"]
    assert pieces(BARE, "<s>", parse_special=False)[0] == "<0x3C>"


def test_the_space_that_encode_adds_is_taken_off_by_decode():
    tokenizer = toy()
    for text in ("hi", " hi", "", "  a"):
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text
    assert tokenizer.decode(tokenizer.encode("hi")) == "<s>hi"
    assert tokenizer.decode(tokenizer.encode("hi"), skip_special=True) == "hi"
    assert tokenizer.piece(tokenizer.encode("hi")[1]) == b" hi"


def test_bos_comes_first_by_default():
    assert toy().encode("") == [1]
    assert toy().encode("hi") == [1, TOKENS.index("▁hi")]
    assert toy(add_bos_token=False, add_eos_token=True).encode("") == [2]


def test_t10_one_byte_token_for_each_byte():
    text = "🦙\x00\u3000\ue000"
    assert pieces(BARE, text) == [f"<0x{byte:02X}>" for byte in text.encode()]
    assert BARE.decode_bytes(BARE.encode(text, add_special=False)) == text.encode()


def test_t10_a_byte_token_spelled_out_is_text():
    ids = BARE.encode("<0x0A>", add_special=False)
    assert 4 + 0x0A not in ids
    assert BARE.decode(ids) == "<0x0A>"


def test_t10_a_missing_byte_token_is_unknown():
    tokens = [token for token in TOKENS if token != "<0x0A>"]
    tokenizer = toy(tokens, [2, 3, 3, 4] + [6] * 255 + [1] * len(WORDS), add_space_prefix=False)
    assert pieces(tokenizer, "a\nb") == ["a", "<unk>", "b"]


@pytest.mark.parametrize("data", [b"\xe6\xad", b"\xff", b"ok\xf0\x9f", b"\xc3(", b"\xed\xa0\x80"])
def test_t01_invalid_bytes_round_trip(data):
    assert BARE.decode_bytes(BARE.encode(data, add_special=False)) == data


@settings(deadline=None)
@given(st.binary().filter(lambda data: b" " not in data))
def test_t01_any_bytes_round_trip(data):
    ids = BARE.encode(data, add_special=False, parse_special=False)
    assert BARE.decode_bytes(ids) == data


def test_t01_a_cut_off_character_swallows_the_mark_of_a_space():
    """As in llama.cpp, which escapes spaces before it looks for characters."""
    assert pieces(BARE, b"\xc0 ") == ["<0xC0>", "<0xE2>", "<0x96>", "<0x81>"]


@settings(deadline=None)
@given(st.text(alphabet="abchi '\n🦙é<>s"))
def test_words_are_independent(text):
    """Cutting the text into words changes no id: the whole text merged at once has the same."""
    whole = BARE._merge(list(text.replace(" ", "▁")))
    assert BARE.encode(text, add_special=False, parse_special=False) == whole


def test_words_are_not_cut_where_a_token_could_cross():
    tokenizer = toy([*TOKENS, "a▁"], [*TYPES, 1], SCORES | {"a▁": 0.0}, add_space_prefix=False)
    assert pieces(tokenizer, "a h") == ["a▁", "h"]


@pytest.mark.parametrize("run", ["a", ".", " ", "\n", "字"])
def test_t06_long_runs(run):
    text = run * (60000 // len(run.encode()))
    assert BARE.decode(BARE.encode(text, add_special=False)) == text


@pytest.mark.parametrize("text", ["-" * 40, " " * 200])
def test_t05_long_runs_survive(text):
    assert BARE.decode_bytes(BARE.encode(text, add_special=False)) == text.encode()


def test_pieces_by_type():
    tokenizer = toy([*TOKENS, "▁user", "<unused>", "<0xZZ>"], [*TYPES, 4, 5, 6])
    n = len(TOKENS)
    assert tokenizer.piece(1) == b"<s>"
    assert tokenizer.piece(1, special=False) == b""
    assert tokenizer.piece(0, special=False) == b""
    assert tokenizer.piece(3, special=False) == b"<tool>"
    assert tokenizer.piece(4 + 0xFF) == b"\xff"
    assert tokenizer.piece(TOKENS.index("▁hi")) == b" hi"
    # User-defined text is taken literally; unused tokens keep their text, so that none vanishes.
    assert [tokenizer.piece(n + i) for i in range(3)] == ["▁user".encode(), b"<unused>", b"<0xZZ>"]


def test_g05_scores_shorter_than_tokens():
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.scores has 2 entries"):
        from_metadata(
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.tokens": ["a", "b", "c"],
                "tokenizer.ggml.scores": np.zeros(2, np.float32),
            }
        )


def test_g05_scores_that_are_not_numbers():
    with pytest.raises(TokenizerError, match=re.escape("tokenizer.ggml.scores holds NaN")):
        toy(scores={"a": float("nan")})


def test_without_scores_all_are_equal():
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a", "b", "c", "ab"]}
    tokenizer = from_metadata(metadata | {"tokenizer.ggml.add_space_prefix": False})
    assert tokenizer.encode("abc", add_special=False) == [3, 2]
