"""Random JSON schemas of everything that is enforced, each with documents that match it."""

from typing import Any

from hypothesis import strategies as st

NAMES = ("a", "b", "ab", "x", "name", "é", 'q"', "n\n")
PATTERNS = (r"^\d+$", r"^a\/b$", r"^[\w-]+$", "b|^c", r"^(x|yz){1,3}$", "[a-f]$", r"^\S{2,4}$")
FORMATS = ("date", "ipv4", "uuid", "time")


def _ordered(low: Any, high: Any, below: str, above: str) -> st.SearchStrategy[dict[str, Any]]:
    """None, one or both of two bounds in the right order."""
    both = st.tuples(st.integers(low, high), st.integers(low, high)).map(sorted)
    return st.builds(
        lambda pair, lower, upper: (
            ({below: pair[0]} if lower else {}) | ({above: pair[1]} if upper else {})
        ),
        both,
        st.booleans(),
        st.booleans(),
    )


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.sampled_from(["", "a", 'q"\n', "é/😀"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner),
    max_leaves=3,
)
_INTEGERS = st.builds(
    lambda bounds, multiple: {"type": "integer", **bounds, **multiple},
    _ordered(-150, 150, "minimum", "maximum")
    | _ordered(-150, 150, "minimum", "maximum").map(
        lambda bounds: {
            f"exclusive{key.capitalize()}": value + (3 if key == "maximum" else -3)
            for key, value in bounds.items()
        }
    ),
    st.just({}) | st.sampled_from([{"multipleOf": 1}, {"multipleOf": 2}]),
)
_NUMBERS = st.builds(
    lambda bounds: {"type": "number", **{k: v / 8 for k, v in bounds.items()}},
    _ordered(-150, 150, "minimum", "maximum"),
)
_STRINGS = (
    _ordered(0, 6, "minLength", "maxLength").map(lambda bounds: {"type": "string", **bounds})
    | st.sampled_from(PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern})
    | st.sampled_from(FORMATS).map(lambda name: {"type": "string", "format": name})
)
_LEAVES = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": ["null", "integer"]}]),
    _VALUES.map(lambda value: {"const": value}),
    st.lists(_VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    _INTEGERS,
    _NUMBERS,
    _STRINGS,
)


def _arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda items, prefix, bounds: {
            "type": "array",
            "items": items,
            **({"prefixItems": prefix} if prefix else {}),
            **bounds,
        },
        inner,
        st.lists(inner, max_size=2),
        _ordered(0, 3, "minItems", "maxItems"),
    )


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=3))
    out: dict[str, Any] = {"type": "object", "properties": {n: draw(inner) for n in names}}
    out["required"] = [name for name in names if draw(st.booleans())]
    if draw(st.integers(0, 3)) == 0:
        out["required"].append("more")
    if draw(st.integers(0, 3)) == 0:
        out["patternProperties"] = {"^x": draw(inner)}
    if draw(st.booleans()):
        out["additionalProperties"] = draw(st.just(False) | inner)
        if out["additionalProperties"] is False and "more" in out["required"]:
            out["required"].remove("more")
    if not names and draw(st.booleans()):
        out |= draw(_ordered(0, 1, "minProperties", "maxProperties"))
    return out


def _joined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    options = st.lists(inner, min_size=1, max_size=3)
    mixed = st.tuples(_INTEGERS, _STRINGS, _objects(inner)).map(list)
    parts = st.tuples(_objects(st.just(True)), st.just({"required": ["a"]})).map(list)
    return st.one_of(
        options.map(lambda schemas: {"anyOf": schemas}),
        mixed.map(lambda schemas: {"oneOf": schemas}),
        parts.map(lambda schemas: {"allOf": schemas}),
        inner.map(lambda schema: {"$ref": "#/$defs/d", "$defs": {"d": schema}}),
    )


def _rooted(schema: dict[str, Any]) -> dict[str, Any]:
    """Definitions and a recursive one at the root, whatever refers to them."""
    node = {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/list"}},
        "required": ["v", "next"],
        "additionalProperties": False,
    }
    found: dict[str, Any] = {"list": {"anyOf": [{"type": "null"}, node]}}
    pending: list[Any] = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict) and isinstance(part.get("$defs"), dict):
            name = f"d{len(found)}"
            found[name] = part.pop("$defs")["d"]
            part["$ref"] = f"#/$defs/{name}"
            pending.append(found[name])
        pending += part.values() if isinstance(part, dict) else part if type(part) is list else ()
    return {**schema, "$defs": found}


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """JSON schemas of draft 2020-12."""
    leaves = _LEAVES | st.just(True) | st.just({"$ref": "#/$defs/list"})
    inner = st.recursive(
        leaves, lambda part: _arrays(part) | _objects(part) | _joined(part), max_leaves=5
    )
    return st.one_of(_arrays(inner), _objects(inner), _joined(inner), _LEAVES).map(_rooted)
