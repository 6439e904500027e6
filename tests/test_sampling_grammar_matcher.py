"""`sampling.grammar.matcher`: masks, ends, and refusals, on a vocabulary of bytes."""

import gc
import threading
import time

import numpy as np
import pytest
from byte_vocabulary import (
    ENGINE,
    accepts,
    allowed_after,
    byte_tokenizer,
    constraint,
    endless_tokenizer,
)

from minfer_jax.errors import GrammarError, SamplingError
from minfer_jax.sampling.grammar import GrammarEngine, GrammarSpec, check_grammar
from minfer_jax.tokenizer import from_metadata

ENDS = {256, 257}


def bytes_of(text):
    return set(text.encode())


def test_a_mask_holds_what_may_come_next():
    started = constraint(regex="ab?c")
    mask = started.allowed()
    assert (mask.dtype, mask.shape) == (np.bool_, (258,))
    assert allowed_after(started) == bytes_of("a")
    assert allowed_after(started, "a") == bytes_of("bc")
    assert allowed_after(started, "b") == bytes_of("c")
    assert allowed_after(started, "c") == ENDS


def test_every_spelling_is_allowed():
    engine = GrammarEngine(byte_tokenizer(extra=["ab", "abc", "abd", "b", "c<|im_end|>"]))
    started = engine.constraint(GrammarSpec("regex", "abc"))
    assert allowed_after(started) == {ord("a"), 258, 259}
    started.accept(ord("a"))
    assert allowed_after(started) == {ord("b"), 261}
    started.accept(261)
    assert allowed_after(started) == {ord("c")}


def test_ends_come_only_where_the_document_can_end():
    started = constraint(regex="[0-9]+")
    assert not allowed_after(started) & ENDS
    assert allowed_after(started, "7") == ENDS | bytes_of("0123456789")
    assert not started.finished
    started.accept(257)
    assert started.finished
    assert allowed_after(started) == ENDS
    started.accept(256)
    with pytest.raises(SamplingError, match="token 55 is not allowed"):
        started.accept(ord("7"))


def test_finished_before_and_after_a_mask():
    started = constraint(regex="a(b|c)")
    assert not started.finished
    started.accept(ord("a"))
    started.prepare()
    assert not started.finished
    started.accept(ord("b"))
    assert started.finished  # the parser has stopped by itself
    started.prepare()
    assert started.finished
    started.accept(256)
    assert started.finished


def test_control_tokens_are_no_text():
    engine = GrammarEngine(byte_tokenizer(control=("<|im_end|>", "<|user|>")))
    started = engine.constraint(GrammarSpec("regex", r"(?s:.*)"))
    # Bytes that begin a character, and an end; never 0xFF, nor the token `<|user|>`.
    assert allowed_after(started) == {*range(0x80), *range(0xC2, 0xF5), 256}
    for character in b"<|user|>":
        started.accept(character)
    with pytest.raises(SamplingError):
        started.accept(257)


def test_a_grammar_may_name_a_control_token():
    engine = GrammarEngine(byte_tokenizer(control=("<|im_end|>", "<|user|>")))
    started = engine.constraint(GrammarSpec("lark", 'start: "a" <|user|> "b"'))
    started.accept(ord("a"))
    assert allowed_after(started) == {257}
    started.accept(257)
    assert allowed_after(started) == {ord("b")}


def test_an_end_token_that_a_grammar_names_is_the_end():
    started = constraint(grammar='root ::= "a" <|im_end|>')
    assert allowed_after(started, "a") == {256}
    started.accept(256)
    assert started.finished


def test_any_token_but_one_is_no_end_before_the_end():
    started = constraint(grammar='root ::= !<[97]> "b"')
    allowed = allowed_after(started)
    assert not allowed & {97, 256, 257} and {98, 99} <= allowed
    assert allowed_after(started, "cb") == {256, 257}


def test_characters_over_several_tokens():
    started = constraint(regex="[é-í]😀")
    assert allowed_after(started) == {0xC3}
    assert allowed_after(started, b"\xc3") == {0xA9, 0xAA, 0xAB, 0xAC, 0xAD}
    assert allowed_after(started, b"\xab\xf0\x9f") == {0x98}
    assert allowed_after(started, b"\x98\x80") == ENDS


def test_a_token_that_is_not_allowed_changes_nothing():
    started = constraint(regex="ab")
    started.accept(ord("a"))
    for token in (ord("a"), 256, -1, 258, 1 << 40):
        with pytest.raises(SamplingError, match=f"token {token} is not allowed by the grammar"):
            started.accept(token)
    assert allowed_after(started) == {ord("b")}
    started.accept(ord("b"))
    assert started.finished


def test_a_refused_token_is_shown():
    with pytest.raises(
        SamplingError, match=r"token 233 is not allowed .* after 0 tokens: b'\\xe9'"
    ):
        constraint(regex="a").accept(0xE9)


def test_accept_agrees_with_the_mask():
    """All tokens, along one document with strings, numbers and an escape."""
    schema = {"type": "object", "properties": {"é": {"type": ["number", "string"]}}}
    text = b'{ "\xc3\xa9" : -1.5e3, "x\\n":[""]}'
    started = constraint(json_schema=schema)
    for at in range(len(text) + 1):
        allowed = allowed_after(started)
        for token in set(range(258)) - allowed:
            with pytest.raises(SamplingError):
                started.accept(token)
        for token in sorted(allowed)[:: max(1, len(allowed) // 4)]:
            fresh = constraint(json_schema=schema)
            allowed_after(fresh, text[:at])
            fresh.accept(token)
        if at < len(text):
            started.accept(text[at])
    assert started.finished


def test_prepare_computes_the_same_in_a_thread():
    ahead, behind = constraint(json_object=True), constraint(json_object=True)
    for byte in b'{"a": [1, "x"]}':
        ahead.prepare()
        ahead.prepare()
        np.testing.assert_array_equal(ahead.allowed(), behind.allowed())
        ahead.prepare()
        ahead.accept(byte)
        behind.accept(byte)
    names = [thread.name for thread in threading.enumerate()]
    assert sum(name.startswith("grammar") for name in names) == 1


def test_accepting_while_a_mask_is_on_its_way():
    started = constraint(regex="[ab]{2}c")
    for byte in b"ab":
        started.prepare()
        time.sleep(0.02)  # it may arrive meanwhile, and is out of date then
        started.accept(byte)
    assert allowed_after(started) == {ord("c")}


def test_a_mask_is_not_written_to():
    started = constraint(regex="a")
    with pytest.raises(ValueError, match="read-only"):
        started.allowed()[0] = True


def test_constraints_of_one_engine_are_independent():
    one, other = constraint(regex="ab"), constraint(regex="ab")
    one.accept(ord("a"))
    assert allowed_after(other) == {ord("a")}
    del one
    gc.collect()
    other.accept(ord("a"))
    assert allowed_after(other) == {ord("b")}


def few_tokens():
    return from_metadata(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a", "b"],
            "tokenizer.ggml.token_type": [2, 3, 3, 1, 1],
            "tokenizer.ggml.scores": [0.0] * 5,
        }
    )


def test_nothing_can_be_spelled():
    """No end instead: the document is not complete."""
    started = GrammarEngine(few_tokens()).constraint(GrammarSpec("regex", "ac"))
    started.accept(3)
    assert not started.allowed().any()
    assert not started.finished
    for token in (2, 3):
        with pytest.raises(SamplingError):
            started.accept(token)


def test_a_vocabulary_without_an_end():
    engine = GrammarEngine(endless_tokenizer())
    started = engine.constraint(GrammarSpec("regex", "ab"))
    assert len(started.allowed()) == 256
    allowed_after(started, "a")
    assert not started.finished
    started.accept(ord("b"))
    assert started.finished
    assert not started.allowed().any()
    assert started.finished


def test_a_grammar_beyond_the_limits_is_loud():
    """More rules at work at once than the parser keeps; neither a mask nor an end follows."""
    rules = [f'r{i}: "a" r{i} | "c{i}"' for i in range(3000)]
    started = constraint(
        lark="\n".join(["start: " + " | ".join(f"r{i}" for i in range(3000)), *rules])
    )
    assert allowed_after(started) == bytes_of("ac")
    for step in (lambda: started.accept(ord("a")), started.allowed, lambda: started.accept(256)):
        with pytest.raises(SamplingError, match=r"^the grammar failed: \S.*$"):
            step()
    assert not started.finished


@pytest.mark.parametrize(
    ("text", "regex"),
    [("a/b", "a/b"), ("a/b", r"a\/b"), ('"\n', '"\n'), ("a", "^a$"), ("é", "[é-ü]")],
)
def test_regular_expressions(text, regex):
    assert accepts(text, regex=regex)
    assert not accepts(text + "x", regex=regex)
    assert not accepts("x" + text, regex=regex)


def test_lark():
    grammar = 'start: greeting ", " NAME "!"\ngreeting: "hi" | "ho"\nNAME: /[A-Z][a-z]+/'
    assert accepts("ho, Ann!", lark=grammar)
    assert not accepts("ho, ann!", lark=grammar)


def test_json_objects():
    for text in ("{}", '{"a": {"b": [1, null, "x"]}, "": false}', '{\n  "a": 1e3\n}'):
        assert accepts(text, json_object=True)
    for text in ("[]", "1", " {}", "{} ", '{"a":}', "{'a':1}", '{"a":01}', '{"a": 1,}'):
        assert not accepts(text, json_object=True)


BAD = [
    (GrammarSpec("regex", "(a"), "^regular expression: invalid regex .*unclosed group"),
    (GrammarSpec("regex", "a{3,1}"), "regular expression: .*invalid repetition count"),
    (GrammarSpec("lark", "start: b"), r'Lark grammar: at 1\(8\): unknown name: "b"'),
    (GrammarSpec("lark", 'start: "a'), r"Lark grammar: 1\(\d+\): lexer error"),
    (
        GrammarSpec("json_schema", '{"type": "number", "minimum": 2, "maximum": 1}'),
        "^JSON schema: Unsat",
    ),
    (GrammarSpec("gbnf", "root ::= ("), "."),
]


@pytest.mark.parametrize(("spec", "message"), BAD)
def test_a_bad_grammar_is_one_line(spec, message):
    for check in (check_grammar, ENGINE.constraint):
        with pytest.raises(GrammarError, match=message) as error:
            check(spec)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 400


def test_checking_needs_no_vocabulary():
    for spec in (
        GrammarSpec("regex", "a+"),
        GrammarSpec("lark", "start: <|im_end|>"),
        GrammarSpec("json_object", ""),
        GrammarSpec("gbnf", 'root ::= "a" <[7]> <token>'),
    ):
        check_grammar(spec)


def test_a_token_that_the_vocabulary_does_not_have():
    started = ENGINE.constraint(GrammarSpec("gbnf", "root ::= <|end|>"))
    assert allowed_after(started) == {257}
    with pytest.raises(GrammarError, match="is not one token of this vocabulary"):
        ENGINE.constraint(GrammarSpec("gbnf", "root ::= <|start|>"))


def test_notes_say_what_is_not_enforced():
    schema = {"uniqueItems": True, "oneOf": [{"type": "integer"}, {"type": "number"}]}
    notes = constraint(json_schema=schema).notes
    assert notes[0] == "JSON schema, #: 'uniqueItems' is not enforced"
    assert notes[1].startswith("JSON schema: oneOf not fully supported")
    assert constraint(json_object=True).notes == ()


def test_a_backslash_with_nothing_behind_it_is_refused():
    with pytest.raises(GrammarError, match="at its end stands for nothing"):
        constraint(regex="foo\\")
    assert accepts("foo\\", regex=r"foo\\")


def test_a_blank_is_an_expression():
    assert accepts(" ", regex=" ") and not accepts("", regex=" ")
