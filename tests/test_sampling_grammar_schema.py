"""`sampling.grammar.schema`: what a JSON schema allows, judged by `jsonschema`."""

import copy
import json

import jsonschema
import numpy as np
import pytest
from byte_vocabulary import accepts, allowed_after, constraint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from json_schemas import schemas

from minfer_jax.errors import GrammarError
from minfer_jax.sampling.grammar import GrammarSpec, check_grammar
from minfer_jax.sampling.grammar.schema import lark_of_schema

DEEP = {"a": [{"b": [1, {"c": None}]}]}
OBJECT = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}


def valid(schema, document):
    return jsonschema.Draft202012Validator(schema).is_valid(document)


def notes(schema):
    return list(constraint(json_schema=schema).notes)


def refusal(schema):
    text = schema if isinstance(schema, str) else json.dumps(schema)
    with pytest.raises(GrammarError) as error:
        check_grammar(GrammarSpec("json_schema", text))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "schema",
    [
        *({}, True, {"type": "object"}, {"type": "array"}, {"type": ["string", "null"]}),
        *({"type": "string"}, {"type": "boolean"}, {"type": "null"}, {"type": "number"}),
        *({"const": DEEP}, {"const": 'é"\n😀'}, {"enum": [1, "1", None, [], {"a": 1}]}),
        *({"const": 1.5}, {"const": -0.25}, {"enum": [2**53 - 1, -(2**60)]}, {"const": 1e20}),
        *({"type": "string", "minLength": 2}, {"type": "string", "maxLength": 2}),
        *({"minLength": 1, "maxLength": 3}, {"minLength": 2.0}, {"maxLength": 0}),
        *({"type": "array", "minItems": 1, "maxItems": 2}, {"items": {"type": "integer"}}),
        *({"prefixItems": [{"const": 1}, {"type": "string"}], "items": False}, {"maxItems": 0}),
        *({"type": "array", "prefixItems": [{"const": 1}], "minItems": 2}, {"items": False}),
        *(OBJECT, {**OBJECT, "additionalProperties": False}, {"required": ["a", "é"]}),
        *({**OBJECT, "additionalProperties": {"type": "null"}}, {"properties": {"a": False}}),
        *({"patternProperties": {"^a": {"type": "integer"}}}, {"maxProperties": 1}),
        *({"patternProperties": {r"\d": {"const": 1}}, "additionalProperties": False},),
        *({"type": "object", "minProperties": 1}, {"type": "object", "maxProperties": 0}),
        *(
            {**OBJECT, "minProperties": 1},
            {**OBJECT, "maxProperties": 2, "additionalProperties": False},
        ),
        *({"anyOf": [{"type": "integer"}, {"minLength": 2, "type": "string"}]},),
        *({"oneOf": [{"type": "integer"}, {"const": "a"}, {"type": "array"}]},),
        *({"allOf": [OBJECT, {"properties": {"b": {"maxLength": 1}}, "required": ["b"]}]},),
        *({"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": -5}]}, {"multipleOf": 3}),
        *({"minimum": 0.5, "exclusiveMaximum": 7}, {"type": "number", "multipleOf": 0.5}),
        *({"not": False}, {"uniqueItems": False}, {"properties": {"a": {"not": {}}}}),
    ],
)
def test_documents_in_one_spelling(schema):
    """No document that is invalid; all that are valid, with their properties in order."""
    documents = [
        *(None, True, False, 0, 1, -1, 3, 5, 7, -5, 6, 1.5, 0.5, -0.25, 1e20, 2**53 - 1, -(2**60)),
        *(
            "",
            "a",
            "aa",
            "aaa",
            "1",
            'é"\n😀',
            "é😀",
            [],
            [1],
            [1, "a"],
            [1, 1],
            [1, 1, 1],
            ["a", 1],
        ),
        *([None], [[], {}], {}, {"a": 1}, {"a": "x"}, {"a": 1, "b": "x"}, {"a": 1, "b": 1}),
        *({"a": 1, "b": "xx", "c": None}, {"a": 1, "c": None}, {"a": 1, "c": 1}, {"b": "x"}, DEEP),
        *({"a": 1, "é": 2}, {"é": 1}, {"a1": 1}, {"a1": 2}, {"a": None}, {"x": {"a": [True]}}),
    ]
    for document in documents:
        for form in ({"separators": (",", ":")}, {"indent": 2}):
            text = json.dumps(document, ensure_ascii=False, **form)
            text = text.replace("1e+20", "1" + "0" * 20)
            assert accepts(text, json_schema=schema) == valid(schema, document), text
    assert notes(schema) == []


@pytest.mark.parametrize(
    ("bounds", "low", "high"),
    [
        ({"minimum": 3}, 3, 120),
        ({"minimum": -5, "maximum": 5}, -5, 5),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 2}, 1, 1),
        ({"minimum": 0.5, "maximum": 9.5}, 1, 9),
        ({"minimum": 99, "exclusiveMaximum": 101}, 99, 100),
        ({"minimum": 3, "exclusiveMinimum": True}, 4, 120),
        ({"maximum": -19, "exclusiveMaximum": False}, -20, -19),
        ({"maximum": 2**62, "minimum": 118}, 118, 120),
    ],
)
def test_ranges_of_integers(bounds, low, high):
    schema = {"type": "integer", **bounds}
    found = [i for i in range(-20, 121) if accepts(str(i), json_schema=schema)]
    assert found == list(range(low, high + 1))
    for text in ("01", "-01", "1.0", "1e0", "+1", "0x1", ""):
        assert not accepts(text, json_schema=schema)


@pytest.mark.parametrize(
    ("bounds", "yes", "no"),
    [
        ({"maximum": 2**53}, 2**53, 2**53 + 1),
        ({"minimum": -(2**53)}, -(2**53), -(2**53) - 1),
        ({"maximum": 2**53 + 1}, 9007199254740990, 2**53 + 2),
        ({"minimum": 2**53 + 1}, 9007199254741000, 2**53),
        ({"minimum": -(2**53) - 1}, -9007199254740990, -(2**53) - 2),
        ({"maximum": 2305843009213690000}, 2305843009213680000, 2305843009213690001),
        ({"maximum": 2**61, "minimum": 10**18}, 10**18, 2**61 + 1),
        ({"maximum": 2**61, "minimum": 10**18}, 2305843009213680000, 10**18 - 1),
        ({"maximum": 1e17, "exclusiveMinimum": -1e17}, 99999999999999900, 100000000000000001),
    ],
)
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_that_float64_does_not_hold(bounds, yes, no, kind):
    """Never more than they allow, and all that 15 digits can tell apart."""
    schema = {"type": kind, **bounds}
    assert accepts(str(yes), json_schema=schema)
    assert not accepts(str(no), json_schema=schema)


def test_bounds_beyond_the_integers_of_the_parser():
    schema = {"type": "integer", "minimum": -(10**30), "maximum": 1e30}
    assert notes(schema) == [
        f"JSON schema, #/minimum: -{10**30} is taken as -2**62",
        "JSON schema, #/maximum: 1e+30 is taken as 2**62",
    ]
    assert accepts(str(4 * 10**18), json_schema=schema)
    assert not accepts(str(10**20), json_schema=schema)
    assert "beyond 2**62" in refusal({"minimum": 10**30})
    assert "beyond 2**62" in refusal({"exclusiveMaximum": -(10**30)})


@pytest.mark.parametrize("name", ["a", 'q"', "n\n", "\\", "/", "é", "", "\x01"])
def test_a_name_has_one_spelling(name):
    """Otherwise an escaped one would pass for a name that the schema says nothing of."""
    schema = {"properties": {name: {"type": "integer"}}, "type": "object"}
    written = json.dumps(name, ensure_ascii=False)
    assert accepts(f"{{{written}:1}}", json_schema=schema)
    escaped = '"' + "".join(f"\\u{ord(char):04x}" for char in name) + '"'
    for spelling in {written, escaped, written.replace("/", "\\/")} - ({'""'} if name else set()):
        assert not accepts(f'{{{spelling}:"x"}}', json_schema=schema)
    assert accepts('{"other":"x"}', json_schema=schema)


def test_white_space_has_an_end():
    for text in ('{"a":1}', '{ "a" : [ 1 , 2 ] }', '{\n\t\t"a":\r\n    1\n}'):
        assert accepts(text, json_object=True)
    for text in ('{  "a":1}', '{"a":1\n\n}', '{"a":\t1}', '{"a":1}\n', ' {"a":1}', '{"a":1} '):
        assert not accepts(text, json_object=True)
    assert accepts("[\n" + " " * 40 + "]", json_schema={})
    assert not accepts("[\n" + " " * 41 + "]", json_schema={})


def test_a_schema_cannot_change_how_it_is_read():
    assert notes({"x-guidance": {"whitespace_flexible": False}, "x-other": 1}) == []
    assert accepts("[ 1]", json_schema={"x-guidance": {"whitespace_flexible": False}})


def test_counts():
    schema = {"type": "array", "minItems": 10, "maxItems": 1000, "items": {"const": 1}}
    for n, expected in ((9, False), (10, True), (1000, True), (1001, False)):
        assert accepts("[" + ",".join("1" * n) + "]", json_schema=schema) == expected
    schema = {"type": "string", "maxLength": 10_000}
    for n, expected in ((0, True), (10_000, True), (10_001, False)):
        assert accepts('"' + "é" * n + '"', json_schema=schema) == expected


@pytest.mark.parametrize("most", ["maxItems", "maxLength", "maxProperties"])
def test_a_maximum_that_nothing_reaches(most):
    for count in (2**31, 2**32, 18446744073709551615, 2**80, 1e300):
        assert notes({most: count}) == []
        assert accepts('["a"]', json_schema={most: count})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"items": [{"const": 1}], "additionalItems": False}, {"prefixItems": [{"const": 1}]}),
        ({"items": {"const": 1}, "additionalItems": False}, {"items": {"const": 1}}),
        ({"minimum": 3, "exclusiveMinimum": True}, {"minimum": 3, "exclusiveMinimum": 3}),
        ({"exclusiveMaximum": True}, {}),
        ({"items": []}, {}),
    ],
)
def test_old_drafts(old, new):
    if old.get("additionalItems") is False and "prefixItems" in new:
        new = {**new, "items": False}
    assert lark_of_schema(json.dumps(old)) == lark_of_schema(json.dumps(new))


RELAXED = [
    ({"uniqueItems": True}, "[1,1]", "#: 'uniqueItems' is not enforced"),
    ({"not": {"type": "array"}}, "[]", "#: 'not' is not enforced"),
    ({"if": {}, "then": False, "else": {}}, "1", "#: 'if' is not enforced"),
    ({"contains": {"const": 1}, "minContains": 2}, "[]", "#: 'contains' is not enforced"),
    ({"dependentRequired": {"a": ["b"]}}, '{"a":1}', "#: 'dependentRequired' is not enforced"),
    ({"propertyNames": False}, '{"a":1}', "#: 'propertyNames' is not enforced"),
    ({"unevaluatedItems": False}, "[1]", "#: 'unevaluatedItems' is not enforced"),
    ({"items": {"format": "regex"}}, '["("]', "#/items/format: the format 'regex' is not enforced"),
    ({"pattern": "^(?=x)"}, '"y"', "#/pattern: the pattern '^(?=x)' is not enforced: look-around"),
    (
        {"properties": {"a/b": {"pattern": r"\bx"}}},
        '{"a/b":"y"}',
        r"#/properties/a~1b/pattern: the pattern '\\bx' is not enforced: the escape \b",
    ),
    ({"patternProperties": {"(?!x)": {"const": 1}}}, '{"y":2}', "#/patternProperties/(?!x): "),
    (
        {"patternProperties": {"^a": {"const": 1}, "b$": {"const": 2}}},
        '{"a":2}',
        "#/patternProperties: not enforced: ",
    ),
    ({**OBJECT, "minProperties": 2}, '{"a":1}', "#: minProperties are not enforced: "),
    ({"minProperties": 2}, '{"a":1,"a":2}', "#: 'minProperties' counts a repeated name twice"),
    ({"multipleOf": 1e-30}, "0.1", "#/multipleOf: not enforced: "),
    ({"enum": [1, "\x01"]}, "1", "#/enum/1: the value is left out: "),
    ({"enum": [1, 2**53 + 1]}, "1", "#/enum/1: the value is left out: "),
    ({"requierd": ["a"]}, "{}", "#: the unknown keyword 'requierd' has no effect"),
]


@pytest.mark.parametrize(("schema", "text", "note"), RELAXED)
def test_what_is_not_enforced_is_said(schema, text, note):
    (only,) = notes(schema)
    assert only.startswith("JSON schema, " + note)
    assert accepts(text, json_schema=schema)


def test_a_relaxed_pattern_leaves_the_rest_in_force():
    schema = {"type": "string", "pattern": "^(?=x)", "minLength": 2}
    assert accepts('"yy"', json_schema=schema)
    assert not accepts('"y"', json_schema=schema)
    assert not accepts("1", json_schema=schema)


@pytest.mark.parametrize(
    ("name", "yes", "no"),
    [
        ("date", "2024-02-29", "2024-13-01"),
        ("time", "23:59:59Z", "24:00"),
        ("date-time", "2024-02-29T12:00:00+01:00", "2024-02-29"),
        ("duration", "P1DT2H", "1D"),
        ("email", "a.b@example.org", "a.b"),
        ("hostname", "a-b.example.org", "-a"),
        ("ipv4", "127.0.0.1", "127.0.0.256"),
        ("ipv6", "::1", ":1:"),
        ("uri", "https://example.org/a?b#c", "a b"),
        ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123e4567"),
    ],
)
def test_formats(name, yes, no):
    schema = {"type": "string", "format": name}
    assert accepts(json.dumps(yes), json_schema=schema)
    assert not accepts(json.dumps(no), json_schema=schema)
    assert notes(schema) == []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        *((s, "nothing can match") for s in (False, {"enum": []}, {"not": True}, {"not": {}})),
        ({"type": "array", "minItems": 1, "items": {"enum": []}}, "nothing can match"),
        ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, "no integer"),
        ({"type": "number", "minimum": 2, "maximum": 1}, "is greater than maximum"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "is greater than maxLength"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "is greater than maxItems"),
        ({"type": "object", "minProperties": 3, "maxProperties": 2}, "> maxProperties"),
        ({"type": "integer", "minimum": 1, "maximum": 4, "multipleOf": 5}, "multiple of 5"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible types"),
        ({"type": "string", "pattern": "^a$", "minLength": 2}, "Unsatisfiable"),
        ({"const": "\x01"}, r'#/const: "\u0001" holds a control character'),
        ({"const": [{"a": 2**53 + 1}]}, "#/const: the integer 9007199254740993 is beyond 2**53"),
        ({"minItems": 2**31 + 1}, "#/minItems: 2147483649 is above 2147483648"),
    ],
)
def test_impossible(schema, message):
    assert message in refusal(schema)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"type":', "is not JSON: Expecting value at line 1, column 9"),
        ("[1]", "is an object or a boolean, not a list"),
        ('"a"', "is an object or a boolean, not a text"),
        ("null", "is an object or a boolean, not null"),
        ("1", "is an object or a boolean, not a number"),
        ('{"minimum":NaN}', "NaN is no JSON value"),
        ('{"minimum":1e999}', "#/minimum: must be a number, not Infinity"),
        ('{"const":1e999}', "#/const: a number beyond float64"),
        ('{"const":"\\ud800"}', "lone surrogate"),
        ({"items": 3}, "#/items: a schema is an object or a boolean, not a number"),
        ({"properties": {"a/b": None}}, "#/properties/a~1b: a schema is an object or a boolean"),
        ({"properties": []}, "#/properties: must be an object of schemas, not []"),
        ({"patternProperties": 1}, "#/patternProperties: must be an object of schemas, not 1"),
        ({"type": "int"}, "#/type: must be one or several of null, boolean, integer"),
        ({"type": []}, "#/type: must be one or several"),
        ({"type": [["a"]]}, "#/type: must be one or several"),
        ({"required": "a"}, '#/required: must be a list of names, not "a"'),
        ({"required": [1]}, "#/required: must be a list of names"),
        ({"enum": 1}, "#/enum: must be a list of values"),
        ({"anyOf": []}, "#/anyOf: must be a list of schemas, not empty"),
        ({"allOf": [{"oneOf": {}}]}, "#/allOf/0/oneOf: must be a list of schemas"),
        ({"minLength": -1}, "#/minLength: must be an integer from 0 on, not -1"),
        ({"maxItems": 1.5}, "#/maxItems: must be an integer from 0 on, not 1.5"),
        ({"maxLength": True}, "#/maxLength: must be a number, not true"),
        ({"minimum": "1"}, '#/minimum: must be a number, not "1"'),
        ({"multipleOf": 0}, "#/multipleOf: must be a number above 0, not 0"),
        ({"pattern": 1}, "#/pattern: must be a text, not 1"),
        ({"$ref": 1}, "#/$ref: must be a text, not 1"),
        ({"properties": dict.fromkeys(map(str, range(2001)), True)}, "2001 names; allowed: 2000"),
        ({"anyOf": [{"anyOf": [{}] * 101}] * 100}, "has more than 10000 parts"),
    ],
)
def test_malformed(schema, message):
    assert message in refusal(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"x": {"$ref": "#/$defs/endless"}}, "required": ["x"]},
        {"anyOf": [{"$ref": "#/$defs/endless"}, {"type": "integer"}]},
        {"$ref": "#/$defs/either"},
    ],
)
def test_a_branch_without_an_end_is_not_entered(schema):
    endless = {"type": "object", "properties": {"x": {"$ref": "#/$defs/endless"}}}
    endless["required"] = ["x"]
    either = {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/endless"}]}
    schema = {**schema, "$defs": {"endless": endless, "either": either}}
    started = constraint(json_schema=schema)
    assert ord("7") in allowed_after(started)
    assert ord("{") not in allowed_after(started)


def test_a_number_sign_means_the_schema_with_the_identifier():
    inner = {"$id": "inner", "$defs": {"a": {"const": 1}}, "items": {"$ref": "#/$defs/a"}}
    schema = {"type": "object", "properties": {"x": inner}, "$defs": {"a": {"const": 2}}}
    assert accepts('{"x":[1]}', json_schema=schema)
    assert not accepts('{"x":[2]}', json_schema=schema)


def test_an_object_of_many_properties():
    schema = {"properties": {f"p{i}": {"type": "integer"} for i in range(200)}, "type": "object"}
    assert accepts('{"p3":1,"p199":2,"x":"y"}', json_schema=schema)
    assert not accepts('{"p3":1,"p199":"y"}', json_schema=schema)


# Letters that end a document are likelier than in plain noise, or strings would go on too long.
CLOSING = np.zeros(258)
CLOSING[[*b'"}]0']] = 4.0
CLOSING[[256, 257]] = 4.0
CLOSING[128:256] = -2.0


def sampled(started, rng, n=400):
    """Up to `n` random bytes at temperature 2, until an end; None without one."""
    out = bytearray()
    for _ in range(n):
        started.prepare()
        logits = (rng.normal(scale=2.0, size=258) + CLOSING) / 2.0
        token = int(np.argmax(np.where(started.allowed(), logits + rng.gumbel(size=258), -np.inf)))
        assert started.allowed()[token]
        started.accept(token)
        if token >= 256:
            return bytes(out)
        out.append(token)
    return None


@pytest.mark.slow
def test_200_random_schemas_at_temperature_2():
    """Every finished document is valid JSON and valid; most do finish."""
    checker = jsonschema.FormatChecker(["date", "ipv4", "uuid"])
    finished, refused = [], []

    @settings(
        max_examples=260,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(schemas(), st.integers(0, 2**32))
    def run(schema, seed):
        try:
            started = constraint(json_schema=copy.deepcopy(schema))
        except GrammarError as error:
            assert "Unsatisfiable" in str(error)
            refused.append(schema)
            return
        assert started.notes == ()
        text = sampled(started, np.random.default_rng(seed))
        if text is not None:
            finished.append(text)
            document = json.loads(text)
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(document)

    run()
    assert len(finished) >= 200
    assert len(refused) <= 30
    assert len(set(finished)) >= 100


def test_two_spellings_of_a_pattern_both_hold():
    schema = {
        "patternProperties": {"^a": {"type": "string"}, "^[a]": {"minLength": 3}},
        "additionalProperties": False,
    }
    texts = ['{"a":"xyz"}', '{"a":"x"}', '{"a":1}', '{"b":"xyz"}']
    assert [accepts(text, json_schema=schema) for text in texts] == [True, False, False, False]


@pytest.mark.parametrize("others", [False, {"type": "integer"}])
def test_other_names_are_open_where_a_pattern_was_left_out(others):
    schema = {
        "type": "object",
        "patternProperties": {"^foo\\b": {"type": "string"}},
        "additionalProperties": others,
        "required": ["foo"],
    }
    assert accepts('{"foo":"x"}', json_schema=schema)
    notes = constraint(json_schema=schema).notes
    assert any("additionalProperties: not enforced, as a pattern is not" in note for note in notes)
