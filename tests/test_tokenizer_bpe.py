"""`tokenizer.bpe`: merges by rank, bytes, and GPT-2's first thousand merges."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax.errors import TokenizerError
from minfer_jax.tokenizer import from_metadata

GPT2 = json.loads((Path(__file__).parent / "data/tokenizer/gpt2-1000-merges.json").read_text())
TOKENIZER = from_metadata(GPT2["metadata"])


def toy(tokens, merges, pre="gpt-2", **values):
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
    }
    return from_metadata(metadata | {f"tokenizer.ggml.{key}": v for key, v in values.items()})


def pieces(tokenizer, text):
    return [tokenizer.token_str(i) for i in tokenizer.encode(text, add_special=False)]


def test_t09_the_lowest_rank_merges_first():
    tokenizer = toy(["a", "b", "c", "ab", "bc"], ["b c", "a b"])
    assert pieces(tokenizer, "abc") == ["a", "bc"]
    tokenizer = toy(["a", "b", "c", "ab", "bc"], ["a b", "b c"])
    assert pieces(tokenizer, "abc") == ["ab", "c"]


def test_t09_the_leftmost_merges_first_on_ties():
    assert pieces(toy(["a", "aa"], ["a a"]), "aaa") == ["aa", "a"]


@pytest.mark.parametrize("case", GPT2["cases"], ids=lambda case: ascii(case["text"]))
def test_ids_of_gpt2(case):
    assert TOKENIZER.encode(case["text"], add_special=False) == case["ids"]


@settings(deadline=None)
@given(st.text())
def test_round_trip_is_exact(text):
    ids = TOKENIZER.encode(text, add_special=False, parse_special=False)
    assert TOKENIZER.decode_bytes(ids) == text.encode()
    assert b"".join(map(TOKENIZER.piece, ids)) == text.encode()


@pytest.mark.parametrize("text", ["-" * 40, " " * 200, "\n" * 5000])
def test_t05_long_runs_survive(text):
    assert TOKENIZER.decode_bytes(TOKENIZER.encode(text)) == text.encode()


def test_t05_no_piece_is_empty():
    assert all(len(TOKENIZER.piece(i)) > 0 for i in range(TOKENIZER.n_vocab))


@pytest.mark.parametrize("run", ["A", ".", " ", "\n", "字"])
def test_t06_long_runs(run):
    text = run * (131072 // len(run.encode()))
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.mark.parametrize(
    ("data", "decoded"),
    [
        (b"\xe6\xad", "\ufffd\ufffd"),
        (b"\xff", "\ufffd"),
        (b"ok\xf0\x9f", "ok\ufffd\ufffd"),
    ],
)
def test_t01_invalid_bytes_become_replacement_characters(data, decoded):
    assert TOKENIZER.decode_bytes(TOKENIZER.encode(data)) == decoded.encode()


def test_t01_encoded_surrogates_and_nul_pass():
    assert TOKENIZER.decode_bytes(TOKENIZER.encode(b"\xed\xa0\x80")) == b"\xed\xa0\x80"
    assert TOKENIZER.decode_bytes(TOKENIZER.encode("a\0b")) == b"a\0b"


@settings(deadline=None)
@given(st.binary())
def test_t01_any_bytes_can_be_encoded(data):
    ids = TOKENIZER.encode(data)
    if b"\xef\xbf\xbd" not in TOKENIZER.decode_bytes(ids):
        assert len(TOKENIZER.decode_bytes(ids)) <= len(data)


def test_ignore_merges_takes_a_word_that_is_a_token():
    tokens, merges = ["a", "b", "c", "ab", "abc"], ["a b"]
    assert pieces(toy(tokens, merges, "llama-bpe", add_bos_token=False), "abc") == ["abc"]
    assert pieces(toy(tokens, merges, "gpt-2"), "abc") == ["ab", "c"]


def test_llama3_rules_want_a_bos_by_default():
    tokens = ["a", "<s>"]
    assert toy(tokens, ["a a"], "llama-bpe", bos_token_id=1).encode("a") == [1, 0]
    assert toy(tokens, ["a a"], "gpt-2", bos_token_id=1).encode("a") == [0]


@pytest.mark.parametrize("pre", ["jina-v1-en", "jina-v2-code", "roberta-bpe", "gpt-2"])
def test_encoders_rules_want_a_separator_by_default(pre):
    def build(**flags):
        ids = {"bos_token_id": 1, "eos_token_id": 2, "seperator_token_id": 2}
        return toy(["a", "<s>", "</s>"], ["a a"], pre, **ids, **flags)

    assert build().add_sep == (pre != "gpt-2")
    assert build(add_sep_token=pre == "gpt-2").add_sep == (pre == "gpt-2")
    pair = build(add_bos_token=True, add_eos_token=True, add_sep_token=True).encode_pair("a", "aa")
    assert pair == [1, 0, 2, 2, 0, 0, 2]


def test_characters_outside_the_vocabulary_are_dropped():
    assert toy(["a"], ["a a"]).encode("ab") == [0]


def test_merges_that_lead_nowhere_are_left_out():
    tokenizer = toy(["a", "b", "c", "bc"], ["a b", "b c", "x y"])
    assert pieces(tokenizer, "abc") == ["a", "bc"]


def test_a_token_that_is_not_byte_level_is_rendered_as_it_is():
    assert (
        toy(["Ġa", "Ġ你", "\udcff"], ["a a"]).decode_bytes([0, 1, 2]) == " a 你".encode() + b"\xff"
    )


@pytest.mark.parametrize(
    ("merges", "message"),
    [
        (["a b", "ab"], r"tokenizer\.ggml\.merges\[1\] has no space: 'ab'"),
        ([" a"], r"tokenizer\.ggml\.merges\[0\]"),
        (None, r"tokenizer\.ggml\.merges is missing"),
        ("a b", r"tokenizer\.ggml\.merges must be an array of strings"),
    ],
)
def test_g05_bad_merges(merges, message):
    with pytest.raises(TokenizerError, match=message):
        toy(["a", "b"], merges)


def test_an_unknown_pre_tokenizer_is_named():
    with pytest.raises(
        TokenizerError, match=r"tokenizer\.ggml\.pre = 'brandnew'; supported: .*qwen2"
    ):
        toy(["a"], ["a a"], pre="brandnew")


def test_a_missing_pre_tokenizer_is_the_default_rule():
    metadata = dict(GPT2["metadata"])
    del metadata["tokenizer.ggml.pre"]
    tokenizer = from_metadata(metadata)
    assert tokenizer.pre is None
    assert tokenizer.decode(tokenizer.encode("12345 ok")) == "12345 ok"
    assert [tokenizer.piece(i) for i in tokenizer.encode("+.")] == [b"+", b"."]
