"""What a request asks its output to look like, before any vocabulary is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from minfer_jax.errors import GrammarError
from minfer_jax.sampling.grammar.documents import json_text

Kind = Literal["gbnf", "lark", "regex", "json_schema", "json_object"]

_MAX_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class GrammarSpec:
    """A grammar as it was written; equal texts of one kind are the same grammar."""

    kind: Kind
    text: str


def grammar_spec(
    *,
    grammar: str | None = None,
    json_schema: Any = None,
    json_object: bool = False,
    regex: str | None = None,
    lark: str | None = None,
) -> GrammarSpec | None:
    """The one grammar that is asked for; None if none is.

    `grammar`: GBNF. `json_schema`: its text, or the parsed document (a dict, or a bool).
    `json_object`: any JSON object. `regex`: what the whole output matches. GrammarError if there is
    more than one, or for one that is too large or not a text; its content is not looked at yet.
    """
    asked: dict[str, tuple[Kind, Any]] = {
        "grammar": ("gbnf", grammar),
        "json_schema": ("json_schema", json_schema),
        "json_object": ("json_object", json_object or None),
        "regex": ("regex", regex),
        "lark": ("lark", lark),
    }
    given = {name: pair for name, pair in asked.items() if pair[1] is not None}
    if not given:
        return None
    if len(given) > 1:
        raise GrammarError(f"{' and '.join(given)} exclude each other: give one of them")
    ((name, (kind, value)),) = given.items()
    if kind == "json_object":
        return GrammarSpec(kind, "")
    if kind == "json_schema" and isinstance(value, dict | bool):
        value = json_text(value)
    return GrammarSpec(kind, _checked(name, value))


def _checked(name: str, text: Any) -> str:
    if not isinstance(text, str):
        raise GrammarError(f"{name} must be a text, not {type(text).__name__}")
    if len(text) > _MAX_CHARACTERS:
        raise GrammarError(f"{name} has {len(text)} characters; allowed: {_MAX_CHARACTERS}")
    if not (text if name == "regex" else text.strip()):
        raise GrammarError(f"{name} is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise GrammarError(
            f"{name} holds a lone surrogate at character {error.start}, which is no Unicode text"
        ) from None
    return text
