"""`sampling.grammar.gbnf_nodes`: the table of nodes, and ranges of characters."""

import pytest

from minfer_jax.sampling.grammar.gbnf_nodes import (
    LAST_CHAR,
    MAX_COUNT,
    ROOT,
    Chars,
    Grammar,
    Nodes,
    Ref,
    Repeat,
    char_ranges,
    closure,
    complement,
)


def test_equal_nodes_have_one_id():
    nodes = Nodes()
    a, b = nodes.add(Ref("a")), nodes.add(Ref("b"))
    assert nodes.seq([a, b]) == nodes.seq([a, nodes.seq([]), b])
    assert nodes.alt([a, b, a]) == nodes.alt([a, b])
    assert nodes.seq([a]) == nodes.alt([a]) == nodes.repeat(a, 1, 1) == a
    assert nodes.children(nodes.repeat(nodes.alt([a, b]), 0, 2)) == (nodes.alt([a, b]),)
    assert nodes.children(a) == ()


def test_ranges_are_joined():
    assert char_ranges([(5, 9), (1, 2), (3, 4), (20, 30), (25, 26)]) == ((1, 9), (20, 30))
    assert char_ranges([(0xD800, 0xDFFF)]) == ()
    assert char_ranges([(0, LAST_CHAR)]) == ((0, 0xD7FF), (0xE000, LAST_CHAR))


def test_a_complement_holds_the_rest():
    assert complement([(5, 9), (20, 30)]) == [(0, 4), (10, 19), (31, LAST_CHAR)]
    assert char_ranges(complement([(0, LAST_CHAR - 1)])) == ((LAST_CHAR, LAST_CHAR),)
    assert char_ranges(complement([(0, LAST_CHAR)])) == ()


def test_characters_of_an_alternative_become_a_class():
    nodes = Nodes()
    a, b, x = nodes.add(Chars(((97, 97),))), nodes.add(Chars(((98, 100),))), nodes.add(Ref("x"))
    assert nodes[nodes.alt([a, b])] == Chars(((97, 100),))
    assert nodes.alt([a, x, b]) == nodes.alt([x, nodes.alt([a, b])])


SPANS = [(0, 3), (1, 2), (2, 3), (2, 4), (3, 5), (4, 4), (2, None)]


@pytest.mark.parametrize(("low", "high"), SPANS)
@pytest.mark.parametrize(("times", "most"), [(0, 2), (1, 3), (2, 2), (3, 4), (1, None), (0, None)])
def test_a_repetition_of_a_repetition_is_one_if_it_reaches_the_same_counts(low, high, times, most):
    """Judged by writing out all counts up to 40."""
    nodes = Nodes()
    item = nodes.add(Ref("x"))
    found = nodes[nodes.repeat(nodes.repeat(item, low, high), times, most)]
    assert isinstance(found, Repeat)
    counts = _counts(_range(low, high), _range(times, most))
    if found.item == item:
        assert set(_range(found.low, found.high)) == counts
    else:
        assert counts != set(range(min(counts), max(counts) + 1))


def _range(low: int, high: int | None) -> range:
    return range(low, 41 if high is None else high + 1)


def _counts(inner: range, outer: range) -> set[int]:
    """Sums of as many counts of `inner` as `outer` says, up to 40."""
    sums, reached = {0}, set()
    for times in range(outer.stop):
        if times in outer:
            reached |= sums
        sums = {total + count for total in sums for count in inner if total + count <= 40}
    return reached


def test_counts_beyond_the_bound_are_not_multiplied():
    nodes = Nodes()
    thousand = nodes.repeat(nodes.add(Ref("x")), 0, 1_000)
    assert nodes[nodes.repeat(thousand, 0, MAX_COUNT // 1_000)] == Repeat(0, 0, MAX_COUNT)
    assert nodes[nodes.repeat(thousand, 0, 1_001)] == Repeat(thousand, 0, 1_001)


def test_what_the_root_reaches():
    nodes = Nodes()
    x, y = nodes.add(Ref("x")), nodes.add(Ref("y"))
    root = nodes.seq([x, x])
    end = nodes.add(Chars(((97, 97),)))
    grammar = Grammar(nodes, {ROOT: root, "x": end, "y": y})
    assert grammar.needs(x) == (end,)
    assert grammar.needs(root) == (x, x)
    assert grammar.reached() == {root, x, end}
    assert closure([3], lambda n: [n - 1] if n else []) == {0, 1, 2, 3}
