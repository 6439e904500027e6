"""JSON documents from outside, read and written with a bound on their depth.

Python's own reader and writer recurse, so that a deep document would end in a `RecursionError`.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from minfer_jax.errors import GrammarError

MAX_DEPTH = 100
"""Brackets inside each other; llguidance's own reader stops at 128."""

_MAX_WIDTH = 1 << 18
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[{]|[\]}]', re.DOTALL)


def read_json(text: str) -> Any:
    """The document in `text`. GrammarError names the place of a mistake."""
    depth = 0
    for found in _BRACKET.finditer(text):
        mark = found[0]
        depth += (mark in "[{") - (mark in "]}")
        if depth > MAX_DEPTH:
            raise GrammarError(_too_deep())
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise GrammarError(
            f"the JSON schema is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except ValueError as error:  # a number of thousands of digits
        raise GrammarError(f"the JSON schema is not JSON: {error}") from None


def json_text(document: Any) -> str:
    """A parsed document as text. GrammarError for what JSON cannot hold, or is too deep."""
    level, depth = [document], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH + 1:
            raise GrammarError(_too_deep())
        if len(level) > _MAX_WIDTH:
            raise GrammarError(f"the JSON schema has more than {_MAX_WIDTH} values")
        level = [
            child
            for value in level
            if isinstance(value, dict | list | tuple)
            for child in (value.values() if isinstance(value, dict) else value)
        ]
    try:
        return json.dumps(document, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise GrammarError(f"the JSON schema is not JSON: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise GrammarError(f"the JSON schema is not JSON: {name} is no JSON value")


def _too_deep() -> str:
    return f"the JSON schema is nested more than {MAX_DEPTH} levels deep"
