"""`sampling.grammar.gbnf_overlap`: which texts two lexemes share, and where one goes on."""

import pytest

from minfer_jax.sampling.grammar.gbnf import parse_gbnf
from minfer_jax.sampling.grammar.gbnf_nodes import Chars
from minfer_jax.sampling.grammar.gbnf_overlap import Alphabet, Graph, Matchers, union

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def overlap(one: str, other: str, more: str = "") -> tuple[bool, set[str]]:
    """Of two bodies: whether they share a text, and the letters that continue the second."""
    spread = " ".join(f'"{letter}"' for letter in LETTERS)
    grammar = parse_gbnf(f"root ::= one other {spread}\none ::= {one}\nother ::= {other}\n{more}")
    common, beyond = Matchers(grammar).overlap(grammar.rules["one"], grammar.rules["other"])
    return common, {c for c in LETTERS if beyond >> ord(c) & 1}


@pytest.mark.parametrize(
    ("one", "other", "common", "beyond"),
    [
        ('"in"', '"int"', False, "t"),
        ('"int"', '"in"', False, ""),
        ('"int"', '"int"', True, ""),
        ("[a-c]+", "[a-c]+", True, "abc"),
        ("[a-c]+", '"abx"', False, "bx"),
        ('"abx"', "[a-c]+", False, ""),
        ('"ab" [c-d]*', '"ab" ("e" | "cf")?', True, "ecf"),
        ('"a"? "b"?', '"bc"', False, "c"),
        ("[a-c]", "[d-f]+", False, ""),
        ('("ab" | "a") "c"?', '"abc" "d"', False, "bcd"),
        ("<[5]>", "[a-c]+", False, ""),
        ("<[5]>", "!<[6]>", True, ""),
    ],
)
def test_overlaps(one, other, common, beyond):
    assert overlap(one, other) == (common, set(beyond))


def test_counts_are_not_counted():
    """More texts than there are, so that nothing is missed."""
    assert overlap('"a"{3}', '"a" "a" "b"') == (False, {"a", "b"})
    assert overlap('"a"{0,3}', '"a" "a" "a" "a"') == (True, {"a"})


def test_rules_are_put_in():
    assert overlap("word", "word word", 'word ::= "a" tail\ntail ::= "b"?') == (False, {"a", "b"})


def test_a_lexeme_too_large_has_no_automaton():
    doubling = "".join(f"d{i} ::= d{i + 1} d{i + 1}\n" for i in range(40))
    grammar = parse_gbnf(f'root ::= d0\n{doubling}d40 ::= "a"')
    matchers = Matchers(grammar)
    assert matchers.of(grammar.rules["root"]) is None
    assert matchers.of(grammar.rules["d40"]) is not None


def test_characters_go_on_with_their_lead_bytes():
    grammar = parse_gbnf('root ::= "a" one\none ::= "a" [é中-😀]')
    a, one = grammar.nodes.children(grammar.rules["root"])
    _, beyond = Matchers(grammar).overlap(a, one)
    assert {byte for byte in range(256) if beyond >> byte & 1} == {0xC3, *range(0xE4, 0xF1)}


@pytest.mark.parametrize(
    ("low", "high"),
    [(97, 97), (97, 122), (0x7F, 0x80), (0x7FF, 0x800), (0xFFFF, 0x10000), (0, 0x10FFFF)],
)
def test_lead_bytes_are_those_of_utf8(low, high):
    grammar = parse_gbnf(rf"root ::= [\U{low:08x}-\U{high:08x}]")
    alphabet = Alphabet(grammar)
    chars = grammar.nodes[grammar.rules["root"]]
    assert isinstance(chars, Chars)
    leads = alphabet.leads(alphabet.mask(chars))
    codes = {*range(low, high + 1, 64 if high > 1000 else 1), *range(min(high, 128)), high}
    codes = {code for code in codes if low <= code <= high and not 0xD800 <= code < 0xE000}
    assert {b for b in range(256) if leads >> b & 1} == {chr(code).encode()[0] for code in codes}


def test_looking_costs_work():
    grammar = parse_gbnf('root ::= "ab" "ac"')
    matchers = Matchers(grammar)
    one, other = grammar.nodes.children(grammar.rules["root"])
    matchers.overlap(one, other)
    first = matchers.work
    matchers.overlap(one, other)
    assert (first, matchers.work) == (3, 4)


def test_free_edges():
    graph = Graph()
    a, b, c = graph.place(), graph.place(), graph.place()
    graph.free[a].append(b)
    graph.free[b] += [a, c]
    assert graph.reach(a) == {a, b, c}
    assert graph.reach(c) == {c}
    assert union([1, 4, 1]) == 5
    assert union([]) == 0
