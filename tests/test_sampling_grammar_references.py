"""`sampling.grammar.references`: pointers, anchors and identifiers of one document."""

import pytest
from byte_vocabulary import constraint

from minfer_jax.errors import GrammarError
from minfer_jax.sampling.grammar.references import References

INNER = {"$id": "inner.json", "$defs": {"c": {"const": 3}}, "items": {"$anchor": "here"}}
ROOT = {
    "$id": "https://example.org/a/root.json",
    "$defs": {
        "x/y~z": {"const": 1},
        "~1": {"const": 7},
        "a b": {"const": 2},
        "inner": INNER,
        "anchored": {"$anchor": "here", "const": 4},
        "list": {"anyOf": [{"const": 5}, {"const": 6}]},
    },
}


def resolve(reference, resource=ROOT):
    return References(ROOT).resolve(reference, resource)


@pytest.mark.parametrize(
    ("reference", "target"),
    [
        ("#", ROOT),
        ("", ROOT),
        ("#/$defs/x~1y~0z", ROOT["$defs"]["x/y~z"]),
        ("#/$defs/~01", {"const": 7}),
        ("#/$defs/a%20b", ROOT["$defs"]["a b"]),
        ("#/$defs/list/anyOf/1", {"const": 6}),
        ("#here", ROOT["$defs"]["anchored"]),
        ("inner.json", INNER),
        ("https://example.org/a/inner.json#/$defs/c", {"const": 3}),
        ("inner.json#here", INNER["items"]),
        ("root.json#/$defs/inner/$defs/c", {"const": 3}),
    ],
)
def test_targets(reference, target):
    assert resolve(reference).schema == target


def test_a_number_sign_means_the_nearest_identified_schema():
    assert resolve("#/$defs/c", INNER).schema == {"const": 3}
    assert resolve("#here", INNER).schema is INNER["items"]
    assert resolve("inner.json#/$defs/c").resource is INNER
    assert resolve("#/$defs/inner/$defs/c").resource is INNER
    assert resolve("#/$defs/list").resource is ROOT


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("#/$defs/none", r"'#/\$defs/none' points to nothing: there is no 'none'"),
        ("#/$defs/list/anyOf/2", "there is no '2'"),
        ("#/$defs/list/anyOf/-1", "there is no '-1'"),
        ("#/$defs/list/anyOf/x", "there is no 'x'"),
        ("#/$id/0", "there is no '0'"),
        ("#none", r"names an \$anchor that does not exist"),
        ("http://example.com/schema.json", "nothing is fetched"),
        ("other.json#/a", "points outside the schema"),
        ("file:///etc/passwd", "nothing is fetched"),
    ],
)
def test_targets_that_are_not_there(reference, message):
    with pytest.raises(GrammarError, match=message):
        resolve(reference)


def test_without_an_identifier():
    root = {"$defs": {"a": {"$id": "#old"}}}
    assert References(root).resolve("#/$defs/a", root) == ({"$id": "#old"}, root)
    with pytest.raises(GrammarError, match="points outside"):
        References(root).resolve("a.json", root)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "http://[x#y"},
        {"$id": "http://[x#"},
        {"$id": "http://a/b", "$ref": "//["},
        {"prefixItems": [{}], "$ref": "#/prefixItems/" + "1" * 5000},
        {"prefixItems": [{}, {}], "$ref": "#/prefixItems/\u0661"},
    ],
)
def test_what_is_no_uri_and_no_index_is_refused_in_a_line(schema):
    with pytest.raises(GrammarError) as error:
        constraint(json_schema=schema)
    assert "\n" not in str(error.value)
