"""What a GBNF grammar is made of: a table of nodes, and the rules that name some of them.

A node's children are ids in the table and always smaller than its own, so that one loop in order
sees children before parents, and nothing has to recurse: nesting costs heap, not stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

MAX_COUNT = 1_000_000
"""Highest count of a repetition; an upper bound above it is none, as no text is as long."""
LAST_CHAR = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
ROOT = "root"


@dataclass(frozen=True)
class Chars:
    """One character of `ranges`: inclusive, sorted, apart, without surrogates, never empty."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Token:
    """One token of the vocabulary, or any other one."""

    id: int
    negated: bool


@dataclass(frozen=True)
class Ref:
    """Another rule's body."""

    name: str


@dataclass(frozen=True)
class Seq:
    """One after another; without items the empty text."""

    items: tuple[int, ...]


@dataclass(frozen=True)
class Alt:
    """Any one of two or more."""

    items: tuple[int, ...]


@dataclass(frozen=True)
class Repeat:
    """`item` at least `low` and at most `high` times (None: no end)."""

    item: int
    low: int
    high: int | None


Node = Chars | Token | Ref | Seq | Alt | Repeat


def char_ranges(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sorted and joined, surrogates left out: those are no characters."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(_without_surrogates(ranges)):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return tuple(joined)


def _without_surrogates(ranges: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    first, last = SURROGATES
    for low, high in ranges:
        for start, end in ((low, min(high, first - 1)), (max(low, last + 1), high)):
            if start <= end:
                yield start, end


def complement(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """All characters but those of `ranges`."""
    rest, start = [], 0
    for low, high in char_ranges(ranges):
        rest.append((start, low - 1))
        start = high + 1
    return [(low, high) for low, high in [*rest, (start, LAST_CHAR)] if low <= high]


class Nodes:
    """A growing table of nodes; equal nodes have one id.

    `seq`, `alt` and `repeat` choose the simplest node with the same language.
    """

    def __init__(self) -> None:
        self.all: list[Node] = []
        self._ids: dict[Node, int] = {}

    def __getitem__(self, node: int) -> Node:
        return self.all[node]

    def add(self, node: Node) -> int:
        """The id of `node`, which is new or known."""
        found = self._ids.setdefault(node, len(self.all))
        if found == len(self.all):
            self.all.append(node)
        return found

    def seq(self, items: Iterable[int]) -> int:
        """One after another; empty ones vanish."""
        kept = tuple(item for item in items if self.all[item] != Seq(()))
        return kept[0] if len(kept) == 1 else self.add(Seq(kept))

    def alt(self, items: Iterable[int]) -> int:
        """Any of `items`; those of one character become one class."""
        kept: dict[int, None] = {}
        ranges: list[tuple[int, int]] = []
        for item in items:
            node = self.all[item]
            if isinstance(node, Chars):
                ranges.extend(node.ranges)
            else:
                kept[item] = None
        if ranges:
            kept[self.add(Chars(char_ranges(ranges)))] = None
        return next(iter(kept)) if len(kept) == 1 else self.add(Alt(tuple(kept)))

    def repeat(self, item: int, low: int, high: int | None) -> int:
        """`item` repeated; a repetition of a repetition is one where no count is left out."""
        node = self.all[item]
        if high == 0 or node == Seq(()):
            return self.add(Seq(()))
        if (low, high) == (1, 1):
            return item
        if isinstance(node, Repeat) and _without_gap(node, low, high):
            most = None if high is None or node.high is None else high * node.high
            if most is None or most <= MAX_COUNT:
                return self.add(Repeat(node.item, low * node.low, most))
        return self.add(Repeat(item, low, high))

    def children(self, node: int) -> tuple[int, ...]:
        """Ids of the nodes that `node` is made of; a reference has none."""
        found = self.all[node]
        if isinstance(found, Seq | Alt):
            return found.items
        return (found.item,) if isinstance(found, Repeat) else ()


def _without_gap(inner: Repeat, low: int, high: int | None) -> bool:
    """Whether `inner` repeated `low`, `low + 1`, ... `high` times has every count between."""
    if inner.low <= 1 or low == high:
        return True
    return low > 0 and (inner.high is None or low * (inner.high - inner.low) >= inner.low - 1)


@dataclass(frozen=True)
class Grammar:
    """Rules by name, each the id of its body; every reference that the root reaches has a rule."""

    nodes: Nodes
    rules: dict[str, int]

    def needs(self, node: int) -> tuple[int, ...]:
        """The children of a node; a reference's is the body of its rule."""
        found = self.nodes[node]
        return (self.rules[found.name],) if isinstance(found, Ref) else self.nodes.children(node)

    def reached(self) -> set[int]:
        """All nodes that the root leads to."""
        return closure([self.rules[ROOT]], self.needs)


def closure(start: Iterable[int], after: Callable[[int], Iterable[int]]) -> set[int]:
    """`start` and all that comes after it."""
    seen: set[int] = set()
    waiting = list(start)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(after(node))
    return seen
