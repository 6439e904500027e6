"""Automata of the lexemes of a GBNF grammar, and what two lexemes have to do with each other.

Knows nodes and characters; which lexemes meet each other, and what follows from it, is decided in
`gbnf_lexemes`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from minfer_jax.sampling.grammar.gbnf_nodes import (
    LAST_CHAR,
    Alt,
    Chars,
    Grammar,
    Node,
    Ref,
    Repeat,
    Token,
    closure,
)

_NO_LEADS = (1 << 0xC2) - (1 << 0x80)
"""Bytes that lie between those of one and of two bytes, and begin no character."""
_MAX_STATES = 400
_MAX_STEPS = 20_000


class Alphabet:
    """Characters that no class of the grammar tells apart are one bit of a mask.

    A mask of lead bytes has a bit for the first byte that a character has in UTF-8.
    """

    def __init__(self, grammar: Grammar) -> None:
        edges = {0, LAST_CHAR + 1}
        for node in grammar.nodes.all:
            if isinstance(node, Chars):
                edges.update(edge for low, high in node.ranges for edge in (low, high + 1))
        self._edges = sorted(edges)
        self._leads: dict[int, int] = {}

    def mask(self, chars: Chars) -> int:
        """The bits of a class."""
        bits = 0
        for low, high in chars.ranges:
            start, end = bisect_left(self._edges, low), bisect_left(self._edges, high + 1)
            bits |= (1 << end) - (1 << start)
        return bits

    def leads(self, mask: int) -> int:
        """The lead bytes of the characters of `mask`."""
        if mask not in self._leads:
            self._leads[mask] = (
                union(
                    (2 << _lead(high - 1)) - (1 << _lead(low))
                    for i, (low, high) in enumerate(pairwise(self._edges))
                    if mask >> i & 1
                )
                & ~_NO_LEADS
            )
        return self._leads[mask]


def _lead(code: int) -> int:
    """The first byte of a character in UTF-8."""
    if code < 0x80:
        return code
    if code < 0x800:
        return 0xC0 | code >> 6
    return 0xE0 | code >> 12 if code < 0x10000 else 0xF0 | code >> 18


@dataclass
class Graph:
    """Places joined by edges that read a label, and by free ones."""

    free: list[list[int]] = field(default_factory=list)
    edges: list[list[tuple[int, int]]] = field(default_factory=list)

    def place(self) -> int:
        self.free.append([])
        self.edges.append([])
        return len(self.free) - 1

    def lay(
        self, found: Node, pieces: Sequence[int], start: int, end: int
    ) -> list[tuple[int, int, int]]:
        """Lay a node's pieces from `start` to `end`; gives (piece, start, end) of each.

        A count of two and more is as good as no end: more texts, never fewer.
        """
        if isinstance(found, Alt):
            return [(piece, start, end) for piece in pieces]
        if isinstance(found, Repeat):
            first, last = self.place(), self.place()
            self.free[start].append(first)
            self.free[last].append(end)
            if found.low == 0:
                self.free[start].append(end)
            if found.high != 1:
                self.free[last].append(first)
            return [(pieces[0], first, last)]
        stops = [start, *(self.place() for _ in pieces)]
        self.free[stops[-1]].append(end)
        return [(piece, stops[i], stops[i + 1]) for i, piece in enumerate(pieces)]

    def reach(self, start: int) -> set[int]:
        """Places that free edges lead to, `start` among them."""
        return closure([start], self.free.__getitem__)


@dataclass(frozen=True)
class _Matcher:
    """A lexeme's automaton without free edges; state 0 is the start."""

    steps: list[list[tuple[int, int]]]
    accepting: list[bool]
    first: int
    """Mask of the characters that a match can begin with."""
    leads: int
    """Lead bytes of those."""


def _matcher(grammar: Grammar, node: int, alphabet: Alphabet) -> _Matcher | None:
    """The automaton of a regular node; None if it has too many states."""
    graph = Graph()
    start, end = graph.place(), graph.place()
    waiting = [(node, start, end)]
    while waiting:
        if len(graph.free) > _MAX_STATES:
            return None
        node, here, there = waiting.pop()
        found = grammar.nodes[node]
        if isinstance(found, Chars):
            graph.edges[here].append((alphabet.mask(found), there))
        elif isinstance(found, Ref):
            waiting.append((grammar.rules[found.name], here, there))
        else:
            waiting.extend(graph.lay(found, grammar.nodes.children(node), here, there))
    steps, accepting = _without_free(graph, start, end)
    first = union(mask for mask, _ in steps[0])
    return _Matcher(steps, accepting, first, alphabet.leads(first))


def _without_free(
    graph: Graph, start: int, end: int
) -> tuple[list[list[tuple[int, int]]], list[bool]]:
    """The steps of every state and whether it accepts; the states are counted from the start."""
    states = {start: 0}
    order = [start]
    steps: list[list[tuple[int, int]]] = []
    accepting: list[bool] = []
    for place in order:
        reached = graph.reach(place)
        accepting.append(end in reached)
        step: list[tuple[int, int]] = []
        for mask, target in (edge for other in reached for edge in graph.edges[other]):
            if target not in states:
                states[target] = len(order)
                order.append(target)
            step.append((mask, states[target]))
        steps.append(step)
    return steps, accepting


def union(masks: Iterable[int]) -> int:
    """All bits of `masks`."""
    bits = 0
    for mask in masks:
        bits |= mask
    return bits


class Matchers:
    """Automata of lexemes by node, and what two of them have to do with each other."""

    def __init__(self, grammar: Grammar) -> None:
        self.work = 0
        self._grammar = grammar
        self._alphabet = Alphabet(grammar)
        self._of: dict[int, _Matcher | None] = {}
        self._overlaps: dict[tuple[int, int], tuple[bool, int]] = {}

    def of(self, node: int) -> _Matcher | None:
        """None for a token, and for a lexeme that is too large."""
        if node not in self._of:
            token = isinstance(self._grammar.nodes[node], Token)
            self._of[node] = None if token else _matcher(self._grammar, node, self._alphabet)
        return self._of[node]

    def overlap(self, one: int, other: int) -> tuple[bool, int]:
        """Whether both match a common text, and lead bytes that go on in `other` after `one`.

        That is, after a text that `one` matches and `other` has only begun with. Tokens are taken
        to match each other, and never what texts match.
        """
        self.work += 1
        key = (one, other)
        if key not in self._overlaps:
            first, second = self.of(one), self.of(other)
            if first is None or second is None:
                self._overlaps[key] = (first is second, 0)
            else:
                self._overlaps[key] = self._compare(first, second)
        return self._overlaps[key]

    def _compare(self, one: _Matcher, other: _Matcher) -> tuple[bool, int]:
        if not one.first & other.first:
            return False, 0
        common, beyond = False, 0
        seen = {(0, 0)}
        waiting = [(0, 0)]
        while waiting:
            here, there = waiting.pop()
            for target, target2 in _common_steps(one.steps[here], other.steps[there]):
                if (target, target2) in seen:
                    continue
                seen.add((target, target2))
                waiting.append((target, target2))
                if one.accepting[target]:
                    common = common or other.accepting[target2]
                    beyond |= union(mask for mask, _ in other.steps[target2])
            if len(seen) > _MAX_STEPS:
                return True, -1
        self.work += len(seen)
        return common, self._alphabet.leads(beyond)


def _common_steps(
    one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> Iterable[tuple[int, int]]:
    for mask, target in one:
        for mask2, target2 in other:
            if mask & mask2:
                yield target, target2
