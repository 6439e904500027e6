"""Branches of a JSON schema that no document can ever finish, such as `a -> b -> a`.

A parser would follow them for ever: the grammar allows each next token and never an end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

DEFINITIONS = "#/$defs/"
"""What a reference begins with; the name of a definition follows."""

_SCHEMAS = ("items", "additionalProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties")
_KINDS = ("null", "boolean", "number", "string", "array", "object")


def finite_definitions(definitions: dict[str, Any]) -> set[str]:
    """The names of definitions that have a finite document.

    A least fixed point: a definition is looked at again
    whenever one that it refers to turns out to be finite.
    """
    users: dict[str, list[str]] = defaultdict(list)
    for name, schema in definitions.items():
        for target in _targets(schema):
            users[target].append(name)
    finite: set[str] = set()
    pending = list(definitions)
    while pending:
        name = pending.pop()
        if name not in finite and is_finite(definitions[name], finite):
            finite.add(name)
            pending += users[name]
    return finite


def is_finite(schema: Any, finite: set[str]) -> bool:
    """Whether a document can match `schema`, if only definitions of `finite` have one."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and schema["$ref"].removeprefix(DEFINITIONS) not in finite:
        return False
    if "enum" in schema and not schema["enum"]:
        return False
    if not all(is_finite(part, finite) for part in schema.get("allOf", ())):
        return False
    for key in ("anyOf", "oneOf"):
        if key in schema and not any(is_finite(part, finite) for part in schema[key]):
            return False
    if "const" in schema or "enum" in schema:
        return True
    return bool(_finite_types(schema, finite))


def _finite_types(schema: dict[str, Any], finite: set[str]) -> list[str]:
    kinds = schema.get("type", _KINDS)
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return [kind for kind in kinds if _type_is_finite(kind, schema, finite)]


def _type_is_finite(kind: str, schema: dict[str, Any], finite: set[str]) -> bool:
    if kind == "object":
        properties = schema.get("properties", {})
        others = schema.get("additionalProperties", True)
        if schema.get("patternProperties"):
            others = True  # which of them a name matches is not looked at
        return all(
            is_finite(properties.get(name, others), finite) for name in schema.get("required", ())
        )
    if kind == "array":
        first = schema.get("prefixItems", [])
        least = schema.get("minItems", 0)
        if least > len(first) and not is_finite(schema.get("items", True), finite):
            return False
        return all(is_finite(item, finite) for item in first[:least])
    return True


def pruned(schema: Any, finite: set[str]) -> Any:
    """`schema` with `false` for each part that has no finite document."""
    if isinstance(schema, bool) or not is_finite(schema, finite):
        return schema is True
    out = dict(schema)
    if "const" not in out and "enum" not in out:
        kinds = _finite_types(schema, finite)
        if len(kinds) < len(_KINDS) and not isinstance(out.get("type"), str):
            out["type"] = kinds
    for key in _SCHEMAS:
        if key in out:
            out[key] = pruned(out[key], finite)
    for key in _LISTS:
        if key in out:
            out[key] = [pruned(part, finite) for part in out[key]]
    for key in _MAPS:
        if key in out:
            out[key] = {name: pruned(part, finite) for name, part in out[key].items()}
    return out


def _targets(schema: Any) -> Iterator[str]:
    """The definitions that `schema` refers to, anywhere in it."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, bool):
            continue
        if "$ref" in part:
            yield part["$ref"].removeprefix(DEFINITIONS)
        pending += [part[key] for key in _SCHEMAS if key in part]
        pending += [item for key in _LISTS for item in part.get(key, ())]
        pending += [item for key in _MAPS for item in part.get(key, {}).values()]
