"""`sampling.grammar.finite`: which definitions have a document that ends, and what is cut off."""

import pytest

from minfer_jax.sampling.grammar.finite import finite_definitions, is_finite, pruned


def ref(name):
    return {"$ref": f"#/$defs/{name}"}


def requiring(name, kind="object"):
    return {"type": kind, "properties": {"x": ref(name)}, "required": ["x"]}


DEFINITIONS = {
    "leaf": {"type": "string"},
    "chain": ref("link"),
    "link": ref("leaf"),
    "a": ref("b"),
    "b": ref("a"),
    "self": {"allOf": [{"type": "object"}, ref("self")]},
    "endless": requiring("endless"),
    "list": {"anyOf": [{"type": "null"}, requiring("list")]},
    "optional": {"type": "object", "properties": {"x": ref("optional")}},
    "others": {"type": "object", "additionalProperties": ref("others"), "required": ["y"]},
    "patterns": {
        "type": "object",
        "patternProperties": {"^y": True},
        "additionalProperties": False,
        "required": ["y"],
    },
    "tree": {"type": "array", "items": ref("tree")},
    "full": {"type": "array", "items": ref("full"), "minItems": 1},
    "first": {"type": "array", "prefixItems": [ref("first")], "minItems": 1},
    "later": {"type": "array", "prefixItems": [True, ref("later")], "minItems": 1},
    "untyped": {"properties": {"x": ref("untyped")}, "required": ["x"]},
    "none": {"enum": []},
    "some": {"oneOf": [{"enum": []}, {"const": 1}]},
    "false": False,
    "true": True,
}
FINITE = {
    *("leaf", "chain", "link", "list", "optional", "patterns", "tree", "later", "untyped", "some"),
    "true",
}


def test_least_fixed_point():
    assert finite_definitions(DEFINITIONS) == FINITE
    backwards = dict(reversed(DEFINITIONS.items()))
    assert finite_definitions(backwards) == FINITE


def test_a_long_chain_takes_no_recursion():
    chain = {f"d{i}": ref(f"d{i + 1}") for i in range(20_000)} | {"d20000": True}
    assert len(finite_definitions(chain)) == 20_001


@pytest.mark.parametrize("name", sorted(DEFINITIONS.keys() - FINITE))
def test_branches_are_cut(name):
    cut = ref(name)
    assert not is_finite(cut, FINITE)
    assert pruned(cut, FINITE) is False
    assert pruned({"anyOf": [cut, True]}, FINITE) == {"anyOf": [False, True]}
    assert pruned({"type": "array", "items": cut}, FINITE) == {"type": "array", "items": False}
    kept = {"type": "object", "properties": {"y": True}, "patternProperties": {"^z": ref("leaf")}}
    schema = {**kept, "properties": {"y": True, "x": cut}, "additionalProperties": cut}
    assert pruned(schema, FINITE) == {
        **kept,
        "properties": {"y": True, "x": False},
        "additionalProperties": False,
    }


def test_types_without_an_end_are_left_out():
    assert pruned(DEFINITIONS["untyped"], {"leaf"})["type"] == [
        *("null", "boolean", "number", "string", "array")
    ]
    both = {**requiring("endless"), "type": ["object", "integer"]}
    assert pruned(both, FINITE)["type"] == ["integer"]
    assert "type" not in pruned({"minLength": 1}, FINITE)
    constant = {"const": {"x": 1}, "properties": {"x": ref("endless")}, "required": ["x"]}
    assert "type" not in pruned(constant, FINITE)
