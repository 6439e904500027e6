"""GBNF, llama.cpp's grammar notation: from text to nodes.

Knows the notation and what its rules can produce; nothing of tokens but their ids, nothing of how a
grammar is run. Nothing recurses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from minfer_jax.errors import GrammarError
from minfer_jax.sampling.grammar.gbnf_nodes import (
    LAST_CHAR,
    MAX_COUNT,
    ROOT,
    SURROGATES,
    Alt,
    Chars,
    Grammar,
    Node,
    Nodes,
    Ref,
    Repeat,
    Seq,
    Token,
    char_ranges,
    complement,
)

MAX_TEXT = 1 << 20
"""Characters of a grammar."""
MAX_NODES = 50_000
"""Different parts of a grammar."""

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t]+|#[^\r\n]*)*")
_BLANK_LINES = re.compile(r"(?:[ \t\r\n]+|#[^\r\n]*)*")
_PLAIN = re.compile(r'[^"\\]+')
_DIGITS = re.compile(r"[0-9]+")
_TOKEN_ID = re.compile(r"<\[([0-9]+)\]>")
_TOKEN_TEXT = re.compile(r"<[^>\r\n]*>")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_COUNTS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}

TokenId = Callable[[str], int]


def parse_gbnf(text: str, token_id: TokenId | None = None) -> Grammar:
    """The rules of `text` that the rule `root` needs.

    `token_id` gives the id of a token's text (`<think>`), or raises `GrammarError` if that is not
    exactly one token. A rule defined twice is what its last definition says, as in llama.cpp.

    Raises `GrammarError`, one line with line and column: for what is not GBNF, a rule that is
    referred to and not defined, one that no text can match, or no root.
    """
    if len(text) > MAX_TEXT:
        raise GrammarError(f"the grammar has {len(text)} characters; at most {MAX_TEXT} are taken")
    parser = _Parser(text, token_id)
    parser.rules_of_text()
    parser.check_references()
    if len(parser.nodes.all) > MAX_NODES:
        raise GrammarError(
            f"the grammar has {len(parser.nodes.all)} parts; at most {MAX_NODES} are taken"
        )
    grammar = Grammar(parser.nodes, _needed(parser.nodes, parser.bodies))
    barren = _barren_rule(grammar)
    if barren is not None:
        raise parser.error(
            parser.starts[barren], f"rule {barren!r} matches no text: it always needs itself"
        )
    return grammar


@dataclass
class _Group:
    """A parenthesis, or a rule's body, that is being read."""

    opened: int
    done: list[int] = field(default_factory=list)
    items: list[int] = field(default_factory=list)


class _Parser:
    def __init__(self, text: str, token_id: TokenId | None) -> None:
        self.nodes = Nodes()
        self.bodies: dict[str, int] = {}
        self.starts: dict[str, int] = {}
        self._references: dict[str, dict[str, int]] = {}
        self._text = text
        self._at = 0
        self._token_id = token_id

    def error(self, at: int, message: str) -> GrammarError:
        before = self._text[:at].replace("\r\n", "\n").replace("\r", "\n")
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        return GrammarError(f"grammar, line {line}, column {column}: {message}")

    def rules_of_text(self) -> None:
        self._blank(lines=True)
        while self._at < len(self._text):
            self._rule()
            self._blank(lines=True)

    def check_references(self) -> None:
        """Every reference has a rule, and there is a root."""
        for name, references in self._references.items():
            for other, at in references.items():
                if other not in self.bodies:
                    raise self.error(at, f"rule {name!r} needs {other!r}, which is not defined")
        if ROOT not in self.bodies:
            raise self.error(len(self._text), f"there is no rule {ROOT!r}")

    def _rule(self) -> None:
        start = self._at
        match = _NAME.match(self._text, start)
        if match is None:
            raise self.error(start, f"a rule's name is expected, found {self._found()}")
        self._at = match.end()
        self._blank()
        if not self._text.startswith("::=", self._at):
            raise self.error(self._at, f"'::=' is expected, found {self._found()}")
        self._at += 3
        name = match[0]
        self.starts[name] = start
        self._references[name] = {}
        self.bodies[name] = self._body(self._references[name])

    def _body(self, references: dict[str, int]) -> int:
        """Up to the end of the line after which no parenthesis and no `|` is open."""
        groups = [_Group(self._at)]
        self._blank(lines=True)
        while True:
            sign, at = self._peek(), self._at
            if sign == "(":
                self._at += 1
                groups.append(_Group(at))
            elif sign == ")" and len(groups) > 1:
                self._at += 1
                closed = self._close(groups.pop())
                groups[-1].items.append(closed)
            elif sign == "|":
                self._at += 1
                groups[-1].done.append(self.nodes.seq(groups[-1].items))
                groups[-1].items = []
            elif sign and sign in "*+?{":
                self._repetition(groups[-1], nested=len(groups) > 1)
            else:
                item = self._item(sign, references)
                if item is None:
                    break
                groups[-1].items.append(item)
            self._blank(lines=len(groups) > 1 or sign == "|")
        if len(groups) > 1 and not sign:
            raise self.error(groups[-1].opened, "this '(' is never closed")
        if sign and sign not in "\r\n":
            raise self.error(self._at, f"the rule's next part is expected, found {self._found()}")
        return self._close(groups[0])

    def _close(self, group: _Group) -> int:
        return self.nodes.alt([*group.done, self.nodes.seq(group.items)])

    def _item(self, sign: str, references: dict[str, int]) -> int | None:
        """A literal, a class, a token or a rule's name; None if none is here."""
        if sign == '"':
            return self._literal()
        if sign == "[":
            return self._class()
        if sign == ".":
            self._at += 1
            return self.nodes.add(Chars(char_ranges([(0, LAST_CHAR)])))
        if sign and sign in "<!":
            return self._token()
        match = _NAME.match(self._text, self._at)
        if match is None:
            return None
        references.setdefault(match[0], self._at)
        self._at = match.end()
        return self.nodes.add(Ref(match[0]))

    def _literal(self) -> int:
        start = self._at
        self._at += 1
        items: list[int] = []
        while self._peek() != '"':
            plain = _PLAIN.match(self._text, self._at)
            if plain is None:
                items.append(self._one(self._at, self._character(start)))
                continue
            items.extend(self._one(plain.start() + i, ord(c)) for i, c in enumerate(plain[0]))
            self._at = plain.end()
        self._at += 1
        return self.nodes.seq(items)

    def _one(self, at: int, code: int) -> int:
        if SURROGATES[0] <= code <= SURROGATES[1]:
            raise self.error(at, f"U+{code:04X} is half of a surrogate pair, not a character")
        return self.nodes.add(Chars(((code, code),)))

    def _class(self) -> int:
        start = self._at
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        ranges: list[tuple[int, int]] = []
        while self._peek() != "]":
            at = self._at
            low = high = self._character(start)
            if self._peek() == "-" and not self._text.startswith("-]", self._at):
                self._at += 1
                high = self._character(start)
            if low > high:
                raise self.error(at, "this range of characters ends before it begins")
            ranges.append((low, high))
        self._at += 1
        if not ranges:
            raise self.error(start, "this class of characters is empty")
        chosen = char_ranges(complement(ranges) if negated else ranges)
        if not chosen:
            raise self.error(start, "no character is in this class")
        return self.nodes.add(Chars(chosen))

    def _character(self, opened: int) -> int:
        """The code point of a plain or escaped character of what was opened there."""
        at, sign = self._at, self._peek()
        if not sign:
            raise self.error(opened, f"this {self._text[opened]!r} is never closed")
        self._at += 1
        if sign != "\\":
            return ord(sign)
        kind = self._peek()
        self._at += 1
        if kind in _ESCAPES:
            return ord(_ESCAPES[kind])
        size = _HEX.get(kind, 0)
        digits = self._text[self._at : self._at + size]
        if not size or not re.fullmatch(f"[0-9a-fA-F]{{{size}}}", digits):
            raise self.error(at, f"unknown escape {self._text[at : at + 2 + size]!r}")
        self._at += size
        code = int(digits, 16)
        if code > LAST_CHAR:
            raise self.error(at, f"U+{code:X} is no character; the last is U+{LAST_CHAR:X}")
        return code

    def _token(self) -> int:
        at = self._at
        negated = self._peek() == "!"
        start = at + negated
        by_id = _TOKEN_ID.match(self._text, start)
        by_text = _TOKEN_TEXT.match(self._text, start)
        if by_text is None:
            raise self.error(at, "a token is expected: <[id]> or <text>")
        if by_id is None:
            token = self._token_of_text(start, by_text[0])
        else:
            token = self._number(start, by_id[1], (1 << 31) - 1, "a token's id")
        self._at = by_text.end() if by_id is None else by_id.end()
        return self.nodes.add(Token(token, negated))

    def _token_of_text(self, at: int, text: str) -> int:
        if self._token_id is None:
            raise self.error(at, f"{text!r} needs a vocabulary; without one write <[id]>")
        try:
            return self._token_id(text)
        except GrammarError as error:
            raise self.error(at, str(error)) from None

    def _repetition(self, group: _Group, *, nested: bool) -> None:
        at, sign = self._at, self._peek()
        if not group.items:
            raise self.error(at, f"{sign!r} repeats nothing")
        self._at += 1
        low, high = _COUNTS[sign] if sign != "{" else self._counts(at, nested)
        group.items[-1] = self.nodes.repeat(group.items[-1], low, high)

    def _counts(self, opened: int, nested: bool) -> tuple[int, int | None]:
        """What stands between `{` and `}`; the end is passed."""
        low = self._count(opened, nested)
        if low is None:
            raise self.error(self._at, f"a number is expected after '{{', found {self._found()}")
        high: int | None = low
        if self._peek() == ",":
            self._at += 1
            high = self._count(opened, nested)
        if self._peek() != "}":
            raise self.error(self._at, f"'}}' is expected, found {self._found()}")
        self._at += 1
        if low > MAX_COUNT:
            raise self.error(opened, f"{low} repetitions; at most {MAX_COUNT} are taken")
        if high is not None and high < low:
            raise self.error(opened, f"at least {low} and at most {high} repetitions: none fits")
        return low, high if high is None or high <= MAX_COUNT else None

    def _count(self, opened: int, nested: bool) -> int | None:
        self._blank(lines=nested)
        match = _DIGITS.match(self._text, self._at)
        if match is None:
            return None
        count = self._number(opened, match[0], (1 << 64) - 1, "a count")
        self._at = match.end()
        self._blank(lines=nested)
        return count

    def _number(self, at: int, digits: str, most: int, what: str) -> int:
        if len(digits) > 20 or int(digits) > most:
            raise self.error(at, f"{what} is {digits[:24]}; at most {most} is possible")
        return int(digits)

    def _blank(self, *, lines: bool = False) -> None:
        match = (_BLANK_LINES if lines else _BLANK).match(self._text, self._at)
        self._at = match.end() if match else self._at

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _found(self) -> str:
        rest = self._text[self._at : self._at + 16]
        return repr(rest.split("\n")[0]) if rest.strip() else "the end of the line"


def _needed(nodes: Nodes, bodies: dict[str, int]) -> dict[str, int]:
    """The rules that the root reaches."""
    whole = Grammar(nodes, bodies)
    names = {found.name for node in whole.reached() if isinstance(found := nodes[node], Ref)}
    return {name: body for name, body in bodies.items() if name in names or name == ROOT}


def _barren_rule(grammar: Grammar) -> str | None:
    """A rule that always needs itself, however its references are followed; None if there is none.

    What a node waits for is counted, and a node that waits no more tells its parents: every edge is
    walked once.
    """
    parents: dict[int, list[int]] = {}
    waits: dict[int, int] = {}
    fertile: list[int] = []
    for node in grammar.reached():
        children = grammar.needs(node)
        waits[node] = _waits(grammar.nodes[node], len(children))
        for child in children:
            parents.setdefault(child, []).append(node)
        if waits[node] == 0:
            fertile.append(node)
    while fertile:
        for parent in parents.get(fertile.pop(), ()):
            waits[parent] -= 1
            if waits[parent] == 0:
                fertile.append(parent)
    barren = (body for body in grammar.rules.values() if waits[body] > 0)
    start = next(barren, None)
    return None if start is None else _on_cycle(grammar, waits, start)


def _on_cycle(grammar: Grammar, waits: dict[int, int], node: int) -> str:
    """From a barren node through barren nodes to the first rule that comes again."""
    seen: set[str] = set()
    while True:
        found = grammar.nodes[node]
        if isinstance(found, Ref):
            if found.name in seen:
                return found.name
            seen.add(found.name)
        node = next(child for child in grammar.needs(node) if waits[child] > 0)


def _waits(node: Node, n_children: int) -> int:
    """Of how many children a node needs texts before it has one."""
    if isinstance(node, Seq):
        return n_children
    if isinstance(node, Alt | Ref):
        return 1
    return int(isinstance(node, Repeat) and node.low > 0)
