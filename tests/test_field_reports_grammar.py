"""Field reports R01 to R10: grammars and JSON schemas that broke such engines, from end to end."""

import copy
import json
import re

import jsonschema
import numpy as np
import pytest
from byte_vocabulary import accepts, allowed_after, constraint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from json_schemas import schemas
from tiny_models import read_spec, write_tiny

from minfer_jax.errors import GrammarError, SamplingError
from minfer_jax.lm import load
from minfer_jax.sampling.grammar import GrammarEngine, grammar_spec
from minfer_jax.settings import Settings
from minfer_jax.tokenizer import load_tokenizer


def refused(message, **asked):
    with pytest.raises(GrammarError, match=message) as error:
        constraint(**asked)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        ('root ::= root "a" | "b"', ["b", "ba", "baaa"], ["", "a", "ab"]),
        ('root ::= a "x"\na ::= b\nb ::= a "y" | "z"', ["zx", "zyyx"], ["x", "zy", "yx"]),
        ('root ::= e root "a" | "b"\ne ::= "q"?', ["b", "ba", "qba", "qqbaa"], ["q", "qb", "a"]),
        ('e ::= "q"?\nroot ::= e root "a" | "b"', ["b", "ba", "qba", "qqbaa"], ["q", "qb", "a"]),
        (
            'root ::= ws expr\nexpr ::= ws expr "+" ws expr | [0-9]\nws ::= [ ]*',
            ["1", " 1", "1+2", "  1+ 2+3"],
            ["", "+", "1+", "12"],
        ),
    ],
)
def test_r01_left_recursion(grammar, yes, no):
    for text in yes:
        assert accepts(text, grammar=grammar), text
    for text in no:
        assert not accepts(text, grammar=grammar), text


@pytest.mark.parametrize(
    "grammar", ["root ::= root", "root ::= a\na ::= root", 'root ::= "a" root']
)
def test_r01_a_rule_without_an_end(grammar):
    refused("root|'a'", grammar=grammar)


def test_r03_depth():
    for depth in (1_000, 60_000):
        grammar = "root ::= " + "(" * depth + '"a"' + ")" * depth
        assert accepts("a", grammar=grammar)
    chain = "\n".join(f"r{i} ::= r{i + 1}" for i in range(5_000))
    assert accepts("a", grammar=f'root ::= r0\n{chain}\nr5000 ::= "a"')
    for depth in (101, 2_000):
        refused("nested more than 100", json_schema='{"items":' * depth + "true" + "}" * depth)
    definitions = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(2_000)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**definitions, "d2000": True}}
    refused("nests more than 300 schemas", json_schema=schema)


def test_r04_counts():
    refused("3.*1", grammar='root ::= "a"{3,1}')
    for most in (1999, 2000, 2001):
        grammar = f'root ::= "a"{{0,{most}}}'
        assert accepts("a" * most, grammar=grammar)
        assert not accepts("a" * (most + 1), grammar=grammar)
    nested = 'root ::= (("a"{0,100}){0,100}){0,100}'
    assert accepts("a" * 250, grammar=nested)
    assert not accepts("ab", grammar=nested)
    assert accepts('"' + "a" * 10_000 + '"', json_schema={"type": "string", "maxLength": 10_000})
    few = {"type": "array", "minItems": 10, "maxItems": 1000}
    assert accepts("[" + ",".join("1" * 10) + "]", json_schema=few)
    assert not accepts("[1,2]", json_schema=few)
    assert accepts("[1]", json_schema={"type": "array", "maxItems": 18446744073709551615})


def test_r05_a_character_over_several_tokens(smollm2_path):
    """The sets are llama.cpp's."""
    engine = GrammarEngine(load_tokenizer(smollm2_path))
    for asked in ({"grammar": "root ::= [😀-🙏]+"}, {"regex": "[😀-🙏]+"}):
        spec = grammar_spec(**asked)
        assert spec is not None
        started = engine.constraint(spec)
        assert allowed_after(started) == {187, 10813}
        started.accept(10813)
        assert allowed_after(started) == {242, 243, 38887}
        started.accept(242)
        assert len(allowed_after(started)) == 64
        started.accept(218)
        assert allowed_after(started) == {0, 2, 4, 187, 10813}


@pytest.mark.parametrize("pattern", [r"\S", r"^\d+$", r"^a\/b$", r"^[\w-]+$", '^"a"$'])
def test_r07_patterns_are_exact(pattern):
    schema = {"type": "string", "pattern": pattern}
    assert constraint(json_schema=schema).notes == ()
    checker = jsonschema.Draft202012Validator(schema)
    for text in ("", "a", "12", "a/b", "a\\/b", "x-y_1", '"a"', " ", "é!", "a b", "\t", "1 "):
        written = json.dumps(text, ensure_ascii=False)
        expected = checker.is_valid(text) and (text.isascii() or pattern != r"^[\w-]+$")
        assert accepts(written, json_schema=schema) == expected, text


def test_r07_or_said_not_to_be_enforced():
    schema = {"type": "string", "pattern": "^(?=x)"}
    (note,) = constraint(json_schema=schema).notes
    assert "'^(?=x)' is not enforced" in note
    assert accepts('"y"', json_schema=schema)
    assert not accepts("1", json_schema=schema)


def test_r08_references():
    link = {
        "type": "object",
        "properties": {"v": {"$ref": "#/$defs/A"}, "next": {"$ref": "#/$defs/C"}},
        "required": ["v"],
        "additionalProperties": False,
    }
    integer = {"type": "integer"}
    for definitions in ({"C": link, "A": integer}, {"A": integer, "C": link}):
        schema = {"$ref": "#/$defs/C", "$defs": definitions}
        assert accepts('{"v":1,"next":{"v":2,"next":{"v":3}}}', json_schema=schema)
        assert not accepts('{"v":1,"next":{"v":"x"}}', json_schema=schema)
        assert not accepts('{"v":1,"next":{}}', json_schema=schema)
    root = {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}
    assert accepts("[[],[[],[]]]", json_schema=root)
    assert not accepts("[[],[[],1]]", json_schema=root)
    either = {
        "properties": {
            "l": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "m": {"$ref": "#/properties/l/anyOf/0"},
        }
    }
    assert accepts('{"l":null,"m":3}', json_schema=either)
    assert not accepts('{"l":null,"m":null}', json_schema=either)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("#/$defs/none", "'#/\\$defs/none' points to nothing"),
        ("#/$defs/a", "refers to itself without an end"),
        ("#/$defs/endless", "refers to itself without an end"),
        ("http://127.0.0.1:9/schema.json", "nothing is fetched"),
        ("https://example.com/schema.json#/a", "nothing is fetched"),
    ],
)
def test_r08_references_to_nothing(reference, message, monkeypatch):
    def no_network(*_):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr("socket.socket", no_network)
    endless = {"type": "array", "items": {"$ref": "#/$defs/endless"}, "minItems": 1}
    definitions = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}, "endless": endless}
    refused(message, json_schema={"$ref": reference, "$defs": definitions})


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [({"minimum": 3}, range(3, 121)), ({"minimum": -5, "maximum": 5}, range(-5, 6))],
)
def test_r10_ranges_of_integers(bounds, expected):
    schema = {"type": "integer", **bounds}
    assert [i for i in range(-20, 121) if accepts(str(i), json_schema=schema)] == list(expected)
    for text in ("01", "-01", "1.0"):
        assert not accepts(text, json_schema=schema)
    # -0 is the integer 0.
    assert accepts("-0", json_schema=schema) == (0 in expected)


def test_r10_an_empty_range():
    schema = {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
    refused("contains no integer", json_schema=schema)


@pytest.fixture(scope="module")
def tiny_json(tmp_path_factory):
    """The tiny llama, its 128 tokens being ASCII's characters but for an end in the last place."""
    folder = tmp_path_factory.mktemp("tiny-json")
    vocabulary = {
        "tokenizer.ggml.model": "rwkv",
        "tokenizer.ggml.tokens": [*(f"\\x{byte:02x}" for byte in range(127)), "</s>"],
    }
    path = write_tiny(read_spec("llama-dense"), folder / "tiny.gguf", kv=vocabulary)
    return load(path, n_ctx=512, settings=Settings(home=folder))


@pytest.mark.slow
def test_200_random_schemas_with_the_tiny_model(tiny_json):
    """At temperature 2, each finished document is valid; most do finish."""
    closing = {ord(char): 6.0 for char in '"}]0'} | {127: 6.0}
    finished, refused = [], []

    @settings(
        max_examples=220,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(schemas(), st.integers(0, 2**64 - 1))
    def run(schema, seed):
        asked = copy.deepcopy(schema)
        options = {"temp": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "logit_bias": closing}
        try:
            result = tiny_json.generate("{", n=150, json_schema=asked, seed=seed, **options)
        except GrammarError as error:
            assert re.search("Unsatisfiable", str(error))
            refused.append(schema)
            return
        except SamplingError as error:  # a constant beyond ASCII
            assert "the text so far is a valid beginning" in str(error)
            return
        if result.finish_reason == "stop":
            finished.append(result.text)
            jsonschema.Draft202012Validator(schema).validate(json.loads(result.text))

    run()
    assert len(finished) >= 150
    assert len(refused) <= 30
    assert np.mean([len(text) for text in finished]) > 8
