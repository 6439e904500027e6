"""`sampling.grammar.spec`: what is asked for, and what cannot be asked for."""

import json

import pytest

from minfer_jax.errors import GrammarError, UsageError
from minfer_jax.sampling.grammar import GrammarSpec, grammar_spec


def test_nothing_asked_for():
    assert grammar_spec() is None
    assert grammar_spec(json_object=False) is None


@pytest.mark.parametrize(
    ("asked", "kind"),
    [("grammar", "gbnf"), ("regex", "regex"), ("lark", "lark"), ("json_schema", "json_schema")],
)
def test_a_text_is_kept_as_it_is(asked, kind):
    spec = grammar_spec(**{asked: " a\r\n"})
    assert spec == GrammarSpec(kind, " a\r\n")
    assert hash(spec) == hash(GrammarSpec(kind, " a\r\n"))


def test_any_object():
    assert grammar_spec(json_object=True) == GrammarSpec("json_object", "")


@pytest.mark.parametrize("schema", [{"type": "integer", "title": "é"}, {}, True, False])
def test_a_parsed_schema_becomes_text(schema):
    spec = grammar_spec(json_schema=schema)
    assert spec is not None and spec.kind == "json_schema"
    assert json.loads(spec.text) == schema


def test_grammars_exclude_each_other():
    with pytest.raises(GrammarError, match=r"^json_object and regex exclude each other"):
        grammar_spec(regex="a", json_object=True)
    assert issubclass(GrammarError, UsageError)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "regex must be a text, not int"),
        ("", "regex is empty"),
        ("a" * (1 << 20) + "a", "regex has 1048577 characters; allowed: 1048576"),
        ("a\ud800", "regex holds a lone surrogate at character 1"),
    ],
)
def test_what_is_no_grammar(value, message):
    with pytest.raises(GrammarError, match=message):
        grammar_spec(regex=value)


def test_a_schema_of_another_type():
    with pytest.raises(GrammarError, match="json_schema must be a text, not list"):
        grammar_spec(json_schema=[])
