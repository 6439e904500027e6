"""Which regular parts of a GBNF grammar may be lexemes of a parser that reads lexemes greedily.

GBNF knows characters only: any way to cut a text will do. The parser cuts it into lexemes, each as
long as it can be. Both accept the same texts if a lexeme can never be followed by a character that
would also continue it, or continue another lexeme that is possible at the same place. That is
looked for here; a lexeme that fails is taken apart, at worst into single characters, which cannot
fail. Large lexemes are worth it: a parser's step for every character of every token of a vocabulary
takes far longer than a table's.

Which lexemes are possible at the same place is found with an automaton that forgets who called a
rule, so it sees too many: the result is safe, and sometimes finer than it need be.
"""

from __future__ import annotations

from collections.abc import Iterable

from minfer_jax.sampling.grammar.gbnf_nodes import ROOT, Chars, Grammar, Ref, Seq, Token
from minfer_jax.sampling.grammar.gbnf_overlap import Graph, Matchers, union
from minfer_jax.sampling.grammar.gbnf_regular import rank, regular_nodes

_MAX_PLACES = 3_000
_MAX_WORK = 300_000
"""Pairs of lexemes and of their states that are looked at: some tenths of a second."""


class Lexemes:
    """How the grammar falls into lexemes and what the parser puts together.

    References are followed on the way: no node that is given out here is one.
    """

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self._regular = regular_nodes(grammar)
        self._split: set[int] = set()
        self._joints: set[int] = set()
        self._characters = False

    @property
    def root(self) -> int:
        return self.target(self.grammar.rules[ROOT])

    def target(self, node: int) -> int:
        """The body that a reference, and what is only a reference again, leads to."""
        found = self.grammar.nodes[node]
        while isinstance(found, Ref):
            node = self.grammar.rules[found.name]
            found = self.grammar.nodes[node]
        return node

    def leaf(self, node: int) -> bool:
        """Whether `node` is a lexeme or a token, and no reference."""
        found = self.grammar.nodes[node]
        if self._characters:
            return isinstance(found, Chars | Token)
        return isinstance(found, Token) or (node in self._regular and node not in self._split)

    def pieces(self, node: int) -> list[int]:
        """What a node that is no leaf consists of, references followed.

        Regular neighbours in a sequence are one piece unless that has been split.
        """
        nodes = self.grammar.nodes
        items = [self.target(item) for item in nodes.children(node)]
        if not isinstance(nodes[node], Seq) or node in self._regular or self._characters:
            return items
        pieces: list[int] = []
        run: list[int] = []
        for item in items:
            if item in self._regular:
                run.append(item)
            else:
                pieces += [*self._joined(run), item]
                run = []
        return pieces + self._joined(run)

    def split_coarsest(self, nodes: set[int]) -> None:
        """Take those of `nodes` apart that are made of most; the others may then do as they are.

        Neighbours that were only joined come first: `return` before an identifier is no problem,
        `return` with the blanks behind it is. Then by rank: words stay whole when sentences do not.
        """
        joints = self._joints & nodes
        highest = max(self._regular[node] for node in nodes)
        self._split |= joints or {node for node in nodes if self._regular[node] == highest}

    def split_all(self) -> None:
        """Every lexeme is one character from now on."""
        self._characters = True

    def _joined(self, run: list[int]) -> list[int]:
        if len(run) < 2:
            return run
        joined = self.grammar.nodes.add(Seq(tuple(run)))
        self._joints.add(joined)
        self._regular[joined] = rank(Seq(tuple(run)), [self._regular[item] for item in run])
        return run if joined in self._split else [joined]


def choose_lexemes(grammar: Grammar) -> Lexemes:
    """The largest lexemes found with which a greedy lexer changes nothing."""
    lexemes = Lexemes(grammar)
    if lexemes.leaf(lexemes.root):
        return lexemes
    matchers = Matchers(grammar)
    while matchers.work <= _MAX_WORK:
        found = _Places(lexemes, matchers).conflicts()
        if found is None:
            break
        if not found:
            return lexemes
        lexemes.split_coarsest(found)
    lexemes.split_all()
    return lexemes


class _Places:
    """Where the parser may be between two lexemes, and which lexemes are possible there."""

    def __init__(self, lexemes: Lexemes, matchers: Matchers) -> None:
        self._lexemes = lexemes
        self._matchers = matchers
        self._graph = Graph()
        self._too_large: set[int] = set()
        self._start = self._lay_rules()
        self._numbers: dict[int, int] = {}
        self._known: dict[frozenset[tuple[int, int]], int] = {}
        self._edges: list[tuple[tuple[int, int], ...]] = []
        self._first: list[int] = []

    def conflicts(self) -> set[int] | None:
        """Lexemes to take apart; None if this is too much to find out."""
        if len(self._graph.free) > _MAX_PLACES:
            return None
        if self._too_large:
            return self._too_large
        start = self._number(self._start)
        found: set[int] = set()
        seen = {(start, start)}
        waiting = [(start, start)]
        while waiting:
            for edge, other in self._edge_pairs(*waiting.pop()):
                found |= self._conflict(edge, other) | self._conflict(other, edge)
                if not self._matchers.overlap(edge[0], other[0])[0]:
                    continue
                after = (self._number(edge[1]), self._number(other[1]))
                pair = (min(after), max(after))
                if pair not in seen:
                    seen.add(pair)
                    waiting.append(pair)
                if self._matchers.work > _MAX_WORK:
                    return None
        return found

    def _edge_pairs(
        self, one: int, other: int
    ) -> Iterable[tuple[tuple[int, int], tuple[int, int]]]:
        """All lexemes of two places with each other, each with the place that it leads to."""
        return ((edge, edge2) for edge in self._edges[one] for edge2 in self._edges[other])

    def _lay_rules(self) -> int:
        """The whole grammar as one graph; gives its start.

        A rule is laid once, and left to wherever it has been called from.
        """
        graph, lexemes = self._graph, self._lexemes
        bodies = set(lexemes.grammar.rules.values())
        laid: dict[int, tuple[int, int]] = {}
        start = graph.place()
        waiting = [(lexemes.root, start, graph.place())]
        while waiting and len(graph.free) <= _MAX_PLACES:
            node, here, there = waiting.pop()
            if lexemes.leaf(node):
                self._lay_leaf(node, here, there)
                continue
            if node in bodies:
                known = node in laid
                entry, leave = laid.setdefault(node, (graph.place(), graph.place()))
                graph.free[here].append(entry)
                graph.free[leave].append(there)
                if known:
                    continue
                here, there = entry, leave
            waiting += graph.lay(lexemes.grammar.nodes[node], lexemes.pieces(node), here, there)
        return start

    def _lay_leaf(self, node: int, here: int, there: int) -> None:
        self._graph.edges[here].append((node, there))
        matcher = self._matchers.of(node)
        if matcher is not None and matcher.accepting[0]:
            self._graph.free[here].append(there)
        elif matcher is None and not isinstance(self._lexemes.grammar.nodes[node], Token):
            self._too_large.add(node)

    def _number(self, place: int) -> int:
        """Places with the same lexemes before them have one number."""
        if place in self._numbers:
            return self._numbers[place]
        reached = self._graph.reach(place)
        edges = frozenset(edge for other in reached for edge in self._graph.edges[other])
        if edges not in self._known:
            self._known[edges] = len(self._edges)
            self._edges.append(tuple(sorted(edges)))
            firsts = (self._matchers.of(node) for node, _ in edges)
            self._first.append(union(matcher.leads for matcher in firsts if matcher is not None))
        self._numbers[place] = self._known[edges]
        return self._numbers[place]

    def _conflict(self, edge: tuple[int, int], other: tuple[int, int]) -> set[int]:
        """Both lexemes, if the first one and what may follow it go on in the other.

        Lead bytes are compared: the lexer reads bytes, and does not go back when the next byte
        shows that the character was another one.
        """
        beyond = self._matchers.overlap(edge[0], other[0])[1]
        return {edge[0], other[0]} if beyond & self._first[self._number(edge[1])] else set()
