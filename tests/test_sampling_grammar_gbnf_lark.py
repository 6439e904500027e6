"""`sampling.grammar.gbnf_lark`: llguidance accepts what GBNF means, token by token.

The judge is a recognizer of characters (`gbnf_oracle`); masks are compared, which hold the texts
that may go on as well as those that may end.
"""

import threading
from functools import cache

import pytest
from byte_vocabulary import byte_tokenizer
from gbnf_oracle import Oracle, Part, Rows, gbnf_of
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from minfer_jax.errors import GrammarError
from minfer_jax.sampling.grammar.gbnf_lark import lark_of_gbnf
from minfer_jax.sampling.grammar.tokens import ll_tokenizer

END = 256
WORDS = ("ab", "bc", "ca", "aa", "abc", "bb", "ing", "inga", "in")
TOKENS = {**{chr(byte): byte for byte in range(128)}, **{w: 258 + i for i, w in enumerate(WORDS)}}


@cache
def vocabulary() -> LLTokenizer:
    return ll_tokenizer(byte_tokenizer(extra=WORDS))


def matcher(gbnf: str) -> LLMatcher:
    found = LLMatcher(vocabulary(), LLMatcher.grammar_from_lark(lark_of_gbnf(gbnf)), log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def allowed(found: LLMatcher) -> set[int]:
    bits = found.compute_bitmask()
    assert not found.is_error(), found.get_error()
    return {i for i in range(vocabulary().vocab_size) if bits[i >> 3] >> (i & 7) & 1}


def accepts(gbnf: str, text: str | bytes) -> bool:
    """Whether the whole text is allowed, byte by byte, and then an end."""
    found = matcher(gbnf)
    ids = list(text.encode() if isinstance(text, str) else text)
    return found.try_consume_tokens(ids) == len(ids) and found.is_accepting()


def agrees(rules: dict[str, Part], letters: str = "abc", longest: int = 4) -> None:
    """Every mask after every possible text up to `longest` is what the oracle says.

    Texts are spelled letter by letter, but for a first token of any length.
    """
    oracle = Oracle(rules)
    tokens = {text: i for text, i in TOKENS.items() if set(text) <= set(letters)}
    rows: dict[str, Rows | None] = {"": oracle.start()}

    def after(text: str) -> Rows | None:
        if text not in rows:
            rows[text] = oracle.read(after(text[:-1]), text[-1])
        return rows[text]

    waiting = [("", matcher(gbnf_of(rules)))]
    while waiting:
        text, found = waiting.pop()
        going = [token for token in tokens if after(text + token) is not None]
        ends = oracle.accepts(after(text))
        expected = {tokens[token] for token in going} | ({END, END + 1} if ends else set())
        assert allowed(found) == expected, (gbnf_of(rules), text)
        assert found.is_accepting() == ends
        for token in going:
            if len(text + token) <= longest and (not text or len(token) == 1):
                fork = found.deep_copy()
                assert fork.consume_token(tokens[token])
                waiting.append((text + token, fork))


def chars(letters: str = "abc") -> Part:
    return ("chars", letters)


def text(letters: str) -> Part:
    return ("text", letters)


def times(part: Part, low: int, high: int | None) -> Part:
    return ("times", part, low, high)


def seq(*parts: Part) -> Part:
    return ("seq", list(parts))


def either(*parts: Part) -> Part:
    return ("or", list(parts))


def rule(name: str) -> Part:
    return ("rule", name)


OVERLAPS: list[dict[str, Part]] = [
    {"root": seq(times(chars(), 1, None), text("ab"))},
    {"root": seq(times(text("a"), 0, None), text("ab"))},
    {"root": seq(times(chars("ab"), 0, 3), times(chars("bc"), 0, None), text("b"))},
    {"root": seq(text("a"), times(rule("root"), 0, 1), times(chars("ab"), 1, None), text("b"))},
    {"root": either(seq(text("ab"), rule("root"), text("c")), seq(text("abc"), rule("x"))),
     "x": either(text("c"), seq(chars("ab"), rule("root"), text("a")))},
    {"root": either(seq(rule("x"), rule("root"), rule("x")), text("b")),
     "x": times(text("a"), 0, None)},
    {"root": either(seq(text("a"), rule("root"), times(chars("abc"), 1, None)),
                    times(chars("ab"), 1, 2))},
    {"root": either(seq(times(seq(text("ab"), times(rule("root"), 0, 1)), 1, 2), text("a")),
                    text("b"))},
    {"root": seq(times(chars("ab"), 1, None), rule("x"), chars("ab")),
     "x": either(seq(text("c"), rule("x"), text("c")), times(text("cb"), 0, None))},
]  # fmt: skip


@pytest.mark.parametrize("rules", OVERLAPS, ids=gbnf_of)
def test_parts_that_overlap(rules):
    agrees(rules)


def test_any_letters_and_then_a_word():
    agrees({"root": seq(times(chars("ing"), 1, None), text("ing"))}, letters="ing")
    assert accepts('root ::= [a-z]+ "ing"', "singing")
    nested = 'root ::= "(" root ")" | [a-z]+ "ing" | [a-z]+ "(" root ")" [a-z]* "ing" '
    assert accepts(nested, "(a(singing)inging)")
    assert not accepts(nested, "(a(singing)inga)")


def test_characters_that_begin_with_the_same_byte():
    """The lexer reads bytes: `ê` continues the word, `é` does not, and both begin alike."""
    nested = 'root ::= "(" root ")" | word root "z" | "é"\nword ::= "a" "ê"*'
    for document in ("aéz", "(aêêéz)", "aêaézz"):
        assert accepts(nested, document)
    for document in ("aêz", "(aëz)", "aéêz"):
        assert not accepts(nested, document)


RECURSIVE: list[dict[str, Part]] = [
    {"root": either(seq(rule("root"), text("a")), text("b"))},
    {"root": seq(rule("x"), text("a")),
     "x": rule("y"),
     "y": either(seq(rule("x"), text("b")), text("c"))},
    {"root": either(seq(rule("x"), rule("root"), text("a")), text("b")),
     "x": times(text("c"), 0, 1)},
    {"x": times(text("c"), 0, 1),
     "root": either(seq(rule("x"), rule("root"), text("a")), text("b"))},
    {"root": seq(rule("x"), rule("y")),
     "y": either(seq(rule("x"), rule("y"), text("a"), rule("x"), rule("y")), chars("b")),
     "x": times(chars("c"), 0, None)},
    {"root": either(seq(rule("root"), rule("root")), text("a"), text(""))},
    {"root": times(times(chars("a"), 0, None), 0, None)},
    {"root": times(times(seq(text("a"), rule("x")), 0, None), 1, 2),
     "x": either(rule("root"), text("b"))},
]  # fmt: skip


@pytest.mark.parametrize("rules", RECURSIVE, ids=gbnf_of)
def test_left_recursion_direct_indirect_and_through_what_may_be_empty(rules):
    """Field report R01; supported, where llama.cpp refuses or aborts."""
    agrees(rules)


def test_right_recursion_is_as_cheap_as_repetition():
    """llguidance refuses to go on after 2,000 levels of it."""
    grammar = 'root ::= item "," root | item\nitem ::= "{" root "}" | "x"'
    assert accepts(grammar, "{" + "x," * 5_000 + "x}")


def test_what_never_ends_is_refused_with_its_name():
    for grammar in ("root ::= root", 'root ::= x\nx ::= root "a"', 'root ::= "a" x\nx ::= x'):
        with pytest.raises(GrammarError, match=r"rule '(root|x)' matches no text"):
            lark_of_gbnf(grammar)


NAMES = st.sampled_from(["root", "x", "y"])
LEAVES = st.one_of(
    st.text("abc", max_size=3).map(lambda letters: ("text", letters)),
    st.sets(st.sampled_from("abc"), min_size=1).map(lambda s: ("chars", "".join(sorted(s)))),
    NAMES.map(lambda name: ("rule", name)),
)
COUNTS = st.sampled_from([(0, 1), (0, None), (1, None), (2, 2), (1, 3), (0, 2), (2, None)])
PARTS = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        st.lists(parts, min_size=1, max_size=3).map(lambda items: ("seq", items)),
        st.lists(parts, min_size=2, max_size=3).map(lambda items: ("or", items)),
        st.tuples(parts, COUNTS).map(lambda both: ("times", both[0], *both[1])),
    ),
    max_leaves=6,
)


RULES = st.fixed_dictionaries({"root": PARTS, "x": PARTS, "y": PARTS})


@settings(max_examples=60, deadline=None)
@given(RULES)
def test_random_grammars(rules):
    is_right(rules)


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(RULES)
def test_many_random_grammars(rules):
    is_right(rules)


def is_right(rules: dict[str, Part]) -> None:
    if not Oracle(rules).matches_something():
        with pytest.raises(GrammarError, match="matches no text"):
            lark_of_gbnf(gbnf_of(rules))
        return
    agrees(rules, longest=3)


def test_nested_brackets_with_blanks():
    """A notation as real ones are: strings, numbers, blanks after everything."""
    grammar = r"""
root  ::= value
value ::= (list | map | string | number | "true" | "null") ws
list  ::= "[" ws (value ("," ws value)*)? "]"
map   ::= "{" ws (string ws ":" ws value ("," ws string ws ":" ws value)*)? "}"
string ::= "\"" ([^"\\\x00-\x1F] | "\\" (["\\nt] | "u" [0-9a-f]{4}))* "\""
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)?
ws ::= | " " | "\n" [ \t]{0,20}
"""
    good = ['{"a": [1, -2.5, "x\\u00e9\\""] ,"é😀":{} } ', "[]\n  ", "-0.5", '"true"', "true\n\t"]
    for document in good:
        assert accepts(grammar, document)
        cut = matcher(grammar)
        assert cut.try_consume_tokens(list(document.encode())) == len(document.encode())
    for document in ["", "[1,]", '{"a":1', "01", "true  ", '"\n"', "[1 2]", '{"a" 1}', "-"]:
        assert not accepts(grammar, document)


def test_counts_in_thousands_behave_alike():
    """Field report R04; counted, not written out."""
    for most in (1999, 2000, 2001):
        for grammar in (
            f'root ::= "a"{{0,{most}}}',
            f'root ::= "(" root ")" | "a"{{0,{most}}} "."',
        ):
            tail = "." if "." in grammar else ""
            assert len(lark_of_gbnf(grammar)) < 300
            assert accepts(grammar, "a" * most + tail)
            assert not accepts(grammar, "a" * (most + 1) + tail)


def test_nested_counts():
    """Field report R04."""
    grammar = 'root ::= (("a"{0,100}){0,100}){0,100}'
    assert accepts(grammar, "a" * 5_000)
    assert accepts(f'root ::= x "b"\nx ::= "(" x ")" | {grammar[9:]}', "((" + "a" * 500 + "))b")
    with pytest.raises(GrammarError, match="line 1, column 13: at least 3 and at most 1"):
        lark_of_gbnf('root ::= "a"{3,1}')


def _in_small_stack(work) -> list[object]:
    """What `work` gives in a thread with 1 MiB of stack."""
    results: list[object] = []
    before = threading.stack_size(1 << 20)
    try:
        thread = threading.Thread(target=lambda: results.append(work()))
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    return results


DEEP = {
    "parentheses": ("root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000, "a"),
    "groups": ("root ::= " + '("a" ' * 1_000 + '"b"' + ")?" * 1_000, "a" * 1_000 + "b"),
    "recursive groups": (
        "root ::= " + '("a" ' * 1_000 + "x" + ' "b")?' * 1_000 + '\nx ::= "(" x ")" | "."',
        "a" * 1_000 + "((.))" + "b" * 1_000,
    ),
    "chain": (
        "root ::= a0\n"
        + "".join(f'a{i} ::= "a" a{i + 1}\n' for i in range(5_000))
        + 'a5000 ::= ""',
        "a" * 5_000,
    ),
    "recursive chain": (
        "root ::= a0\n"
        + "".join(f'a{i} ::= "a" a{i + 1} "b"\n' for i in range(5_000))
        + 'a5000 ::= "(" a5000 ")" | "."',
        "a" * 5_000 + "(.)" + "b" * 5_000,
    ),
}


@pytest.mark.parametrize("name", DEEP)
def test_depth_costs_no_stack(name):
    """Field report R03; llguidance on its own overflows its stack, which ends the process."""
    grammar, document = DEEP[name]
    assert _in_small_stack(lambda: accepts(grammar, document)) == [True]


def circle(n: int) -> str:
    rules = "".join(f'a{i} ::= "a" a{i + 1} "b"\n' for i in range(n))
    return f'root ::= a0\n{rules}a{n} ::= "(" a0 ")" | "."'


def test_circles_of_rules_are_followed_so_far():
    document = "a" * 90 + "(" + "a" * 90 + "." + "b" * 90 + ")" + "b" * 90
    assert _in_small_stack(lambda: accepts(circle(90), document)) == [True]
    with pytest.raises(GrammarError, match="in circles of more than 200 parts"):
        lark_of_gbnf(circle(5_000))


def test_too_many_rules():
    words = " | ".join(f'"w{i}" root "z"' for i in range(13_000))
    with pytest.raises(GrammarError, match="nested parts; at most 12000 fit"):
        lark_of_gbnf(f'root ::= {words} | "a"')


def test_a_character_over_several_tokens():
    """Field report R05, on bytes."""
    found = matcher("root ::= [😀-🙏]+")
    assert allowed(found) == {0xF0}
    for byte, after in ((0xF0, {0x9F}), (0x9F, {0x98, 0x99}), (0x99, set(range(0x80, 0x90)))):
        assert found.consume_token(byte)
        assert allowed(found) == after
    assert found.consume_token(0x8F)
    assert allowed(found) == {0xF0, END, END + 1}
    other = matcher("root ::= [😀-🙏]+")
    assert other.consume_tokens([0xF0, 0x9F, 0x98])
    assert allowed(other) == set(range(0x80, 0xC0))


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (r'root ::= "\x41\u00e9\U0001F600\\\"\x7f/"', ['Aé😀\\"\x7f/'], ["A", "Aé😀\\\\\"\x7f/"]),
        (r'root ::= [^\]\-"]* "]"', ["ab\n[é😀]", "]"], ["a-]", '"]', "]]"]),
        ('root ::= . "x" .', ["\nx😀", "xxx", "\0x\x7f"], ["x", "ab", "xx"]),
        ('root ::= ... "b" ...', ["éééb😀😀😀", "bbbbbbb"], ["ébéé", "éééa\n\n\n"]),
        ("root ::= [a-c\r\nx-]+\r\n", ["a-x\r\n"], ["d", ""]),
        ("root ::= [^a]", ["\u0000", "\ud7ff", "\ue000", "\U0010ffff", "b"], ["a", "", "bb"]),
        ('root ::= "a" | # one\r\n  "b" |\r\n', ["a", "b", ""], ["ab"]),
        ("root ::= [/#%<>&~] \"//\"", ["///", "#//", "~//"], ["//"]),
    ],
)  # fmt: skip
def test_characters(grammar, good, bad):
    for document in good:
        assert accepts(grammar, document), document
    for document in bad:
        assert not accepts(grammar, document), document
    nested = 'root ::= "(" root ")" | inner\ninner ::=' + grammar[8:]
    for document in good:
        assert accepts(nested, f"(({document}))"), document


def test_bytes_that_are_no_characters_are_not_allowed():
    assert allowed(matcher("root ::= .")) == {*range(0x80), *range(0xC2, 0xF5)}
    assert not accepts("root ::= .+", b"\xed\xa0\x80")
    assert not accepts("root ::= .+", b"\xc0\x80")


def test_tokens_of_the_vocabulary():
    """Literal tokens are taken as they are, beside text that is taken by character."""
    word = TOKENS["ab"]
    found = matcher(f"root ::= <[{word}]> [a-c]+ <[{word}]> (!<[{word}]>)* <[{word}]>")
    assert allowed(found) == {word}
    assert found.consume_token(word)
    assert allowed(found) & set(TOKENS.values()) == {
        TOKENS[t] for t in ("a", "b", "c", "ab", "bc", "ca", "aa", "abc", "bb")
    }
    assert found.consume_tokens([TOKENS["bc"], word, TOKENS["x"], TOKENS["ing"]])
    assert not found.is_accepting()
    assert found.consume_token(word)
    assert found.is_accepting()


def test_any_other_token_is_no_end():
    """llguidance alone would let an end token pass in the middle."""
    word, ends = TOKENS["ab"], (END, END + 1)
    lark = lark_of_gbnf(f"root ::= !<[{word}]>* <[{word}]>", ends=ends)
    found = LLMatcher(vocabulary(), LLMatcher.grammar_from_lark(lark), log_level=0)
    assert allowed(found) == set(range(vocabulary().vocab_size)) - {*ends}
    assert found.consume_tokens([TOKENS["bc"], TOKENS["x"]])
    assert allowed(found) == set(range(vocabulary().vocab_size)) - {*ends}
    assert found.consume_token(word)
    assert allowed(found) == {*ends}
    assert "<[^256,257]>" in lark_of_gbnf("root ::= !<[256]>", ends=ends)


def test_tokens_by_text():
    seen: list[str] = []

    def token_id(written: str) -> int:
        seen.append(written)
        return 97

    lark = lark_of_gbnf("root ::= <think> !</think>* <|im end|>", token_id)
    assert "<[97]>" in lark and "<[^97]>" in lark
    assert seen == ["<think>", "</think>", "<|im end|>"]
