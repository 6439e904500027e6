"""`sampling.grammar.nesting`: how deep a walk along references gets."""

import pytest

from minfer_jax.errors import GrammarError
from minfer_jax.sampling.grammar.nesting import MAX_LEVELS, check_nesting


def chain(n, wrap):
    """`n` definitions, each referring to the next in the way that `wrap` puts it."""
    definitions = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(n - 1)}
    return {"$ref": "#/$defs/d0"}, {**definitions, f"d{n - 1}": True}


WRAPS = [
    lambda part: {"items": part},
    lambda part: {"additionalProperties": part},
    lambda part: {"properties": {"a": part}},
    lambda part: {"patternProperties": {"a": part}},
    lambda part: {"prefixItems": [part]},
    lambda part: {"allOf": [part]},
    lambda part: {"anyOf": [True, part]},
    lambda part: {"oneOf": [part, False]},
]


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_chain(wrap):
    """Two levels each: the definition, and the reference in it."""
    check_nesting(*chain(MAX_LEVELS // 2, wrap))
    for n in (MAX_LEVELS // 2 + 1, 50_000):
        with pytest.raises(GrammarError, match="nests more than 300 schemas"):
            check_nesting(*chain(n, wrap))


def test_a_definition_is_entered_once():
    definitions = {"d": {"items": {"$ref": "#/$defs/d"}}}
    check_nesting({"anyOf": [{"$ref": "#/$defs/d"}] * 1000}, definitions)


def test_many_definitions_beside_each_other():
    definitions = {f"d{i}": {"type": "string"} for i in range(5000)}
    check_nesting({"anyOf": [{"$ref": f"#/$defs/d{i}"} for i in range(5000)]}, definitions)


def test_the_first_way_to_a_definition_counts():
    """Properties are walked before additional ones: entered in its middle, a chain is halved."""
    start, definitions = chain(200, lambda part: {"items": part})
    middle = {"$ref": "#/$defs/d100"}
    check_nesting({"properties": {"a": middle}, "additionalProperties": start}, definitions)
    with pytest.raises(GrammarError):
        check_nesting({"properties": {"a": start}, "additionalProperties": middle}, definitions)
