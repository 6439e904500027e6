"""`sampling.grammar.gbnf`: from text to nodes, and refusals with line and column."""

import pytest

from minfer_jax.errors import GrammarError
from minfer_jax.sampling.grammar.gbnf import MAX_NODES, MAX_TEXT, parse_gbnf
from minfer_jax.sampling.grammar.gbnf_nodes import (
    MAX_COUNT,
    Alt,
    Chars,
    Grammar,
    Ref,
    Repeat,
    Seq,
    Token,
)


def shape(grammar: Grammar, node: int | None = None):
    """A node with its children written out; characters as text."""
    nodes = grammar.nodes
    found = nodes[grammar.rules["root"] if node is None else node]
    if isinstance(found, Chars):
        return "".join(chr(a) if a == b else f"{chr(a)}-{chr(b)}" for a, b in found.ranges)
    if isinstance(found, Seq):
        return [shape(grammar, item) for item in found.items]
    if isinstance(found, Alt):
        return {"or": [shape(grammar, item) for item in found.items]}
    if isinstance(found, Repeat):
        return (shape(grammar, found.item), found.low, found.high)
    return found


def parsed(text: str):
    return shape(parse_gbnf(text, lambda token: len(token)))


def test_literals_and_escapes():
    assert parsed(r'root ::= "a\n\t\r\\\"\x41\u00e9\U0001F600-é"') == list('a\n\t\r\\"Aé😀-é')
    assert parsed('root ::= ""') == []
    assert parsed('root ::= "two\nlines"') == list("two\nlines")


@pytest.mark.parametrize(
    ("written", "ranges"),
    [
        ("[a]", "a"),
        ("[abc]", "a-c"),
        ("[a-cx-z]", "a-cx-z"),
        ("[a-]", "-a"),
        ("[-a]", "-a"),
        ("[+--]", "+--"),
        (r"[\]\[\\\"\-^]", '"-[-^'),
        (r"[\x61-\u0063]", "a-c"),
        ("[😀-🙏]", "😀-🙏"),
        ("[^b-\U0010ffff]", "\0-a"),
        (r"[^\x00-`b]", "ac-\ud7ff\ue000-\U0010ffff"),
        (".", "\0-\ud7ff\ue000-\U0010ffff"),
        ("[\ud700-\ue001]", "\ud700-\ud7ff\ue000-\ue001"),
    ],
)
def test_classes_are_sorted_ranges_without_surrogates(written, ranges):
    assert parsed(f"root ::= {written}") == ranges


def test_alternatives_groups_and_empty_ones():
    assert parsed('root ::= "ab" | ("cd" | "ef") "g" |') == {
        "or": [["a", "b"], [{"or": [["c", "d"], ["e", "f"]]}, "g"], []]
    }
    assert parsed("root ::= | [a-c]") == {"or": [[], "a-c"]}
    assert parsed('root ::= "a" | [x-z] | "b"') == "a-bx-z"
    assert parsed('root ::= (((("a"))))') == "a"
    assert parsed('root ::= () "a" ()') == "a"


@pytest.mark.parametrize(
    ("counts", "low", "high"),
    [
        ("*", 0, None),
        ("+", 1, None),
        ("?", 0, 1),
        ("{3}", 3, 3),
        ("{ 2 , 5 }", 2, 5),
        ("{2,}", 2, None),
        ("{0,1999}", 0, 1999),
        ("{0,2000}", 0, 2000),
        ("{0,2001}", 0, 2001),
        ("{0,18446744073709551615}", 0, None),
        (f"{{0,{MAX_COUNT}}}", 0, MAX_COUNT),
    ],
)
def test_counts(counts, low, high):
    assert parsed(f'root ::= "ab"{counts} "c"') == [(["a", "b"], low, high), "c"]
    assert parsed(f'root ::= "c" "ab" {counts}') == ["c", (["a", "b"], low, high)]


@pytest.mark.parametrize(
    ("written", "low", "high"),
    [
        ("{0,100}{0,100}{0,100}", 0, 1_000_000),
        ("*+", 0, None),
        ("+?", 0, None),
        ("{2,3}{2,3}", 4, 9),
        ("{2}?", None, None),
        ("{3,4}{1,2}", None, None),
        ("{0,1000}{0,1001}", None, None),
    ],
)
def test_nested_counts_are_one_where_no_count_is_left_out(written, low, high):
    found = parsed(f'root ::= "a"{written}')
    if low is None:
        assert isinstance(found, tuple) and isinstance(found[0], tuple)
    else:
        assert found == ("a", low, high)


def test_no_repetitions_at_all():
    assert parsed('root ::= "a"{0} "b" "c"{0,0}') == "b"
    assert parsed('root ::= "a"{1}') == "a"


def test_comments_and_line_ends():
    lines = ["# first", "root ::= # here", '  "a" b (  # open', '  "c" |', '  "d"', ") |", "  b"]
    text = [*lines, "", "b ::=", '  "x"  # end', "# last"]
    expected = {"or": [["a", Ref("b"), "c-d"], Ref("b")]}
    for end in ("\n", "\r\n", "\r"):
        grammar = parse_gbnf(end.join(text))
        assert shape(grammar) == expected
        assert shape(grammar, grammar.rules["b"]) == "x"


def test_names():
    grammar = parse_gbnf(
        'root ::= 9-lives Upper-Case under_score\n9-lives ::= "a"\n'
        'Upper-Case ::= "b"\nunder_score ::= "c"'
    )
    assert shape(grammar) == [Ref("9-lives"), Ref("Upper-Case"), Ref("under_score")]


def test_the_last_definition_of_a_rule_is_the_one():
    assert parsed('root ::= missing\nroot ::= "a"\nroot ::= "b"') == "b"


def test_a_rule_that_the_root_does_not_reach_is_left_out():
    grammar = parse_gbnf('lost ::= root lost\nroot ::= "a"')
    assert set(grammar.rules) == {"root"}


def test_tokens():
    assert parsed("root ::= <[7]> !<[8]>* <think> !</think>") == [
        Token(7, False),
        (Token(8, True), 0, None),
        Token(7, False),
        Token(8, True),
    ]

    def unknown(text: str) -> int:
        raise GrammarError(f"{text!r} is two tokens")

    with pytest.raises(GrammarError, match=r"line 2, column 3: '<ab c>' is two tokens$"):
        parse_gbnf("root ::= (\n  <ab c>)", unknown)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1, column 1: there is no rule 'root'"),
        ('a ::= "x"\n', "line 2, column 1: there is no rule 'root'"),
        ('root ::= "a" b\n', "line 1, column 14: rule 'root' needs 'b', which is not defined"),
        ('root ::= "a"\nx ::= y', "line 2, column 7: rule 'x' needs 'y', which is not defined"),
        ('root ::= "a" )', "line 1, column 14: .* found '\\)'"),
        ('root ::= "a" $', "line 1, column 14: .* found '\\$'"),
        ('root ::= "a"\r\n  | "b"', "line 2, column 3: a rule's name is expected, found '\\| "),
        ('root "a"', "line 1, column 6: '::=' is expected"),
        ("root ::=\nx ::= root", "line 2, column 3: .* found '::= root'"),
        ('root ::= ("a"\n\n', "line 1, column 10: this '\\(' is never closed"),
        ('root ::= ("a"\nb ::= "c"', "line 2, column 3: .* found '::= "),
        ('root ::= "a', "line 1, column 10: this '\"' is never closed"),
        ("root ::= [a\n", "line 1, column 10: this '\\[' is never closed"),
        ("root ::= []", "line 1, column 10: this class of characters is empty"),
        (r"root ::= [^\x00-\U0010FFFF]", "line 1, column 10: no character is in this class"),
        ("root ::= [az-a]", "line 1, column 12: this range of characters ends before it begins"),
        (r'root ::= "\q"', r"line 1, column 11: unknown escape '\\\\q'"),
        (r'root ::= "\x4"', "line 1, column 11: unknown escape"),
        (r'root ::= "\u12', "line 1, column 11: unknown escape"),
        (r'root ::= "\U00110000"', "line 1, column 11: U\\+110000 is no character"),
        (r'root ::= "\uD83D"', "line 1, column 11: U\\+D83D is half of a surrogate pair"),
        ('root ::= "\ud83d"', "line 1, column 11: U\\+D83D is half of a surrogate pair"),
        ("root ::= *", "line 1, column 10: '\\*' repeats nothing"),
        ('root ::= "a" | {2}', "line 1, column 16: '{' repeats nothing"),
        ('root ::= "a"{,}', "line 1, column 14: a number is expected"),
        ('root ::= "a"{,10}', "line 1, column 14: a number is expected"),
        ('root ::= "a"{1', "line 1, column 15: '}' is expected, found the end of the line"),
        ('root ::= "a"{1;2}', "line 1, column 15: '}' is expected"),
        ('root ::= "a"{3,1}', "line 1, column 13: at least 3 and at most 1 repetitions"),
        ('root ::= "a"{1000001}', "line 1, column 13: 1000001 repetitions; at most 1000000"),
        ('root ::= "a"{0,18446744073709551616}', "line 1, column 13: a count is 18446744073709"),
        (f'root ::= "a"{{{"9" * 5000}}}', "line 1, column 13: a count is 9{24};"),
        ("root ::= <[2147483648]>", "line 1, column 10: a token's id is 2147483648"),
        ("root ::= <[x]>", "line 1, column 10: '<\\[x\\]>' needs a vocabulary"),
        ("root ::= !x", "line 1, column 10: a token is expected"),
        ("root ::= <x\n>", "line 1, column 10: a token is expected"),
        ("root ::= root", "line 1, column 1: rule 'root' matches no text"),
        ('root ::= x | y\nx ::= "b" y\ny ::= "c" y', "line 3, column 1: rule 'y' matches no text"),
        ('root ::= "a" x?\nx ::= z "b"+\nz ::= x{2}', "rule '[xz]' matches no text"),
        (" " * (MAX_TEXT + 1), f"{MAX_TEXT + 1} characters; at most {MAX_TEXT}"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(text, message):
    with pytest.raises(GrammarError, match=message) as caught:
        parse_gbnf(text)
    assert "\n" not in str(caught.value)


def test_what_always_needs_itself_but_may_be_left_out_is_refused_too():
    with pytest.raises(GrammarError, match="rule 'x' matches no text"):
        parse_gbnf('root ::= "a" x?\nx ::= "b" x')


def test_depth_costs_no_stack():
    assert parsed("root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000) == "a"
    deep = parse_gbnf("root ::= " + '("a" ' * 20_000 + '"b"' + ")?" * 20_000)
    assert len(deep.nodes.all) == 40_002
    names = "".join(f'a{i} ::= "a" a{i + 1}\n' for i in range(5_000))
    chain = parse_gbnf(f'root ::= a0\n{names}a5000 ::= "b"')
    assert len(chain.rules) == 5_002


def test_too_many_parts():
    text = "root ::= " + '("a" ' * 30_000 + '"b"' + ")?" * 30_000
    with pytest.raises(GrammarError, match=f"60002 parts; at most {MAX_NODES}"):
        parse_gbnf(text)
