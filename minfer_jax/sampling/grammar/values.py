"""Numbers, counts and constants of a JSON schema, checked for what llguidance makes of them."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

from minfer_jax.errors import GrammarError

MAX_BOUND = 1 << 62
"""Above it llguidance's integers end."""
_EXACT = 1 << 53
"""Up to it every integer is a float64, which bounds and constants become."""
_SHOWN = 60


class Place(NamedTuple):
    """Where a value stands, and the resource that a `#` in it means."""

    path: str
    resource: dict[str, Any]

    def at(self, key: object) -> Place:
        """A place below."""
        return self._replace(path=f"{self.path}/{str(key).replace('~', '~0').replace('/', '~1')}")

    @property
    def keyword(self) -> str:
        """The last part of the path, which is a keyword of JSON Schema."""
        return self.path.rsplit("/", 1)[1]


def unspellable(value: Any) -> str:
    """Why a constant cannot be enforced exactly; empty if it can."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict | list):
            pending += [*item, *item.values()] if isinstance(item, dict) else item
        elif isinstance(item, str) and any(_is_control(char) for char in item):
            return f"{shown(item)} holds a control character without a short escape"
        elif isinstance(item, float) and not math.isfinite(item):
            return "a number beyond float64"
        elif isinstance(item, int) and (abs(item) > MAX_BOUND or float(item) != item):
            return f"the integer {shown(item)} is beyond 2**53 and no float64, or beyond 2**62"
    return ""


def _is_control(char: str) -> bool:
    return (char < " " and char not in "\n\r\b\t\f") or char == "\x7f"


def number(value: Any, place: Place) -> int | float:
    """A finite number, and no boolean; GrammarError for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool) and not _is_infinite(value):
        return value
    raise wrong(place, "a number", value)


def _is_infinite(value: int | float) -> bool:
    """As 1e999 is, once it is read; a large integer is not, though no float64 holds it."""
    return isinstance(value, float) and math.isinf(value)


def not_above(bound: int | float) -> int | float:
    """`bound`, or something below it where llguidance would allow more than `bound` does.

    It takes bounds as float64 and writes them in their shortest digits: up to 15 always survive.
    """
    if abs(bound) <= _EXACT:
        return bound
    unit = 10 ** (len(str(abs(int(bound)))) - 15)
    rounded = int(bound) // unit * unit
    return rounded if int(float(rounded)) <= bound else rounded - unit


def count_of(value: Any, place: Place) -> int:
    """A count, which may be written 2.0; GrammarError for anything else."""
    count = number(value, place)
    if count < 0 or count != int(count):
        raise wrong(place, "an integer from 0 on", value)
    return int(count)


def wrong(place: Place, wanted: str, value: Any) -> GrammarError:
    """The refusal of a keyword's value."""
    return GrammarError(f"JSON schema, {place.path}: must be {wanted}, not {shown(value)}")


def shown(value: Any) -> str:
    """A value as a message shows it."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def kind_of(value: Any) -> str:
    """What a value is, if it is neither an object nor a boolean."""
    return {list: "a list", str: "a text", type(None): "null"}.get(type(value), "a number")
