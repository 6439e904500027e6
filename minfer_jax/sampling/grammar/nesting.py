"""How deep llguidance recurses in a schema: it follows each reference the first time it meets it.

It does so on the stack of the thread, which a chain of a thousand definitions overruns.
"""

from __future__ import annotations

from typing import Any

from minfer_jax.errors import GrammarError
from minfer_jax.sampling.grammar.finite import DEFINITIONS

MAX_LEVELS = 300
"""Schemas inside each other, references followed. A thread's stack of 8 MiB holds 1,400."""


def check_nesting(root: Any, definitions: dict[str, Any]) -> None:
    """GrammarError if the walk gets deeper than `MAX_LEVELS`."""
    seen: set[str] = set()
    pending: list[tuple[Any, int]] = [(root, 1)]
    while pending:
        schema, level = pending.pop()
        if level > MAX_LEVELS:
            raise GrammarError(
                f"the JSON schema nests more than {MAX_LEVELS} schemas, its references followed"
            )
        if isinstance(schema, str):
            if schema in seen:
                continue
            seen.add(schema)
            schema = definitions[schema]
        if not isinstance(schema, bool):
            pending += [(part, level + 1) for part in reversed(_parts(schema))]


def _parts(schema: dict[str, Any]) -> list[Any]:
    """Schemas directly in another one and names of definitions, in the order of the walk."""
    return [
        *schema.get("prefixItems", ()),
        *([schema["items"]] if "items" in schema else ()),
        *schema.get("properties", {}).values(),
        *schema.get("patternProperties", {}).values(),
        *([schema["additionalProperties"]] if "additionalProperties" in schema else ()),
        *([schema["$ref"].removeprefix(DEFINITIONS)] if "$ref" in schema else ()),
        *schema.get("oneOf", ()),
        *schema.get("anyOf", ()),
        *schema.get("allOf", ()),
    ]
