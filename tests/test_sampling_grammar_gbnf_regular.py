"""`sampling.grammar.gbnf_regular`: recursion that is repetition, and what is regular."""

import pytest

from minfer_jax.sampling.grammar.gbnf import parse_gbnf
from minfer_jax.sampling.grammar.gbnf_nodes import Grammar, Ref, Repeat, Seq
from minfer_jax.sampling.grammar.gbnf_regular import (
    rank,
    regular_nodes,
    within,
    without_linear_recursion,
)


def same(text: str, other: str) -> None:
    """The first text without recursion is the second, in whose rules nothing recurs."""
    unrolled = without_linear_recursion(parse_gbnf(text))
    plain = parse_gbnf(other)
    assert written(unrolled, unrolled.rules["root"]) == written(plain, plain.rules["root"])


def written(grammar: Grammar, node: int) -> object:
    found = grammar.nodes[node]
    below = [written(grammar, child) for child in grammar.nodes.children(node)]
    if isinstance(found, Repeat):
        return (*below, found.low, found.high)
    return [type(found).__name__, *below] if below else found


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ('root ::= root "a" | "b"', 'root ::= "b" "a"*'),
        ('root ::= "a" root | "b"', 'root ::= "a"* "b"'),
        ('root ::= "a" root?', 'root ::= "a"* "a"'),
        ('root ::= | "a" root', 'root ::= "a"*'),
        ('root ::= "x" ("," root | ";")', 'root ::= ("x" ",")* ("x" ";")'),
        ('root ::= root | "b"', 'root ::= "b"'),
        ('root ::= root "a" | root "bc" | "d"', 'root ::= "d" ("a" | "bc")*'),
        ('root ::= "a" x root | "b"\nx ::= "c"', 'root ::= ("a" x)* "b"\nx ::= "c"'),
    ],
)
def test_recursion_at_one_end_is_repetition(text, other):
    same(text, other)


@pytest.mark.parametrize(
    "body",
    [
        '"(" root ")" | "x"',
        'root "+" root | "x"',
        '"a" root | root "b" | "x"',
        '"a" (root "b" | "c") | "x"',
        '"a" root+ | "x"',
        '"a" root{2} | "x"',
    ],
)
def test_other_recursion_stays(body):
    grammar = parse_gbnf(f"root ::= {body}")
    assert without_linear_recursion(grammar).rules == grammar.rules
    assert grammar.rules["root"] not in regular_nodes(grammar)


def test_what_is_regular():
    grammar = parse_gbnf(
        'root ::= "ab" word [c] nest <[5]> other\nword ::= digit+\ndigit ::= [0-9]\n'
        'nest ::= "(" nest ")" | word\nother ::= odd\nodd ::= "x" even?\neven ::= "y" odd'
    )
    regular = regular_nodes(grammar)
    assert {name for name, body in grammar.rules.items() if body in regular} == {"word", "digit"}
    items = grammar.nodes.children(grammar.rules["root"])
    assert [item in regular for item in items] == [True, True, True, False, False, False]
    assert [regular.get(item) for item in items[:3]] == [1, 1, 0]


def test_rank_tells_words_from_sentences():
    chars, word = rank(Seq(()), []), rank(Seq((0, 0)), [0, 0])
    assert (chars, word) == (0, 1)
    assert rank(Seq((0, 0)), [0, word]) == 1
    assert rank(Seq((0, 0)), [word, word]) == 2
    assert rank(Repeat(0, 0, None), [chars]) == 1
    assert rank(Repeat(0, 0, None), [2]) == 2
    assert rank(Ref("x"), [2]) == 2


def test_children_first_and_references_followed_once():
    grammar = parse_gbnf('root ::= "a" x | "b" x\nx ::= "c" root?')
    inside = within(grammar.nodes, grammar.rules["root"])
    assert inside == sorted(inside) and inside[-1] == grammar.rules["root"]
    assert grammar.rules["x"] not in inside
