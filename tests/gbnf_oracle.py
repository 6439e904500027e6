"""What a GBNF grammar accepts, character by character: an Earley recognizer over nested tuples.

A part is `("text", "ab")`, `("chars", "abc")`, `("rule", name)`, `("seq", [part, ...])`,
`("or", [part, ...])` or `("times", part, low, high or None)`. Nothing of the product is used.
"""

from __future__ import annotations

from typing import Any

Part = tuple[Any, ...]
Symbol = str | frozenset
Item = tuple[str, tuple[Symbol, ...], int, int]
"""A rule, one of its alternatives, how much of it is read, and where it began."""
Rows = list[set[Item]]


def gbnf_of(rules: dict[str, Part]) -> str:
    """The rules as GBNF."""
    return "\n".join(f"{name} ::= {_written(part)}" for name, part in rules.items())


def _written(part: Part) -> str:
    match part:
        case ("text", text):
            return f'"{text}"'
        case ("chars", chars):
            return f"[{chars}]"
        case ("rule", name):
            return name
        case ("seq", parts):
            return f"({' '.join(map(_written, parts))})"
        case ("or", parts):
            return f"({' | '.join(map(_written, parts))})"
        case (_, item, low, high):
            simple = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high))
            return _written(item) + (simple or f"{{{low},{'' if high is None else high}}}")
    raise AssertionError(part)


class Oracle:
    """`start`, then `read` a character at a time; None once no text begins so."""

    def __init__(self, rules: dict[str, Part]) -> None:
        self._alternatives: dict[str, list[tuple[Symbol, ...]]] = {}
        for name, part in rules.items():
            self._alternatives[name] = [(self._symbol(part),)]

    def matches_something(self) -> bool:
        """Whether the root, and all that it leads to, has a text."""
        good: set[Symbol] = set()
        while True:
            more: set[Symbol] = {
                name
                for name, alternatives in self._alternatives.items()
                if any(
                    all(isinstance(s, frozenset) or s in good for s in one) for one in alternatives
                )
            }
            if more == good:
                return self._reached() <= good
            good = more

    def start(self) -> Rows:
        return self._complete([{("", ("root",), 0, 0)}])

    def read(self, rows: Rows | None, text: str) -> Rows | None:
        for char in text:
            if rows is None:
                return None
            row = {
                (name, one, at + 1, began)
                for name, one, at, began in rows[-1]
                if at < len(one) and isinstance(one[at], frozenset) and char in one[at]
            }
            rows = self._complete([*rows, row]) if row else None
        return rows

    @staticmethod
    def accepts(rows: Rows | None) -> bool:
        return rows is not None and ("", ("root",), 1, 0) in rows[-1]

    def _reached(self) -> set[Symbol]:
        seen: set[Symbol] = set()
        waiting: list[Symbol] = ["root"]
        while waiting:
            symbol = waiting.pop()
            if isinstance(symbol, str) and symbol not in seen:
                seen.add(symbol)
                waiting.extend(s for one in self._alternatives[symbol] for s in one)
        return seen

    def _new(self, *alternatives: tuple[Symbol, ...]) -> str:
        name = f"#{len(self._alternatives)}"
        self._alternatives[name] = list(alternatives)
        return name

    def _symbol(self, part: Part) -> Symbol:
        match part:
            case ("text", text):
                return self._new(tuple(frozenset(char) for char in text))
            case ("chars", chars):
                return frozenset(chars)
            case ("rule", name):
                return name
            case ("seq", parts):
                return self._new(tuple(map(self._symbol, parts)))
            case ("or", parts):
                return self._new(*((self._symbol(one),) for one in parts))
            case (_, item, low, None):
                symbol = self._symbol(item)
                rest = self._new()
                self._alternatives[rest] = [(), (symbol, rest)]
                return self._new((symbol,) * low + (rest,))
            case (_, item, low, high):
                symbol = self._symbol(item)
                return self._new(*((symbol,) * n for n in range(low, high + 1)))
        raise AssertionError(part)

    def _complete(self, rows: Rows) -> Rows:
        """Predict and complete in the last row until nothing is new, empty texts included."""
        row = rows[-1]
        while True:
            new: set[Item] = set()
            for name, one, at, began in row:
                if at == len(one):
                    new |= {
                        (n, o, a + 1, b)
                        for n, o, a, b in rows[began]
                        if a < len(o) and o[a] == name
                    }
                elif isinstance(symbol := one[at], str):
                    new |= {(symbol, o, 0, len(rows) - 1) for o in self._alternatives[symbol]}
            if new <= row:
                return rows
            row |= new
