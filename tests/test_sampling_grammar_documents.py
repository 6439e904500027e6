"""`sampling.grammar.documents`: JSON with a bound on its depth."""

import pytest

from minfer_jax.errors import GrammarError
from minfer_jax.sampling.grammar.documents import MAX_DEPTH, json_text, read_json


def test_a_document():
    assert read_json(' {"a[{": ["\\"[", 1.5, null]} ') == {"a[{": ['"[', 1.5, None]}
    assert read_json(json_text({"é": [True, {}]})) == {"é": [True, {}]}


@pytest.mark.parametrize("opening, closing", [("[", "]"), ('{"a":', "}")])
def test_depth(opening, closing):
    read_json(opening * MAX_DEPTH + "1" + closing * MAX_DEPTH)
    for depth in (MAX_DEPTH + 1, 2_000, 60_000):
        with pytest.raises(GrammarError, match="more than 100 levels deep"):
            read_json(opening * depth + "1" + closing * depth)


def test_brackets_in_a_text_are_not_depth():
    assert len(read_json('["' + "[" * 500 + '\\"' + "[" * 500 + '"]')[0]) == 1001


def test_a_deep_or_endless_object():
    deep: dict = {}
    for _ in range(MAX_DEPTH - 1):
        deep = {"a": deep}
    assert read_json(json_text(deep)) == deep
    endless: dict = {}
    endless["a"] = [endless]
    for document in ({"a": {"a": deep}}, endless):
        with pytest.raises(GrammarError, match="more than 100 levels deep"):
            json_text(document)


def test_an_object_that_repeats_itself_is_not_written_out():
    shared: list = []
    for _ in range(60):
        shared = [shared, shared]
    with pytest.raises(GrammarError, match="more than 262144 values"):
        json_text(shared)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a":\n 1,}', r"line 2, column \d+$"),
        ("[NaN]", "NaN is no JSON value"),
        ("[-Infinity]", "-Infinity is no JSON value"),
        ("]" * 9, "is not JSON"),
        ("1" * 5000, "is not JSON"),
    ],
)
def test_what_is_not_json(text, message):
    with pytest.raises(GrammarError, match=message) as error:
        read_json(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("document", [{"a": {1, 2}}, [float("nan")], [float("inf")], {(1,): 2}])
def test_what_json_cannot_hold(document):
    with pytest.raises(GrammarError, match="is not JSON"):
        json_text(document)
