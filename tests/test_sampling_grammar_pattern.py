"""`sampling.grammar.pattern`: ECMA's regular expressions, judged by Python's where both agree."""

import json
import re

import pytest
from byte_vocabulary import accepts
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax.sampling.grammar.pattern import Inexpressible, whole_string


def found(pattern: str, text: str) -> bool:
    """Whether the expression for the whole of `text` matches it, as Python reads it."""
    whole = re.sub(r"\\x\{(\w+)\}", lambda m: f"\\U{int(m[1], 16):08x}", whole_string(pattern))
    return re.fullmatch(whole.removeprefix("^").removesuffix("$"), text) is not None


TEXTS = (
    *("", "a", "b", "A", "7", "a/b", "ab", "aab", "abab", "a-b", "-", "x_9", '"a"', "a]", "^", "$"),
    *(
        " ",
        "a b",
        "ab\ncd",
        "\n",
        "é",
        "😀",
        "aé😀",
        "12",
        "1234567",
        "{",
        "a{2}",
        "\\",
        "a.b",
        "\t",
    ),
)
EXACT = (
    *("", "a", "^a", "a$", "^a$", "a|b", "^a|b$", "^(a|b)$", "(^a$|^b)", "^(?:ab)+$", "((a))"),
    *(r"^\d+$", r"\D", r"^\w+$", r"\W", r"^a\/b$", r"^[\w-]+$", '^"a"$', r"^\S+$", r"\s"),
    *("a*", "^a*$", "^a+b?$", "^a{2}b$", "^a{1,2}b", "^a{2,}b", "^(ab){2}$", "^a+?b$", "^a{2}?b$"),
    *("^.$", "^..$", "a.b", r"a\.b", r"\$", r"\^", r"\{", "{", "a{", r"^\\$", r"\]", "]"),
    *("^[ab]$", "^[^ab]$", "[a-c]", "^[a-c-]+$", r"^[\d.-]+$", r"^[\]\\^-]$", r"^[+-\-]$"),
    *(
        r"^\x41$",
        r"^[\x41-\x43]$",
        r"^é$",
        r"^[à-ü]$",
        "^😀$",
        "[^\\w\\s]",
        r"^[\S\n]+$",
        r"^[\n]$",
    ),
    *("(?P<name>a)b", "^$", "^(|a)$", "^(a|)b$", "(a|b)(a|b)", r"^\t$", r"^[\t ]+$", "^^a"),
)


@pytest.mark.parametrize("pattern", EXACT)
def test_patterns_that_python_reads_alike(pattern):
    for text in TEXTS:
        if not (text.endswith("\n") and "$" in pattern):  # Python's `$` allows one line break more
            assert found(pattern, text) == bool(re.search(pattern, text, re.ASCII)), text


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (r"\S", ["x", " x", "é"], ["", " ", "\t\n", "\u3000"]),
        (r"^\d+$", ["0", "42"], ["", "4a", "٣", "4\n"]),
        (r"^a\/b$", ["a/b"], ["a\\/b", "ab"]),
        (r"^[\w-]+$", ["a-b_9", "-"], ["", "a b", "é"]),
        ('^"a"$', ['"a"'], ["a", '\\"a\\"']),
        ("b|^c", ["b", "abc", "c", "cx"], ["", "ac", "xc"]),
        ("^.$", ["a", "é", "😀"], ["", "\n", "\r", "\u2028", "ab"]),
        (r"^\p{Lu}\p{Nd}$", ["A1", "É٣"], ["a1", "AA"]),
        (r"^[^\p{L}]$", ["1"], ["a", "é"]),
        (r"^\u00e9\ud83d\ude00\u{1F600}$", ["é😀😀"], ["é", "é😀"]),
        (r"^[\b]?\0?x$", ["x", "\bx"], ["bx"]),
        (r"^[^\n]{2}$", ["ab", "\r\t"], ["a\n", "abc"]),
    ],
)
def test_in_a_schema(pattern, yes, no):
    schema = {"type": "string", "pattern": pattern}
    for text in yes:
        assert accepts(json.dumps(text, ensure_ascii=False), json_schema=schema), text
    for text in no:
        assert not accepts(json.dumps(text, ensure_ascii=False), json_schema=schema), text


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        *((p, "look-around") for p in ("^(?=x)", "(?!x)", "(?<=x)y", "(?<!x)y", "(?i)a", "(?i:a)")),
        *((p, "escape") for p in (r"\bx", r"\B", r"(a)\1", r"\k<n>", r"\A", r"a\Z", r"\cA", r"\é")),
        *((p, "anchor inside") for p in ("^(a|b$)", "(a$)?b", "x(^a|b)", "(^a)+")),
        *((p, "not at the") for p in ("a^b", "a$b", "$a", "$^", "a$*", "a$(b)")),
        *((p, "closed") for p in ("(a", "a)", "((a)")),
        *((p, "too early") for p in ("[a", "a\\", "[a-", "[\\")),
        *((p, "empty bracket") for p in ("[]", "[]a]", "[^]")),
        *((p, "range in brackets") for p in ("[z-a]", r"[a-\d]")),
        *((p, "quantifier") for p in ("a**", "a+?+", "a{2}{3}", "a*+")),
        *((p, "nothing stands") for p in ("*a", "a|+", "(?:?a)", "{2}", "^*")),
        *((p, "repetition") for p in ("a{3,1}", "a{10001}", "a{2,10001}")),
        ("a{,3}", "different things"),
        (r"\ud800", "no character"),
        (r"\u{110000}", "no character"),
        ("(" * 61 + "a" + ")" * 61, "nested more than 60"),
        ("a" * 4097, "more than 4096"),
    ],
)
def test_what_cannot_be_expressed(pattern, why):
    with pytest.raises(Inexpressible, match=why):
        whole_string(pattern)


def test_depth_within_the_bound():
    assert found("(" * 60 + "ab" + ")" * 60, "xaby")


ATOMS = st.sampled_from(
    ["a", "b", "1", r"\d", r"\w", r"\S", ".", "[ab]", "[^a]", r"[^\d-]", r"[a\-1]", r"\-", " "]
)
QUANTIFIERS = st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,2}", "{0,}", "*?"])


def _sequence(atoms):
    return st.lists(st.tuples(atoms, QUANTIFIERS).map("".join), min_size=1, max_size=3).map("".join)


def _alternatives(atoms):
    return st.lists(_sequence(atoms), min_size=1, max_size=3).map("|".join)


PATTERNS = st.lists(
    st.tuples(
        st.sampled_from(["", "^"]),
        _sequence(st.recursive(ATOMS, lambda a: _alternatives(a).map("({})".format), max_leaves=4)),
        st.sampled_from(["", "$"]),
    ).map("".join),
    min_size=1,
    max_size=2,
).map("|".join)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(PATTERNS, st.lists(st.text("ab1- \n", max_size=6), min_size=5, max_size=5))
def test_random_patterns(pattern, texts):
    for text in texts:
        if not text.endswith("\n"):
            assert found(pattern, text) == bool(re.search(pattern, text)), text
