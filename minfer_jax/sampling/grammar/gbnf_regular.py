"""Which parts of a GBNF grammar a regular expression can match.

Knows nodes and rules only. A rule that comes back to itself at its end or its beginning alone is a
repetition, and is made one here: it then costs the parser nothing, and may become regular.
"""

from __future__ import annotations

from collections.abc import Sequence

from minfer_jax.sampling.grammar.gbnf_nodes import (
    Alt,
    Grammar,
    Node,
    Nodes,
    Ref,
    Repeat,
    Seq,
    Token,
    closure,
)


def without_linear_recursion(grammar: Grammar) -> Grammar:
    """The same language; `x ::= a x | b` has become `a* b`, and `x ::= x a | b` `b a*`."""
    rules = dict(grammar.rules)
    for name, body in grammar.rules.items():
        parts = within(grammar.nodes, body)
        if not any(grammar.nodes[part] == Ref(name) for part in parts):
            continue
        for at_end in (True, False):
            unrolled = _unrolled(grammar.nodes, body, parts, name, at_end=at_end)
            if unrolled is not None:
                rules[name] = unrolled
                break
    return Grammar(grammar.nodes, rules)


def regular_nodes(grammar: Grammar) -> dict[int, int]:
    """Nodes that neither contain a token nor reach a rule that reaches itself, with their rank.

    A node is regular once all it needs is; what waits for itself never is. `rank` tells how much a
    node is made of.
    """
    waits: dict[int, int] = {}
    parents: dict[int, list[int]] = {}
    ready: list[int] = []
    for node in grammar.reached():
        children = grammar.needs(node)
        waits[node] = len(children) + isinstance(grammar.nodes[node], Token)
        for child in children:
            parents.setdefault(child, []).append(node)
        if waits[node] == 0:
            ready.append(node)
    regular: dict[int, int] = {}
    while ready:
        node = ready.pop()
        below = [regular[child] for child in grammar.needs(node)]
        regular[node] = rank(grammar.nodes[node], below)
        for parent in parents.get(node, ()):
            waits[parent] -= 1
            if waits[parent] == 0:
                ready.append(parent)
    return regular


def rank(node: Node, below: Sequence[int]) -> int:
    """Strahler's number: one more than the parts' where two of them are equally high.

    0 for a character, 1 for a word or an identifier, 2 for a word with blanks behind it.
    """
    if isinstance(node, Ref) or not below:
        return max(below, default=0)
    highest = max(below)
    if isinstance(node, Repeat):
        return max(highest, 1)
    return highest + (list(below).count(highest) > 1)


def within(nodes: Nodes, body: int) -> list[int]:
    """`body` and all below it, children first; references are not followed."""
    return sorted(closure([body], nodes.children))


_Linear = tuple[int | None, int | None]
"""What stands before (or after) the rule's own name, and what has no such name in it."""


def _unrolled(nodes: Nodes, body: int, parts: list[int], name: str, *, at_end: bool) -> int | None:
    """`body` without `name`, which must come only at its end (or only at its beginning)."""
    linear: dict[int, _Linear] = {}
    for part in parts:
        if nodes[part] == Ref(name):
            linear[part] = (nodes.add(Seq(())), None)
        elif any(child in linear for child in nodes.children(part)):
            found = _linear(nodes, part, linear, at_end=at_end)
            if found is None:
                return None
            linear[part] = found
    again, once = linear[body]
    if again is None or once is None:
        return None
    repeated = nodes.repeat(again, 0, None)
    return nodes.seq([repeated, once] if at_end else [once, repeated])


def _linear(nodes: Nodes, part: int, linear: dict[int, _Linear], *, at_end: bool) -> _Linear | None:
    """`part`, some of whose children hold the name; None if it stands inside."""
    found = nodes[part]
    if isinstance(found, Alt):
        pairs = [linear.get(item, (None, item)) for item in found.items]
        return _either(nodes, [a for a, _ in pairs]), _either(nodes, [b for _, b in pairs])
    if isinstance(found, Seq):
        edge = found.items[-1] if at_end else found.items[0]
        rest = found.items[:-1] if at_end else found.items[1:]
        if edge not in linear or any(item in linear for item in rest):
            return None
        again, once = (
            None if end is None else nodes.seq([*rest, end] if at_end else [end, *rest])
            for end in linear[edge]
        )
        return again, once
    if isinstance(found, Repeat) and (found.low, found.high) == (0, 1):
        again, once = linear[found.item]
        return again, _either(nodes, [once, nodes.add(Seq(()))])
    return None


def _either(nodes: Nodes, items: list[int | None]) -> int | None:
    kept = [item for item in items if item is not None]
    return nodes.alt(kept) if kept else None
