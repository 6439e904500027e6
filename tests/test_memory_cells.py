"""Cells against a model that is a list of (position, sequences), one per cell."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minfer_jax.memory.cells import Cells, SeqRange

N, N_SEQ = 12, 35  # more sequences than bits of a word
SEQS = (0, 1, 31, 32, 34)
MAX = 1 << 31


def claim(cells: Cells, pos, *seqs, reusable=None) -> list[int] | None:
    """Cells for tokens at `pos`, all of `seqs`."""
    found = cells.claim(np.array(pos, np.int32), [seqs] * len(pos), reusable)
    return None if found is None else found[0].tolist()


def held(cells: Cells, seq: int) -> dict[int, int]:
    """Position by cell."""
    at = np.flatnonzero(cells.held(seq))
    return dict(zip(at.tolist(), cells.pos[at].tolist(), strict=True))


def test_the_search_goes_round_the_ring():
    cells = Cells(6, 2)
    assert claim(cells, [0, 1, 2], 0) == [0, 1, 2] and cells.head == 3
    assert claim(cells, [0, 1], 1) == [3, 4]
    cells.remove(0, 0, 2)
    assert cells.head == 0 and held(cells, 0) == {2: 2}
    assert claim(cells, [3, 4], 0) == [0, 1]
    assert claim(cells, [5], 0) == [5] and cells.head == 0
    assert claim(cells, [6], 0) is None and cells.used == 6
    cells.remove(1, 0, MAX)
    cells.head = 4
    assert claim(cells, [6, 7], 0) == [4, 3]


def test_what_is_straight():
    cells = Cells(8, 2)
    assert cells.range(0) == SeqRange() and cells.range(0).straight
    claim(cells, [4, 5], 0)
    claim(cells, [6], 0)
    assert cells.range(0) == SeqRange(3, 4, 6, 0)
    claim(cells, [0], 1)
    claim(cells, [7], 0)  # behind the other
    assert cells.range(0) == SeqRange(4, 4, 7, -1) and not cells.range(0).straight
    cells.remove(0, 7, MAX)
    assert cells.range(0) == SeqRange(3, 4, 6, 0)
    cells.remove(0, 5, 6)
    assert cells.range(0) == SeqRange(2, 4, 6, -1)
    cells.remove(0, 4, 6)
    assert cells.range(0) == SeqRange(1, 6, 6, 2)


def test_cells_that_may_be_overwritten_are_taken_where_the_ring_comes_to_them():
    cells = Cells(6, 2)
    claim(cells, [0, 1, 2, 3], 0)
    claim(cells, [0, 1], 1)
    old = np.array([True, True, False, False, False, True])
    found = cells.claim(np.array([4, 5], np.int32), [(0,), (0, 1)], lambda: old)
    assert found is not None and found[0].tolist() == [0, 1]
    assert held(cells, 0) == {0: 4, 1: 5, 2: 2, 3: 3} and held(cells, 1) == {1: 5, 4: 0, 5: 1}
    assert cells.range(0) == SeqRange(4, 2, 5, -1) and cells.range(1) == SeqRange(3, 0, 5, -1)
    assert claim(cells, [6, 7], 0, reusable=lambda: old & (np.arange(6) == 5)) is None
    cells.undo(found[1])
    assert held(cells, 0) == {0: 0, 1: 1, 2: 2, 3: 3} and held(cells, 1) == {4: 0, 5: 1}
    assert cells.range(0) == SeqRange(4, 0, 3, 0) and cells.head == 0


def test_what_a_token_forgets_of_its_shift():
    cells = Cells(4, 1)
    claim(cells, [0, 1, 2], 0)
    cells.move(0, 1, MAX, lambda pos: pos + np.int32(3))
    cells.move(0, 5, MAX, lambda pos: pos - np.int32(1))
    assert held(cells, 0) == {0: 0, 1: 4, 2: 4} and cells.shift.tolist() == [0, 3, 2, 0]
    assert cells.moved
    cells.remove(0, 4, MAX)
    assert cells.shift.tolist() == [0, 0, 0, 0]
    cells.move(0, 0, MAX, lambda pos: pos - np.int32(1))
    assert cells.used == 0 and cells.range(0) == SeqRange()


def test_order_puts_each_sequence_into_one_run_in_the_order_of_positions():
    cells = Cells(8, 3)
    for pos, seq in ((0, 2), (0, 0), (1, 2), (1, 0), (2, 2)):
        claim(cells, [pos], seq)
    cells.share(0, 1, 0, MAX)
    cells.remove(2, 1, 2)
    order = cells.order()
    assert order.dtype == np.int32 and sorted(order.tolist()) == list(range(8))
    assert order[:4].tolist() == [1, 3, 0, 4]
    cells.permute(order)
    assert held(cells, 0) == held(cells, 1) == {0: 0, 1: 1} and held(cells, 2) == {2: 0, 3: 2}
    assert [cells.range(s).first_cell for s in range(3)] == [0, 0, -1] and cells.head == 4


@pytest.mark.parametrize(("p0", "p1", "kept"), [(0, MAX, 4), (0, 2, 2), (1, 3, 2), (3, 9, 1)])
def test_taking_a_part_of_another_stream(p0, p1, kept):
    source, target = Cells(6, 1), Cells(6, 1)
    claim(source, [0, 1, 2, 3], 0)
    claim(target, [0, 1, 2, 3, 4], 0)
    target.take(source, p0, p1)
    want = {i: i for i in range(4) if p0 <= i < p1}
    assert held(target, 0) == want and target.range(0).n == kept == target.used
    claim(target, [7], 0)
    assert held(source, 0) == {i: i for i in range(4)}  # a copy


class Naive(RuleBasedStateMachine):
    """Operations of one stream; the model knows only position and sequences of each cell."""

    seq = st.sampled_from(SEQS)
    some = st.sets(seq, min_size=1, max_size=3)
    pos = st.integers(-1, 14)

    def __init__(self):
        super().__init__()
        self.cells = Cells(N, N_SEQ)
        self.model: list[tuple[int, frozenset[int]]] = [(-1, frozenset())] * N
        self.shift = [0] * N
        self.undone: list = []
        """Claims that can be taken back, each with the model and the shifts of before it."""

    def end(self, seq: int) -> int:
        return max((p for p, seqs in self.model if seq in seqs), default=-1) + 1

    def settle(self):
        """What comes now is not a part of a call: nothing before it is taken back."""
        self.undone = []

    def give(self, rows: list[tuple[int, tuple[int, ...]]], cells: list[int]):
        for (pos, seqs), cell in zip(rows, cells, strict=True):
            self.model[cell], self.shift[cell] = (pos, frozenset(seqs)), 0

    @rule(named=st.lists(some, min_size=1, max_size=5), reuse=st.sets(st.integers(0, N - 1)))
    def claim(self, named, reuse):
        rows: list[tuple[int, tuple[int, ...]]] = []
        ends = {seq: self.end(seq) for seq in SEQS}
        for seqs in named:  # those of them that go on at one position
            first = min(seqs)
            row = tuple(sorted(s for s in seqs if ends[s] == ends[first]))
            rows.append((ends[first], row))
            ends.update(dict.fromkeys(row, ends[first] + 1))
        old = np.isin(np.arange(N), list(reuse))
        empty = [i for i, (pos, _) in enumerate(self.model) if pos < 0]
        usable = empty if len(empty) >= len(rows) else sorted({*empty, *reuse})
        before = list(self.model), list(self.shift)
        head = self.cells.head
        found = self.cells.claim(
            np.array([pos for pos, _ in rows], np.int32),
            [seqs for _, seqs in rows],
            (lambda: old) if reuse else None,
        )
        if len(usable) < len(rows):
            assert found is None
            return
        assert found is not None
        cells, undo = found
        run = list(range(head, head + len(rows)))
        ring = [i for i in usable if i >= head] + [i for i in usable if i < head]
        assert cells.tolist() == (run if set(run) <= set(empty) else ring[: len(rows)])
        assert cells.dtype == np.int32
        self.give(rows, cells.tolist())
        self.undone.append((undo, *before))

    @precondition(lambda self: self.undone)
    @rule()
    def undo(self):
        undo, self.model, self.shift = self.undone.pop()
        self.cells.undo(undo)
        assert self.cells.head == undo.head

    @rule(cells=st.sets(st.integers(0, N - 1), min_size=1), seq=seq, pos=st.integers(0, 9))
    def put(self, cells, seq, pos):
        self.settle()
        where = np.array(sorted(cells), np.int32)
        masks = np.zeros((2, len(where)), np.uint32)
        masks[seq // 32] = np.uint32(1 << seq % 32)
        self.cells.put(where, np.full(len(where), pos, np.int32), masks)
        self.give([(pos, (seq,))] * len(where), where.tolist())

    @rule(seq=seq, p0=pos, p1=pos | st.just(MAX))
    def remove(self, seq, p0, p1):
        if p0 >= p1:
            return
        self.settle()
        self.cells.remove(seq, p0, p1)
        for i, (pos, seqs) in enumerate(self.model):
            if seq in seqs and p0 <= pos < p1:
                self.drop(i, seq)

    def drop(self, i: int, seq: int):
        pos, seqs = self.model[i]
        left = seqs - {seq}
        self.model[i] = (pos if left else -1, left)
        self.shift[i] = self.shift[i] if left else 0

    @rule(source=seq, to=seq, p0=pos, p1=pos | st.just(MAX))
    def share(self, source, to, p0, p1):
        if source == to or self.end(to):
            return
        self.settle()
        self.cells.share(source, to, p0, p1)
        for i, (pos, seqs) in enumerate(self.model):
            if source in seqs and p0 <= pos < p1:
                self.model[i] = (pos, seqs | {to})

    @rule(seq=seq, p0=pos, p1=pos | st.just(MAX), delta=st.integers(-6, 6), d=st.integers(1, 3))
    def move(self, seq, p0, p1, delta, d):
        mine = [i for i, (p, seqs) in enumerate(self.model) if seq in seqs and p0 <= p < p1]
        together = any(len(self.model[i][1]) > 1 for i in mine)
        assert self.cells.shared(seq, p0, p1) == together
        if together:
            return
        self.settle()
        self.cells.move(seq, p0, p1, lambda pos: pos // np.int32(d) + np.int32(delta))
        for i in mine:
            pos, seqs = self.model[i]
            new = pos // d + delta
            self.shift[i] += new - pos
            self.model[i] = (new, seqs)
            if new < 0:
                self.drop(i, seq)

    @rule()
    def defrag(self):
        self.settle()
        order = self.cells.order()
        assert sorted(order.tolist()) == list(range(N))
        self.cells.permute(order)
        self.model = [self.model[i] for i in order]
        self.shift = [self.shift[i] for i in order]
        used = sum(pos >= 0 for pos, _ in self.model)
        assert all(pos >= 0 for pos, _ in self.model[:used])  # and the empty ones behind them

    @rule()
    def clear(self):
        self.settle()
        self.cells.clear()
        self.model, self.shift = [(-1, frozenset())] * N, [0] * N

    @invariant()
    def agrees(self):
        cells = self.cells
        assert cells.pos.tolist() == [pos for pos, _ in self.model]
        assert cells.shift.tolist() == self.shift
        assert cells.used == sum(pos >= 0 for pos, _ in self.model)
        assert 0 <= cells.head < N
        assert cells.moved or not any(self.shift)
        for seq in SEQS:
            assert cells.held(seq).tolist() == [seq in seqs for _, seqs in self.model]
            if cells._ranges[seq] is not None:
                assert cells._ranges[seq] == self.range(seq)
        assert not cells.held(33).any()

    @rule(seq=seq)
    def measure(self, seq):
        """What is not known of a sequence yet is found out."""
        assert self.cells.range(seq) == self.range(seq)

    @rule()
    def name(self):
        assert self.cells.sequences() == [seq for seq in SEQS if self.end(seq)]

    def range(self, seq: int) -> SeqRange:
        mine = [(i, pos) for i, (pos, seqs) in enumerate(self.model) if seq in seqs]
        if not mine:
            return SeqRange()
        cell, low = mine[0]
        straight = mine == [(cell + i, low + i) for i in range(len(mine))]
        at = [pos for _, pos in mine]
        return SeqRange(len(at), min(at), max(at), cell if straight else -1)


TestNaive = Naive.TestCase
TestNaive.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
