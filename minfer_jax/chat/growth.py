"""How much memory an operation of a template would take, told before it is done.

Sizes are in characters and elements. Everything here is arithmetic on arguments; it must not know
jinja2. Estimates may be too high, never too low by more than a small factor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MAX_WIDTH = 10_000
"""The largest width, count or precision that a filter may be given."""

_SIZED = frozenset(
    {
        "batch",
        "center",
        "indent",
        "ljust",
        "rjust",
        "round",
        "slice",
        "tojson",
        "truncate",
        "wordwrap",
        "zfill",
    }
)
"""Filters and methods whose integers are sizes."""


class LimitError(Exception):
    """The template asks for more than it may have."""


class Refused(Exception):
    """The template called `raise_exception`."""


def weight(value: Any, limit: int) -> int:
    """Characters and elements in `value`, each as often as it would be printed.

    Stops soon after `limit`: a list that holds one list a million times is not walked through.
    """
    if isinstance(value, str):
        return len(value)
    total, stack = 0, [value]
    while stack and total <= limit:
        item = stack.pop()
        total += 1
        if isinstance(item, (str, bytes)):
            total += len(item)
        elif isinstance(item, Mapping):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack.extend(item)
    return total


def number_bits(operator: str, left: float, right: float) -> float:
    """The bits of the integer that `left operator right` would make; 0 for floats."""
    if isinstance(left, float) or isinstance(right, float):
        return 0
    bits = int(left).bit_length()
    if operator == "**":
        return bits * max(int(right), 0)
    return bits + int(right).bit_length()


def growth(
    name: str, subject: Any, args: Sequence[Any], kwargs: Mapping[str, Any], limit: int
) -> int:
    """The size of what `name` makes of `subject`; 0 where it cannot be larger than its input.

    `name` is an operator, a filter or a method of strings. Raises `LimitError` for a width that
    no template needs.
    """
    given = [*args, *kwargs.values()]
    if name in _SIZED:
        for value in given:
            if isinstance(value, int) and abs(value) > MAX_WIDTH:
                raise LimitError(f"{name}: {value} is larger than {MAX_WIDTH}")
    if name in ("%", "format", "format_map"):
        return _formatted(subject, given, limit) if isinstance(subject, str) else 0
    if name in ("+", "*"):
        return _operator(name, subject, given[0], limit)
    if name == "replace":
        return _replaced(str(subject), given)
    if name == "join":
        return _joined(subject, given, limit)
    if name == "indent":
        return _lines(subject) * _longest(given, default=4)
    if name == "wordwrap":
        return len(str(subject)) * (1 + _longest(given, default=1))
    return 0


def _operator(name: str, left: Any, right: Any, limit: int) -> int:
    if name == "+":
        return weight(left, limit) + weight(right, limit)
    if isinstance(left, int):
        left, right = right, left
    return weight(left, limit) * max(right, 0) if isinstance(right, int) else 0


def _formatted(form: str, given: Sequence[Any], limit: int) -> int:
    """An upper bound from the text alone: each field as wide as the widest thing there is."""
    # The grammar of widths is too rich to follow: no field may take its width from a value.
    if re.search(r"%[^a-zA-Z%]*\*|\{[^{}]*\{", form.replace("{{", "")):
        raise LimitError("a format may not compute a field's width")
    fields = re.findall(r"%[^a-zA-Z%]*|\{[^{}]*", form)
    widths = [int(digits[:9]) for field in fields for digits in re.findall(r"\d+", field)]
    return len(form) + sum(widths) + len(fields) * weight(list(given), limit)


def _replaced(text: str, given: Sequence[Any]) -> int:
    if len(given) < 2:
        return len(text)
    old, new = str(given[0]), str(given[1])
    return len(text) + text.count(old) * len(new)


def _joined(subject: Any, given: Sequence[Any], limit: int) -> int:
    # As a method it is called on the separator, as a filter on the items.
    items, separator = subject, _longest(given, default=0)
    if isinstance(subject, str) and given and not isinstance(given[0], str):
        items, separator = given[0], len(subject)
    count = len(items) if hasattr(items, "__len__") else 0
    return weight(items, limit) + count * separator


def _lines(subject: Any) -> int:
    return str(subject).count("\n") + 1


def _longest(given: Sequence[Any], *, default: int) -> int:
    """The largest of the integers and of the texts' lengths."""
    sizes = [value if isinstance(value, int) else len(str(value)) for value in given]
    return max([default, *sizes])
