"""The books of recurrent states: which slot is whose, and that none is written too early.

Beside single cases, random operations against a model in which a state is the list of rows that
made it: whatever slot a sequence is said to have must hold that list.
"""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minfer_jax.batch import Ubatch
from minfer_jax.memory.plan import RecurrentSpec
from minfer_jax.memory.recurrent import RecurrentStates


def states(n_seq: int = 3, n_snapshots: int = 0) -> RecurrentStates:
    spec = RecurrentSpec(
        layers=(0,), shapes=((2,),), n_slots=n_seq * (2 + n_snapshots), n_snapshots=n_snapshots
    )
    return RecurrentStates(spec)


def ubatch(books: RecurrentStates, *seqs: tuple[int, ...]) -> Ubatch:
    """The next rows of these sequences."""
    ends: dict[int, int] = {}
    pos = []
    for row in seqs:
        at = ends.get(row[0], books.pos(row[0]) + 1)
        pos.append(at)
        ends.update(dict.fromkeys(row, at + 1))
    n = np.zeros(len(seqs), np.int32)
    return Ubatch(n, n, None, np.array(pos, np.int32), seqs, n)


def feed(books: RecurrentStates, *seqs: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """One call of one ubatch: the slots that its rows read and write."""
    books.begin()
    claim = books.claim(ubatch(books, *seqs))
    books.end()
    return claim.read.tolist(), claim.written.tolist()


def test_a_call_reads_one_slot_and_writes_another():
    books = states()
    assert books.pos(0) == -1 and books.slot(0) is None
    assert feed(books, (0,), (0,)) == ([6, 6], [0, 0])  # it begins: past the last slot
    assert (books.pos(0), books.slot(0)) == (1, 0)
    assert feed(books, (0,)) == ([0], [1])
    assert feed(books, (1,), (0,)) == ([6, 1], [0, 2])
    assert [books.pos(s) for s in range(3)] == [3, 0, -1]


def test_later_ubatches_of_a_call_write_in_place():
    books = states()
    feed(books, (0,))
    books.begin()
    first, second = (books.claim(ubatch(books, (0,), (0,))) for _ in range(2))
    assert (first.read.tolist(), first.written.tolist()) == ([0, 0], [1, 1])
    assert (second.read.tolist(), second.written.tolist()) == ([1, 1], [1, 1])
    assert second.read.dtype == second.written.dtype == np.int32
    assert books.rows(second).tolist() == [[1, 1], [1, 1]]
    books.end()
    assert books.pos(0) == 4


def test_claims_can_be_taken_back():
    books = states()
    feed(books, (0,))
    books.begin()
    claims = [books.claim(ubatch(books, (0,), (1,))), books.claim(ubatch(books, (0,)))]
    for claim in reversed(claims):
        books.undo(claim)
    books.end()
    assert (books.pos(0), books.slot(0), books.pos(1)) == (0, 0, -1)


def test_a_failed_call_goes_back_to_the_state_of_before():
    books = states()
    feed(books, (0,))
    books.begin()
    for _ in range(3):
        books.claim(ubatch(books, (0,), (1,)))
    for seq in (0, 1):
        books.restore(seq)
    books.end()
    assert (books.pos(0), books.slot(0)) == (0, 0) and books.pos(1) == -1


def test_a_copy_is_another_owner_until_one_goes_on():
    books = states()
    feed(books, (0,))
    books.share(0, 2)
    assert books.slot(2) == books.slot(0) == 0 and books.pos(2) == 0
    read, written = feed(books, (2,))
    assert read == [0] and written != [0] and books.slot(0) == 0
    read, written = feed(books, (0,), (2,))
    assert read[0] == 0 and written[0] not in (0, read[1])
    books.share(1, 2)  # an empty one
    assert books.pos(2) == -1


def test_a_row_of_several_sequences_has_one_state():
    books = states()
    feed(books, (0, 1), (0, 1))
    assert books.slot(0) == books.slot(1) and books.pos(1) == 1
    read, written = feed(books, (0,), (1,))
    assert read[0] == read[1] and written[0] != written[1]


def test_without_snapshots_there_is_no_way_back():
    books = states()
    feed(books, (0,), (0,))
    feed(books, (0,))
    assert [books.can_go_back(0, pos) for pos in (-1, 0, 1, 2, 3)] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert not books.can_go_back(1, 0) and books.can_go_back(1, -1)
    books.go_back(0, 2)
    assert books.pos(0) == 2
    books.go_back(0, -1)
    assert books.pos(0) == -1 and books.slot(0) is None


def test_snapshots_are_of_the_ends_of_calls():
    books = states(n_snapshots=2)
    slots = []
    for n in (3, 1, 2, 1):  # ends at 2, 3, 5, 6
        feed(books, *[(0,)] * n)
        slots.append(books.slot(0))
    assert [pos for pos in range(8) if books.can_go_back(0, pos)] == [3, 5, 6]
    books.go_back(0, 5)
    assert (books.pos(0), books.slot(0)) == (5, slots[2])
    assert [pos for pos in range(8) if books.can_go_back(0, pos)] == [3, 5]
    feed(books, (0,))
    assert [pos for pos in range(8) if books.can_go_back(0, pos)] == [3, 5, 6]
    books.go_back(0, 3)
    assert books.slot(0) == slots[1] and not books.can_go_back(0, 5)


def test_a_call_that_failed_leaves_no_snapshot():
    books = states(n_snapshots=2)
    feed(books, (0,))
    books.begin()
    books.claim(ubatch(books, (0,)))
    books.restore(0)
    books.end()
    assert [pos for pos in range(3) if books.can_go_back(0, pos)] == [0]
    books.begin()
    books.claim(ubatch(books, (0,)))
    books.restore(0)
    books.remove(0)  # as another part of the memory cannot go back
    books.end()
    assert not any(books.can_go_back(0, pos) for pos in range(3))


def test_another_position():
    books = states(n_snapshots=1)
    feed(books, (0,))
    feed(books, (0,))
    slot = books.slot(0)
    books.move(0, 7)
    assert (books.pos(0), books.slot(0)) == (7, slot)
    assert not books.can_go_back(0, 0)  # which was at a position of the old count


def test_a_slot_for_a_state_that_is_loaded():
    books = states()
    feed(books, (0,), (1,))
    slot = books.place(1, 9)
    assert slot not in (None, books.slot(0)) and (books.slot(1), books.pos(1)) == (slot, 9)
    books.clear()
    assert [books.pos(s) for s in range(3)] == [-1] * 3 and books.place(0, 0) == 0


class Slots(RuleBasedStateMachine):
    """What every slot would hold, if rows were states."""

    N_SEQ = 3
    seq = st.integers(0, N_SEQ - 1)

    @initialize(n_snapshots=st.integers(0, 2))
    def start(self, n_snapshots):
        self.books = states(self.N_SEQ, n_snapshots)
        self.regions: list[tuple] = [()] * self.books.spec.n_slots
        self.held: list[tuple] = [()] * self.N_SEQ
        self.kept: list[list[tuple]] = [[] for _ in range(self.N_SEQ)]
        self.count = 0

    def write(self, claim_of: Ubatch):
        """Claim slots for a ubatch and run it."""
        claim = self.books.claim(claim_of)
        new: dict[int, tuple] = {}
        for row, read, written in zip(claim_of.seqs, claim.read, claim.written, strict=True):
            state = new.get(written, self.regions[read] if read < len(self.regions) else ())
            self.count += 1
            new[int(written)] = (*state, self.count)
            for seq in row:
                self.held[seq] = new[int(written)]
        for slot, state in new.items():
            self.regions[slot] = state
        return claim

    def rows(self, data: st.DataObject) -> tuple[tuple[int, ...], ...]:
        """Rows of one set of sequences that hold the same, or one row of each of several."""
        a, b = data.draw(self.seq), data.draw(self.seq)
        if self.books.slot(a) == self.books.slot(b) and a != b and data.draw(st.booleans()):
            return (tuple(sorted((a, b))),) * data.draw(st.integers(1, 3))
        if data.draw(st.booleans()):
            return ((a,),) * data.draw(st.integers(1, 3))
        return tuple((s,) for s in data.draw(st.permutations(range(self.N_SEQ)))[: 1 + a])

    @rule(data=st.data(), n=st.integers(1, 3), fails=st.booleans())
    def call(self, data, n, fails):
        before = list(self.held)
        ends = [self.books.pos(s) for s in range(self.N_SEQ)]
        self.books.begin()
        touched = set()
        for _ in range(n):
            rows = self.rows(data)
            touched.update(s for row in rows for s in row)
            self.write(ubatch(self.books, *rows))
        if fails:
            for seq in touched:
                self.books.restore(seq)
            self.held = before
        self.books.end()
        for seq in touched if not fails else ():
            if ends[seq] >= 0:
                self.kept[seq].append(before[seq])
        assert [self.books.pos(s) for s in range(self.N_SEQ)] == [len(h) - 1 for h in self.held]

    @rule(data=st.data(), n=st.integers(1, 3))
    def look(self, data, n):
        """Claim and take back, as a call does before it begins."""
        claims = [self.books.claim(ubatch(self.books, *self.rows(data))) for _ in range(n)]
        for claim in reversed(claims):
            self.books.undo(claim)

    @rule(source=seq, to=seq)
    def share(self, source, to):
        if source != to:
            self.books.share(source, to)
            self.held[to], self.kept[to] = self.held[source], []

    @rule(seq=seq, pos=st.integers(-1, 12))
    def go_back(self, seq, pos):
        if not self.held[seq]:
            return
        n_kept = self.books.spec.n_snapshots
        known = {len(h) - 1: h for h in (self.kept[seq][-n_kept:] if n_kept else [])}
        known |= {len(self.held[seq]) - 1: self.held[seq], -1: ()}
        assert self.books.can_go_back(seq, pos) == (pos in known)
        if pos in known:
            self.books.go_back(seq, pos)
            self.held[seq] = known[pos]
            last = self.kept[seq][-n_kept:] if n_kept else []
            self.kept[seq] = [h for h in last if len(h) - 1 < pos]

    @rule(seq=seq)
    def remove(self, seq):
        self.books.remove(seq)
        self.held[seq], self.kept[seq] = (), []

    @invariant()
    def every_sequence_has_its_state(self):
        if not hasattr(self, "books"):
            return
        for seq, rows in enumerate(self.held):
            slot = self.books.slot(seq)
            assert (slot is None) == (not rows)
            assert slot is None or self.regions[slot] == rows


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=150, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("n_snapshots", [0, 3])
def test_slots_suffice_when_all_of_them_are_in_use(n_snapshots):
    books = states(4, n_snapshots)
    for _ in range(6):
        feed(books, *[(s,) for s in range(4)])
    assert len({books.slot(s) for s in range(4)}) == 4
