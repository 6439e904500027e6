"""From the instructions of a compiled graph to the named scopes that they come from.

Reads the text form of XLA's modules. Must not know any model: scopes are whatever `named_scope`
was given.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

_CONTAINERS = {"while", "call", "conditional"}

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*)$")
_OPCODE = re.compile(r"\s([a-z][a-z0-9-]*)\(")
_OP_NAME = re.compile(r'metadata=\{[^}]*?op_name="([^"]*)"')
_CALLED = re.compile(r"(?:calls|body|condition|to_apply)=%?([\w.-]+)")
_CALLED_LIST = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")


@dataclass(frozen=True)
class Instruction:
    """One instruction of a module. A profile's events bear its name."""

    opcode: str
    scope: str
    """`blk.3/ffn_down`, or empty if it comes from none."""

    @property
    def is_container(self) -> bool:
        """Whether its time is that of other instructions."""
        return self.opcode in _CONTAINERS


@dataclass(frozen=True)
class _Line:
    name: str
    computation: str
    opcode: str
    scope: str
    called: tuple[str, ...]
    operands: tuple[str, ...]


def module_name(text: str) -> str:
    """The name that a profile's events give as their module."""
    found = re.match(r"HloModule ([\w.-]+)", text)
    return found[1] if found else ""


def instructions(text: str) -> dict[str, Instruction]:
    """Instruction name -> what it is, of all computations of a module.

    What XLA made without saying from where gets the scope of most of what it calls, else that of
    the first that uses its result, else that of the loop that it stands in.
    """
    return _Scopes(_parse(text)).resolved()


def scope_of(op_name: str) -> str:
    """The named scopes of an `op_name` such as `jit(step)/blk.3/ffn_down/jit(matmul)/mul`.

    Its last part is the operation, its first the traced function; from the first inner function or
    loop on, names are not ours.
    """
    parts = op_name.split("/")
    scopes = []
    for part in parts[1:-1]:
        if "(" in part or part in ("while", "cond", "body"):
            break
        scopes.append(part)
    return "/".join(scopes)


def merge_layers(scope: str) -> str:
    """`blk.*/ffn_down` for that of any layer."""
    return re.sub(r"(^|/)(\w+)\.\d+(?=/|$)", r"\1\2.*", scope)


class _Scopes:
    """The lines of a module, and which of them belong together."""

    def __init__(self, lines: list[_Line]) -> None:
        self._lines = lines
        self._inside: dict[str, Counter[str]] = {}
        self._users: dict[str, _Line] = {}
        self._caller = {called: line for line in lines for called in line.called}
        for line in lines:
            self._inside.setdefault(line.computation, Counter())[line.scope] += 1
            for operand in line.operands:
                self._users.setdefault(operand, line)

    def resolved(self) -> dict[str, Instruction]:
        return {line.name: Instruction(line.opcode, self._scope(line)) for line in self._lines}

    def _scope(self, line: _Line) -> str:
        user: _Line | None = line
        while user is not None:
            if scope := self._own(user):
                return scope
            user = self._users.get(user.name)
        caller = self._caller.get(line.computation)
        return self._scope(caller) if caller else ""

    def _own(self, line: _Line) -> str:
        if line.scope:
            return line.scope
        called = sum((self._inside.get(name, Counter()) for name in line.called), Counter())
        del called[""]
        return called.most_common(1)[0][0] if called else ""


def _parse(text: str) -> list[_Line]:
    lines = []
    computation = ""
    for raw in text.splitlines():
        if found := _COMPUTATION.match(raw):
            computation = found[1]
        elif found := _INSTRUCTION.match(raw):
            lines.append(_line(computation, *found.groups()))
    return lines


def _line(computation: str, name: str, rest: str) -> _Line:
    rest = f" {rest}"
    opcode, op_name = _OPCODE.search(rest), _OP_NAME.search(rest)
    called = _CALLED.findall(rest)
    for several in _CALLED_LIST.findall(rest):
        called += re.findall(r"[\w.-]+", several)
    return _Line(
        name,
        computation,
        opcode[1] if opcode else "",
        scope_of(op_name[1]) if op_name else "",
        tuple(called),
        tuple(re.findall(r"%([\w.-]+)", _in_brackets(rest, opcode.end()))) if opcode else (),
    )


def _in_brackets(text: str, start: int) -> str:
    """From `start`, which follows an opening bracket, to the one that closes it: the operands.

    What is called stands behind it, and may bear the name of an instruction elsewhere.
    """
    depth = 1
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if not depth:
            return text[start:i]
    return text[start:]
