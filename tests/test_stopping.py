"""`stopping`: stop strings over a stream of bytes that is cut anywhere."""

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minfer_jax.errors import UsageError
from minfer_jax.stopping import StopFilter


def stream(pieces, stop):
    """What each piece lets through, what the flush gives, and whether a stop string was met."""
    gate = StopFilter(stop)
    out = [gate.feed(piece) for piece in pieces]
    return out, gate.flush(), gate.stopped


@pytest.mark.parametrize(
    ("pieces", "stop", "chunks"),
    [
        pytest.param(
            ["alpha", " beta", " gamma", " delta"],
            ["beta gamma"],
            ["alpha", " ", "", ""],
            id="stop over two pieces",
        ),
        pytest.param(
            [" Alice", "!", "\n"], ["\n", "Alice:"], [" ", "Alice!", ""], id="held text is let go"
        ),
        pytest.param(["a", "a", "a", "b"], ["aab"], ["", "", "a", ""], id="aab on a|a|a|b"),
        pytest.param(["###", "x"], ["###"], ["", ""], id="stop is the first piece"),
        pytest.param(
            ["go ", "THE", " END", "x"],
            ["END", "THE END"],
            ["go ", "", "", ""],
            id="two stops end together",
        ),
        pytest.param(
            ["go ", "THE", " END", "x"],
            ["THE END", "END"],
            ["go ", "", "", ""],
            id="two stops end together, the other order",
        ),
        pytest.param(["x##y"], ["##"], ["x"], id="stop inside one piece"),
        pytest.param(["x##y", "##z"], ["##"], ["x", ""], id="nothing after a stop"),
        pytest.param(["abcd"], ["abcd", "bc"], ["a"], id="the first to be complete, in one piece"),
        pytest.param(
            ["a", "b", "c", "d"],
            ["abcd", "bc"],
            ["", "", "a", ""],
            id="the first to be complete, byte by byte",
        ),
        pytest.param(["ab", "ab"], ["ab"], ["", ""], id="the first of two places"),
    ],
)
def test_v01_stop(pieces, stop, chunks):
    out, rest, stopped = stream([p.encode() for p in pieces], stop)
    assert out == [chunk.encode() for chunk in chunks]
    assert rest == b""
    assert stopped


@pytest.mark.parametrize(
    ("pieces", "stop", "chunks", "rest"),
    [
        (["a", "a"], ["aab"], ["", ""], "aa"),
        (["alpha", " beta", " gam"], ["beta gamma"], ["alpha", " ", ""], "beta gam"),
        (["x#", "#"], ["###"], ["x", ""], "##"),
        (["alpha", " beta"], [], ["alpha", " beta"], ""),
        (["", "a", ""], ["b"], ["", "a", ""], ""),
    ],
)
def test_v01_held_text_comes_out_at_the_end_if_no_stop_came(pieces, stop, chunks, rest):
    expected = [chunk.encode() for chunk in chunks], rest.encode(), False
    assert stream([p.encode() for p in pieces], stop) == expected


@pytest.mark.parametrize("stop", [[""], "", ["a", ""], [b""]])
def test_v01_an_empty_stop_string_is_refused(stop):
    with pytest.raises(UsageError, match="a stop string is empty"):
        StopFilter(stop)


@pytest.mark.parametrize("value", [5, None, 1.5, ["a"], 10**12])
def test_a_stop_string_must_be_text(value):
    with pytest.raises(UsageError, match="allowed: text"):
        StopFilter(["a", value])


def test_a_lone_surrogate_is_refused():
    with pytest.raises(UsageError, match="lone surrogate"):
        StopFilter(["\ud800"])


@pytest.mark.parametrize("stop", ["##", b"##"])
def test_one_string_instead_of_a_list_is_one_stop_string(stop):
    assert stream([b"x#y#", b"#z"], stop) == ([b"x#y", b""], b"", True)


def test_stop_strings_match_bytes_across_a_cut_character():
    assert stream([b"x\xf0\x9f", b"\x98", b"\x80y"], ["😀"]) == ([b"x", b"", b""], b"", True)
    assert stream([b"\xf0\x9f", b"\x98\x81"], ["😀"]) == ([b"", b"\xf0\x9f\x98\x81"], b"", False)


def reference(data, stop):
    """The stream byte by byte: text before the stop string that is complete first.

    Of several that are complete at the same byte the longest counts.
    """
    for end in range(1, len(data) + 1):
        complete = [len(s) for s in stop if data[:end].endswith(s)]
        if complete:
            return data[: end - max(complete)], True
    return data, False


def held(data, stop):
    """The longest end of `data` that begins a stop string."""
    ends = [data[i:] for i in range(len(data))]
    return next((end for end in ends if any(s.startswith(end) for s in stop)), b"")


def cut(data, places):
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


FEW = st.text("ab#é", max_size=30).map(str.encode)
STOPS = st.lists(st.text("ab#é", min_size=1, max_size=5).map(str.encode), max_size=4)


@settings(deadline=None, max_examples=500)
@example(b"aaab", [b"aab"], [1, 2, 3])
@example(b"abcd", [b"abcd", b"bc"], [])
@example(b"abcd", [b"abcd", b"bc"], [1, 2, 3])
@example(b"aabaabaac", [b"aabaac"], [4])
@given(FEW, STOPS, st.lists(st.integers(0, 30), max_size=12))
def test_any_split_gives_what_the_whole_stream_gives(data, stop, places):
    text, stops = reference(data, stop)
    gate = StopFilter(stop)
    out, fed = b"", b""
    for piece in cut(data, places):
        out += gate.feed(piece)
        fed += piece
        assert text.startswith(out)
        if not gate.stopped:
            # What is certain goes out at once.
            assert out + held(fed, stop) == fed
    assert out + gate.flush() == text
    assert gate.stopped is stops


@settings(deadline=None)
@given(st.binary(max_size=20), st.binary(min_size=1, max_size=3), st.binary(max_size=5))
def test_bytes_that_are_no_text_are_matched_too(before, stop, after):
    data = before + stop + after
    expected = data[: data.index(stop)]
    for pieces in ([data], [data[i : i + 1] for i in range(len(data))]):
        out, rest, stopped = stream(pieces, [stop])
        assert (b"".join(out) + rest, stopped) == (expected, True)
