"""`tokenizer.rwkv`: escapes and longest tokens; the ids and pieces are llama.cpp's own."""

import numpy as np
import pytest
from gguf_builder import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax.errors import TokenizerError
from minfer_jax.tokenizer import from_metadata, load_tokenizer

MULTI = [r"\n\n", r"\x00\xff", r"\t\t", "ab", "abc", "abcde", r"\'", r"it\'s", r"a\\n", r"\r\n"]
MULTI += [r"\xe4\xbd", r"\xe4\xbd\xa0", r"\xe5\xa5\xbd", r"caf\xc3\xa9", "é", r"\a\b", " the"]
MULTI += [r"<|x\n|>", r"\q", r"zz\xff", "<0x41>"]
TOKENS = ["<s>", *(repr(bytes([byte]))[2:-1] for byte in range(256)), *MULTI]
TOKENS += [r"<|end\t|>", "[PAD]", ""]
CONTROL, NORMAL, USER, UNUSED = 3, 1, 4, 5
TYPES = [CONTROL, *[NORMAL] * (256 + len(MULTI)), CONTROL, UNUSED, NORMAL]
TYPES[TOKENS.index(r"<|x\n|>")] = USER
METADATA = {
    "general.architecture": "rwkv7",
    "tokenizer.ggml.model": "rwkv",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": np.array(TYPES, np.int32),
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.eot_token_id": 257,
}
WORLD = from_metadata(METADATA)
PIECES = [WORLD.piece(i) for i in range(WORLD.n_vocab)]


def toy(tokens, **values):
    metadata = {"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": tokens}
    return from_metadata(metadata | {f"tokenizer.ggml.{key}": v for key, v in values.items()})


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", []),
        ("abcd abcde the", [261, 101, 33, 262, 273]),
        ("café 你好 你", [270, 33, 268, 269, 33, 268]),
        ("\n\n\n\t\t\r\n", [257, 11, 259, 266]),
        ("it's '", [264, 33, 263]),
        ("a\\n\\", [265, 93]),
        (b"\x00\xff\x00\xe4\xbd\xe4", [258, 1, 267, 229]),
        ("<s>q<|x\\n|><|x\n|>", [0, 275, 274, 274]),
        (b"zz\xff<0x41>[PAD]", [276, 277, 279]),
        ("[EMPTY_280]", [280]),
        ("ab", [272]),  # the last of two tokens of the same bytes
    ],
)
def test_ids(text, ids):
    assert WORLD.encode(text) == WORLD.encode(text, False, False) == ids


def test_special_tokens_are_looked_for_as_the_file_spells_them():
    text = "<|end\\t|><|end\t|>"
    spelled = [61, 125, 102, 111, 101, 93, 117, 125, 63]
    assert WORLD.encode(text, parse_special=False) == [*spelled, 278]
    assert WORLD.encode(text) == [278, 278]


def test_pieces_are_bytes():
    assert [WORLD.piece(i) for i in range(1, 257)] == [bytes([byte]) for byte in range(256)]
    assert WORLD.piece(258) == b"\x00\xff"
    assert WORLD.piece(265) == b"a\\n"
    assert WORLD.piece(267) == b"\xe4\xbd"
    assert (WORLD.piece(274), WORLD.piece(277), WORLD.piece(279)) == (
        b"<|x\n|>",
        b"<0x41>",
        b"[PAD]",
    )
    assert (WORLD.piece(278), WORLD.piece(278, special=False)) == (b"<|end\t|>", b"")
    assert (WORLD.piece(0), WORLD.piece(0, special=False)) == (b"<s>", b"")
    assert WORLD.piece(274, special=False) == b"<|x\n|>"


def test_hexadecimal_digits_may_be_large():
    assert toy([r"\xfF\x0A"]).piece(0) == b"\xff\n"


def test_nothing_stands_round_a_text_whatever_the_file_says():
    assert (WORLD.bos, WORLD.eos, WORLD.eot, WORLD.unk) == (0, 0, 257, None)
    assert WORLD.eog == {0, 257, 279}
    flags = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    told = from_metadata(METADATA | flags)
    assert told.encode("abc") == [261]
    assert (told.add_bos, told.add_eos) == (False, False)


def test_bytes_that_are_no_token():
    unknown = toy(["<unk>", "a", "b", "ab", r"\n", "abcd"], unknown_token_id=0)
    assert unknown.encode(b"x\nab\xffab") == [0, 4, 3, 0, 3]
    assert unknown.encode("abc") == [3, 0]
    with pytest.raises(TokenizerError, match=r"no token for the byte 0xff, and no .*unknown_token"):
        toy(["a"]).encode(b"a\xff")


@pytest.mark.parametrize("token", ["a\\", r"\x", r"\x4", r"\xg0", r"\x 1"])
def test_g05_escapes_that_are_none(token):
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.tokens holds an unfinished escape"):
        toy(["a", token])


def test_from_a_file(tmp_path):
    path = write_gguf(tmp_path / "world.gguf", METADATA)
    assert load_tokenizer(path).encode("café 你好") == [270, 33, 268, 269]


@settings(deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=4), st.sampled_from(PIECES)), max_size=12))
def test_t01_bytes_come_back(parts):
    data = b"".join(parts)
    for parse_special in (False, True):
        ids = WORLD.encode(data, parse_special=parse_special)
        decoded = WORLD.decode_bytes(ids)
        assert decoded == b"".join(map(WORLD.piece, ids))
        # Only a special token that the text spells with its escape comes back as a byte.
        assert data == decoded or rb"<|x\n|>" in data or (parse_special and rb"<|end\t|>" in data)


@settings(deadline=None)
@given(st.text(alphabet="abcde", max_size=20))
def test_every_token_is_the_longest_at_its_place(text):
    rest = text.encode()
    for token_id in WORLD.encode(text):
        longest = max(n for n in range(1, len(rest) + 1) if rest[:n] in PIECES)
        assert WORLD.piece(token_id) == rest[:longest]
        rest = rest[longest:]
    assert not rest


@pytest.mark.parametrize("run", ["a", " ", "\n", "abcd", "字"])
def test_t06_long_runs(run):
    text = run * (131072 // len(run))
    assert WORLD.decode(WORLD.encode(text)) == text
