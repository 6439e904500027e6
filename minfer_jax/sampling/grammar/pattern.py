"""A `pattern` of a JSON schema, which is a regular expression of ECMA 262, for llguidance.

The dialects differ in what `\\d`, `\\s`, `.` and `$` mean and in what may stand in brackets, so a
pattern is parsed and written anew with nothing but code points in it. What cannot be expressed
(look-around, back references, word boundaries) raises `Inexpressible`; what ECMA and Python read
differently does, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

Range = tuple[int, int]

_MAX_LENGTH = 4096
_MAX_DEPTH = 60
_MAX_COUNT = 10_000
_LAST = 0x10FFFF

_DIGIT: tuple[Range, ...] = ((0x30, 0x39),)
_WORD: tuple[Range, ...] = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: tuple[Range, ...] = (
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_LINE_END: tuple[Range, ...] = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_QUANTIFIER = re.compile(r"([*+?])|\{(\d{1,9})(,(\d{1,9})?)?\}")
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
_PROPERTY = re.compile(r"([pP])\{([A-Z][a-z]?)\}")
_GROUP = re.compile(r"\?(?::|P?<[A-Za-z_]\w*>)")
_ANYTHING = "(?s:.*)"


class Inexpressible(Exception):
    """A pattern that llguidance cannot enforce as it is meant; the message says why."""


@dataclass
class _Sequence:
    """One alternative: expressions in order, and the anchors around them."""

    parts: list[str | _Group] = field(default_factory=list)
    starts: bool = False
    ends: bool = False


@dataclass
class _Group:
    alternatives: list[_Sequence] = field(default_factory=lambda: [_Sequence()])


def whole_string(pattern: str) -> str:
    """An expression for the whole of every string in which `pattern` is found."""
    if len(pattern) > _MAX_LENGTH:
        raise Inexpressible(f"it has more than {_MAX_LENGTH} characters")
    return f"^(?:{_searched(_Parser(pattern).parse())})$"


def _searched(group: _Group) -> str:
    """Alternatives that may begin and end anywhere, but for their anchors."""
    return "|".join(_searched_sequence(sequence) for sequence in group.alternatives)


def _searched_sequence(sequence: _Sequence) -> str:
    if not sequence.starts and not sequence.ends and len(sequence.parts) == 1:
        part = sequence.parts[0]
        if isinstance(part, _Group):
            return f"(?:{_searched(part)})"
    before = "" if sequence.starts else _ANYTHING
    after = "" if sequence.ends else _ANYTHING
    return before + "".join(map(_written, sequence.parts)) + after


def _written(part: str | _Group) -> str:
    if isinstance(part, str):
        return part
    if any(sequence.starts or sequence.ends for sequence in part.alternatives):
        raise Inexpressible("it has an anchor inside a part of it")
    inner = "|".join("".join(map(_written, s.parts)) for s in part.alternatives)
    return f"(?:{inner})"


class _Parser:
    """From left to right, with the open groups on a stack."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._open: list[_Group] = [_Group()]

    def parse(self) -> _Group:
        while self._at < len(self._pattern):
            self._next()
        if len(self._open) > 1:
            raise Inexpressible("a group is not closed")
        return self._open[0]

    def _next(self) -> None:
        char = self._take()
        sequence = self._open[-1].alternatives[-1]
        if char == "^":
            if sequence.parts or sequence.ends:
                raise Inexpressible("'^' is not at the start")
            sequence.starts = True
        elif char == "$":
            sequence.ends = True
        elif char == "|":
            self._open[-1].alternatives.append(_Sequence())
        elif char == "(":
            self._open_group()
        elif sequence.ends and char != ")":
            raise Inexpressible("'$' is not at the end")
        elif char == ")":
            if len(self._open) == 1:
                raise Inexpressible("a group is closed that is not open")
            self._append(self._open.pop())
        else:
            self._append(self._atom(char))

    def _open_group(self) -> None:
        if self._open[-1].alternatives[-1].ends:
            raise Inexpressible("'$' is not at the end")
        if self._rest().startswith("?"):
            kind = _GROUP.match(self._pattern, self._at)
            if kind is None:
                raise Inexpressible("look-around and flags are not supported")
            self._at = kind.end()
        if len(self._open) > _MAX_DEPTH:
            raise Inexpressible(f"groups are nested more than {_MAX_DEPTH} deep")
        self._open.append(_Group())

    def _append(self, part: str | _Group) -> None:
        """Add an expression with the quantifier that follows it."""
        times = self._quantifier()
        parts = self._open[-1].alternatives[-1].parts
        parts.append(part if times is None else _written(part) + times)

    def _quantifier(self) -> str | None:
        found = _QUANTIFIER.match(self._pattern, self._at)
        if found is None:
            return None
        self._at = found.end()
        if self._rest().startswith("?"):
            self._at += 1  # lazy: the same language
        if _QUANTIFIER.match(self._pattern, self._at):
            raise Inexpressible("a quantifier follows another")
        mark, least, more, most = found.groups()
        if mark:
            return mark
        low = int(least)
        high = low if more is None else None if most is None else int(most)
        if max(low, high or 0) > _MAX_COUNT or (high is not None and low > high):
            raise Inexpressible(f"the repetition {found[0]} is inverted or above {_MAX_COUNT}")
        return f"{{{low},{'' if high is None else high}}}"

    def _atom(self, char: str) -> str:
        if char == ".":
            return _written_class(list(_LINE_END), [], negated=True)
        if char == "[":
            return self._class()
        if char in "*+?":
            raise Inexpressible(f"nothing stands before {char!r}")
        if char == "{" and _QUANTIFIER.match(self._pattern, self._at - 1):
            raise Inexpressible("nothing stands before a repetition")
        if char == "{" and re.match(r",\d+\}", self._rest()):
            raise Inexpressible("'{,n}' means different things to different readers")
        if char != "\\":
            return _code(ord(char))
        ranges, names = self._escape(in_class=False)
        return _written_class(ranges, names, negated=False)

    def _escape(self, *, in_class: bool) -> tuple[list[Range], list[str]]:
        """What the escape after a backslash stands for: code points, and names of categories."""
        named = _PROPERTY.match(self._pattern, self._at)
        if named is not None:
            self._at = named.end()
            return [], [f"\\{named[1]}{{{named[2]}}}"]
        number = _HEX.match(self._pattern, self._at)
        if number is not None:
            self._at = number.end()
            point = self._low_surrogate(int(number[1] or number[2] or number[3], 16))
            return [(point, point)], []
        char = self._take()
        if char.lower() in _CLASSES:
            ranges = list(_CLASSES[char.lower()])
            return (ranges if char.islower() else _complement(ranges)), []
        if char == "b" and in_class:
            return [(8, 8)], []
        if char in _CONTROLS:
            return [(_CONTROLS[char], _CONTROLS[char])], []
        if char == "0" and not self._rest()[:1].isdigit():
            return [(0, 0)], []
        if char.isalnum() or char == "_" or not char.isascii():
            raise Inexpressible(f"the escape \\{char} is not supported")
        return [(ord(char), ord(char))], []

    def _low_surrogate(self, point: int) -> int:
        """A code point, which two escapes may spell."""
        if 0xD800 <= point < 0xDC00 and self._rest().startswith("\\u"):
            low = _HEX.match(self._pattern, self._at + 1)
            if low is not None and low[2] and 0xDC00 <= int(low[2], 16) < 0xE000:
                self._at = low.end()
                return 0x10000 + ((point - 0xD800) << 10) + int(low[2], 16) - 0xDC00
        if 0xD800 <= point < 0xE000 or point > _LAST:
            raise Inexpressible(f"U+{point:X} is no character")
        return point

    def _class(self) -> str:
        """A bracket expression, its opening bracket being taken."""
        negated = self._rest().startswith("^")
        self._at += negated
        ranges: list[Range] = []
        names: list[str] = []
        first: int | None = None  # a single code point that a '-' may follow
        while True:
            char = self._take()
            if char == "]":
                break
            if char == "-" and first is not None and not self._rest().startswith("]"):
                ranges[-1] = (first, self._range_end(first))
                first = None
                continue
            found, categories = self._escape(in_class=True) if char == "\\" else (_one(char), [])
            ranges += found
            names += categories
            first = found[0][0] if len(found) == 1 and found[0][0] == found[0][1] else None
        if not ranges and not names:
            raise Inexpressible("an empty bracket expression")
        return _written_class(ranges, names, negated=negated)

    def _range_end(self, first: int) -> int:
        char = self._take()
        found, _ = self._escape(in_class=True) if char == "\\" else (_one(char), [])
        if len(found) != 1 or found[0][0] != found[0][1] or found[0][0] < first:
            raise Inexpressible("a range in brackets has no end, or is inverted")
        return found[0][0]

    def _take(self) -> str:
        if self._at >= len(self._pattern):
            raise Inexpressible("it ends too early")
        self._at += 1
        return self._pattern[self._at - 1]

    def _rest(self) -> str:
        return self._pattern[self._at : self._at + 12]


def _one(char: str) -> list[Range]:
    return [(ord(char), ord(char))]


def _complement(ranges: list[Range]) -> list[Range]:
    """All other code points, surrogates aside."""
    gaps: list[Range] = []
    start = 0
    for low, high in [*sorted(ranges), (_LAST + 1, _LAST + 1)]:
        gaps += [(a, b) for a, b in _without_surrogates(start, low - 1) if a <= b]
        start = max(start, high + 1)
    return gaps


def _without_surrogates(low: int, high: int) -> list[Range]:
    if high < 0xD800 or low > 0xDFFF:
        return [(low, high)]
    return [(low, 0xD7FF), (0xE000, high)]


def _written_class(ranges: list[Range], names: list[str], *, negated: bool) -> str:
    if len(ranges) == 1 and not names and not negated and ranges[0][0] == ranges[0][1]:
        return _code(ranges[0][0])
    inner = "".join(f"{_code(low)}-{_code(high)}" for low, high in ranges) + "".join(names)
    return f"[{'^' if negated else ''}{inner}]"


def _code(point: int) -> str:
    return f"\\x{{{point:X}}}"
