"""`sampling.grammar.values`: numbers, counts and constants."""

import json
import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minfer_jax.errors import GrammarError
from minfer_jax.sampling.grammar.values import (
    MAX_BOUND,
    Place,
    count_of,
    kind_of,
    not_above,
    number,
    shown,
    unspellable,
)

HERE = Place("#/a", {})


def test_places():
    assert HERE.at("x/y~z").path == "#/a/x~1y~0z"
    assert HERE.at(3) == Place("#/a/3", {})
    assert HERE.at("minimum").keyword == "minimum"


@pytest.mark.parametrize("value", [0, -1, 1.5, 10**400, -0.0, 1e308])
def test_numbers(value):
    assert number(value, HERE) == value


@pytest.mark.parametrize("value", [True, False, None, "1", [], {}, math.inf, -math.inf])
def test_what_is_no_number(value):
    with pytest.raises(GrammarError, match=r"^JSON schema, #/a: must be a number, not ."):
        number(value, HERE)


@pytest.mark.parametrize(("value", "count"), [(0, 0), (7, 7), (2.0, 2), (2**64, 2**64)])
def test_counts(value, count):
    assert (found := count_of(value, HERE)) == count
    assert type(found) is int


@pytest.mark.parametrize("value", [-1, 0.5, -2.0])
def test_what_is_no_count(value):
    with pytest.raises(GrammarError, match="an integer from 0 on"):
        count_of(value, HERE)


@pytest.mark.parametrize(
    ("bound", "below"),
    [
        (0, 0),
        (-1.5, -1.5),
        (2**53, 2**53),
        (-(2**53), -(2**53)),
        (2**53 + 1, 9007199254740990),
        (-(2**53) - 1, -9007199254741000),
        (MAX_BOUND, 4611686018427380000),
        (10**17, 10**17),
    ],
)
def test_bounds(bound, below):
    assert not_above(bound) == below


@given(st.integers(-MAX_BOUND, MAX_BOUND))
def test_a_bound_is_never_passed(bound):
    """Neither as a float64 nor in the shortest digits of one; and little below it is lost."""
    found = not_above(bound)
    assert found <= bound
    assert int(float(found)) <= bound
    assert Decimal(repr(float(found))) <= bound
    assert bound - found <= abs(bound) * 2e-14


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -1, 1.5, 2**53, 2**60, "é😀\n\t\b\f\r", ["a", {"b": [{}]}], {"n\n": 1}],
)
def test_constants(value):
    assert unspellable(value) == ""


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("a\x00", "holds a control character"),
        ("\x7f", "holds a control character"),
        ([{"\x1f": 1}], "holds a control character"),
        ([[2**53 + 1]], "the integer 9007199254740993 is beyond"),
        ({"a": 2**63}, "is beyond 2"),
        (math.inf, "beyond float64"),
    ],
)
def test_constants_without_a_spelling(value, why):
    assert why in unspellable(value)


def test_values_in_messages():
    assert shown({"a": "é"}) == json.dumps({"a": "é"})
    assert shown("x" * 80) == '"' + "x" * 56 + "..."
    kinds = {kind_of(value) for value in ([], "a", None, 1, 1.5)}
    assert kinds == {"a list", "a text", "null", "a number"}
