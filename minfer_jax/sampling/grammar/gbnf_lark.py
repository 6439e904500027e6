"""GBNF in the dialect of Lark that llguidance reads.

Every rule and lexeme gets a name of its own making, and one line with no parentheses in it, since
llguidance reads nested ones recursively. It also compiles a name where it first meets it, so names
that lead deep are met in an alternative that nothing can match, deepest first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from minfer_jax.errors import GrammarError
from minfer_jax.sampling.grammar.gbnf import parse_gbnf
from minfer_jax.sampling.grammar.gbnf_lexemes import Lexemes, choose_lexemes
from minfer_jax.sampling.grammar.gbnf_nodes import (
    LAST_CHAR,
    Alt,
    Chars,
    Repeat,
    Seq,
    Token,
)
from minfer_jax.sampling.grammar.gbnf_regular import without_linear_recursion

_FLAT_DEPTH = 40
"""Definitions that may be open at once before the order in which names are met is arranged."""
_MAX_DEPTH = 200
"""Definitions that may be open at once at all: llguidance takes them with 1 MiB of stack."""
_MAX_RULES = 12_000
"""Rules as they are written here; llguidance counts its symbols, some for each, in 16 bits."""
_OPTIONS = '%llguidance {"no_forcing": true}'
"""Any token that can come is allowed; else a text without choice had one tokenization only."""
_NOTHING = f"NONE: /[^\\x00-\\x{{{LAST_CHAR:X}}}]/"
_OPERATORS = {(0, None): "*", (1, None): "+", (0, 1): "?"}


def lark_of_gbnf(
    text: str, token_id: Callable[[str], int] | None = None, ends: Iterable[int] = ()
) -> str:
    """The grammar `text` for llguidance: the same texts, and the same beginnings of texts.

    `token_id` gives the id of a token's text (`<think>`), or raises `GrammarError`. Where a token's
    literal and its text are both possible, it is taken as the literal. `ends` are tokens that end a
    generation: any token but one, `!<...>`, is none of them.

    Raises `GrammarError`: as `parse_gbnf`, and for rules that lead into each other too deep.
    """
    grammar = without_linear_recursion(parse_gbnf(text, token_id))
    return _Writer(choose_lexemes(grammar), ends).lark()


class _Writer:
    """A node is written as a rule (`r7`) or, inside of lexemes, as a terminal (`T7`)."""

    def __init__(self, lexemes: Lexemes, ends: Iterable[int]) -> None:
        self._lexemes = lexemes
        self._nodes = lexemes.grammar.nodes
        self._ends = frozenset(ends)
        self._bodies: dict[str, str] = {}
        self._uses: dict[str, list[str]] = {}

    def lark(self) -> str:
        start = self._write_all()
        n_rules = sum(name[0] == "r" for name in self._bodies)
        if n_rules > _MAX_RULES:
            raise GrammarError(f"the grammar has {n_rules} nested parts; at most {_MAX_RULES} fit")
        lines = [f"{name}: {body}" for name, body in self._bodies.items()]
        if start not in self._bodies or self._depth([start]) <= _FLAT_DEPTH:
            return "\n".join([_OPTIONS, f"start: {start}", *lines, ""])
        order = self._deepest_first(start)
        if self._depth(order) > _MAX_DEPTH:
            raise GrammarError(
                f"the grammar's rules need each other in circles of more than {_MAX_DEPTH} parts;"
                " write it with repetitions or fewer rules"
            )
        terminals = [name for name in order if name[0] == "T"]
        rules = [name for name in order if name[0] == "r"]
        first = [_NOTHING, "FIRST: " + " | ".join(f"NONE {name}" for name in [*terminals, "NONE"])]
        met = ["FIRST", *(f"NONE {name}" for name in rules), start]
        return "\n".join([_OPTIONS, f"start: {' | '.join(met)}", *first, *lines, ""])

    def _write_all(self) -> str:
        """Fill the definitions; gives what the start is."""
        root = self._lexemes.root
        waiting = [(root, False)]
        while waiting:
            node, lexeme = waiting.pop()
            lexeme = lexeme or self._lexemes.leaf(node)
            name = self._atom(node, lexeme)
            if self._inline(node) or name in self._bodies:
                continue
            pieces = self._pieces(node, lexeme)
            atoms = [self._atom(piece, lexeme or self._lexemes.leaf(piece)) for piece in pieces]
            self._bodies[name] = self._body(node, atoms)
            self._uses[name] = [atom for atom in atoms if atom[0] in "rT"]
            waiting.extend((piece, lexeme) for piece in pieces)
        return self._atom(root, self._lexemes.leaf(root))

    def _pieces(self, node: int, lexeme: bool) -> list[int]:
        pieces = self._nodes.children(node) if lexeme else self._lexemes.pieces(node)
        return [self._lexemes.target(piece) for piece in pieces]

    def _body(self, node: int, atoms: list[str]) -> str:
        found = self._nodes[node]
        if isinstance(found, Alt):
            return " | ".join(atoms)
        if isinstance(found, Repeat):
            return atoms[0] + _operator(found)
        return " ".join(atoms)

    def _inline(self, node: int) -> bool:
        found = self._nodes[node]
        return isinstance(found, Chars | Token) or found == Seq(())

    def _atom(self, node: int, lexeme: bool) -> str:
        """What a definition calls a node by."""
        found = self._nodes[node]
        if isinstance(found, Chars):
            return _class(found)
        if isinstance(found, Token):
            return _token(found, self._ends)
        if found == Seq(()):
            return '""'
        return f"{'T' if lexeme else 'r'}{node}"

    def _deepest_first(self, start: str) -> list[str]:
        """All definitions, each after what it uses, circles aside."""
        order: list[str] = []
        seen = {start}
        path = [(start, iter(self._uses[start]))]
        while path:
            name, uses = path[-1]
            use = next((use for use in uses if use not in seen), None)
            if use is None:
                order.append(name)
                path.pop()
            else:
                seen.add(use)
                path.append((use, iter(self._uses[use])))
        return order

    def _depth(self, order: list[str]) -> int:
        """The most definitions open at once when `order` is compiled name by name."""
        deepest = 0
        seen: set[str] = set()
        for start in order:
            path = [iter([start])]
            while path:
                use = next((use for use in path[-1] if use not in seen), None)
                if use is None:
                    path.pop()
                    continue
                seen.add(use)
                path.append(iter(self._uses[use]))
                deepest = max(deepest, len(path) - 1)
        return deepest


def _token(token: Token, ends: frozenset[int]) -> str:
    if not token.negated:
        return f"<[{token.id}]>"
    return f"<[^{','.join(map(str, sorted({token.id, *ends})))}]>"


def _operator(repeat: Repeat) -> str:
    simple = _OPERATORS.get((repeat.low, repeat.high))
    if simple is not None:
        return simple
    return f"{{{repeat.low},{'' if repeat.high is None else repeat.high}}}"


def _class(chars: Chars) -> str:
    """A class of characters, in ASCII."""
    if len(chars.ranges) == 1 and chars.ranges[0][0] == chars.ranges[0][1]:
        return json.dumps(chr(chars.ranges[0][0])).replace("\x7f", "\\u007f")
    ranges = "".join(f"\\x{{{low:X}}}-\\x{{{high:X}}}" for low, high in chars.ranges)
    return f"/[{ranges}]/"
