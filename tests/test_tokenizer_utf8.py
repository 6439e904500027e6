"""`tokenizer.utf8`: streams of bytes, and bytes that are not UTF-8."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax.errors import TokenizerError
from minfer_jax.tokenizer import Utf8Stream
from minfer_jax.tokenizer.utf8 import bytes_of, lead_byte_chunks, lenient, text_of


@pytest.mark.parametrize(
    ("pieces", "chunks", "rest"),
    [
        ([b"\xf0\x9f", b"\x98", b"\x80"], ["", "", "😀"], ""),
        ([b"\xe6\xad", b"\xaa"], ["", "歪"], ""),
        ([b"\x20\xf0\x9f"], [" "], "\ufffd"),
        ([b"\xff"], ["\ufffd"], ""),
        ([b"a\xffb"], ["a\ufffdb"], ""),
        ([b"\xf0\x9f", b"a"], ["", "\ufffda"], ""),
        ([b""], [""], ""),
    ],
)
def test_v02_characters_spread_over_pieces(pieces, chunks, rest):
    stream = Utf8Stream()
    assert [stream.feed(piece) for piece in pieces] == chunks
    assert stream.flush() == rest


def test_a_flushed_stream_can_be_used_again():
    stream = Utf8Stream()
    stream.feed(b"\xf0\x9f")
    assert stream.flush() == "\ufffd"
    assert stream.feed(b"\x98a") == "\ufffda"
    assert stream.flush() == ""


@settings(deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=4), st.text(max_size=3).map(str.encode))))
def test_any_split_gives_what_the_whole_gives(pieces):
    stream = Utf8Stream()
    text = "".join(map(stream.feed, pieces)) + stream.flush()
    assert text == b"".join(pieces).decode("utf-8", "replace")


@settings(deadline=None)
@given(st.binary())
def test_no_byte_is_lost_in_the_room(data):
    assert bytes_of(text_of(data)) == data
    assert "".join(lead_byte_chunks(text_of(data))).encode("utf-8", "surrogateescape") == data


@settings(deadline=None)
@given(st.text())
def test_valid_text_is_read_as_it_is(text):
    assert lenient(text_of(text.encode())) == text
    assert lead_byte_chunks(text) == list(text)


@pytest.mark.parametrize(
    ("data", "points"),
    [
        (b"\xe6\xad", "\ufffd\ufffd"),
        (b"ok\xf0\x9f", "ok\ufffd\ufffd"),
        (b"\x80\xbf", "\ufffd\ufffd"),
        (b"\xc3(", "\ufffd("),
        # llama.cpp checks continuation bytes only.
        (b"\xc0\x80", "\0"),
        (b"\xed\xa0\x80", "\ud800"),
        (b"\xf4\x90\x80\x80", "\ufffd" * 4),
        (b"\xf8\x88\x80\x80\x80", "\ufffd" * 5),
    ],
)
def test_code_points_of_bytes_that_are_not_utf8(data, points):
    assert lenient(text_of(data)) == points


def test_t01_a_str_with_a_lone_surrogate_is_refused():
    with pytest.raises(TokenizerError, match=r"lone surrogate '\\ud83d' at character 2"):
        text_of("ok\ud83d")


def test_only_text_is_text():
    with pytest.raises(TokenizerError, match="str or bytes, not int"):
        text_of(7)
