"""The host's side of recurrent states: which slot holds the state of which sequence.

A step reads a sequence's state from one slot and writes it to another or the same. So a copy of a
sequence is a second owner of its slot until one of them goes on, and a call that fails goes back to
the slots of before it: those are not written while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minfer_jax.batch import Ubatch
from minfer_jax.memory.plan import RecurrentSpec


@dataclass(frozen=True)
class Tail:
    """The state of a sequence after its token at `pos`."""

    pos: int
    slot: int


@dataclass(frozen=True)
class StateClaim:
    """Slots that a ubatch's rows read and write, int32 [n] each, and the books of before."""

    read: np.ndarray
    written: np.ndarray
    tails: dict[int, Tail]


class RecurrentStates:
    """The books of one `RecurrentSpec`."""

    def __init__(self, spec: RecurrentSpec) -> None:
        self.spec = spec
        self._tails: dict[int, Tail] = {}
        self._kept: dict[int, tuple[Tail, ...]] = {}
        """Earlier states of a sequence, oldest first."""
        self._pinned: dict[int, Tail] = {}
        """What the running call would go back to."""

    def begin(self) -> None:
        """A call begins: what there is now must outlive it."""
        self._pinned = dict(self._tails)

    def end(self) -> None:
        """A call has ended: of what was there before it, keep as many states as are asked for."""
        for seq, was in self._pinned.items():
            if self.spec.n_snapshots and self._tails.get(seq) != was:
                self._kept[seq] = (*self._kept.get(seq, ()), was)[-self.spec.n_snapshots :]
        self._pinned = {}

    def claim(self, ubatch: Ubatch) -> StateClaim:
        """Slots for a ubatch. Rows of one sequence read and write the same ones."""
        before = dict(self._tails)
        slots: dict[int, tuple[int, int]] = {}
        for i, row in enumerate(ubatch.seqs):
            seq = row[0]
            was = self._tails.get(seq)
            if seq not in slots:
                read = self.spec.n_slots if was is None else was.slot
                alone = was is not None and self._owners(was.slot) == 1
                slots[seq] = (read, read if alone else self._free())
            for each in row:
                self._tails[each] = Tail(int(ubatch.pos[i]), slots[seq][1])
        pairs = np.array([slots[row[0]] for row in ubatch.seqs], np.int32).T
        return StateClaim(pairs[0], pairs[1], before)

    def _owners(self, slot: int) -> int:
        held = [*self._tails.values(), *self._pinned.values()]
        for kept in self._kept.values():
            held += kept
        return sum(tail.slot == slot for tail in held)

    def _free(self) -> int:
        used = {tail.slot for tail in (*self._tails.values(), *self._pinned.values())}
        used |= {tail.slot for kept in self._kept.values() for tail in kept}
        return next(slot for slot in range(self.spec.n_slots) if slot not in used)

    def restore(self, seq: int) -> None:
        """Return to what there was of a sequence when the call began."""
        was = self._pinned.get(seq)
        if was is None:
            self._tails.pop(seq, None)
        else:
            self._tails[seq] = was

    def undo(self, claim: StateClaim) -> None:
        self._tails = dict(claim.tails)

    def rows(self, claim: StateClaim) -> np.ndarray:
        """Slots read and written by every row: int32 [2, n]."""
        return np.stack([claim.read, claim.written])

    def pos(self, seq: int) -> int:
        """The position of a sequence's last token, which is all that its state tells; -1: none."""
        tail = self._tails.get(seq)
        return -1 if tail is None else tail.pos

    def slot(self, seq: int) -> int | None:
        """Where a sequence's state lies."""
        tail = self._tails.get(seq)
        return None if tail is None else tail.slot

    def place(self, seq: int, pos: int) -> int:
        """A slot of its own for a state that is about to be loaded."""
        self.remove(seq)
        slot = self._free()
        self._tails[seq] = Tail(pos, slot)
        return slot

    def can_go_back(self, seq: int, pos: int) -> bool:
        """Whether the state after `pos` (-1: before any token) is known."""
        known = [self._tails[seq]] if seq in self._tails else []
        known += self._kept.get(seq, ())
        return pos < 0 or any(tail.pos == pos for tail in known)

    def go_back(self, seq: int, pos: int) -> None:
        """Return to the state after `pos`, which is known; -1: forget the sequence."""
        if pos < 0:
            return self.remove(seq)
        kept = self._kept.get(seq, ())
        if self._tails[seq].pos != pos:
            self._tails[seq] = next(tail for tail in kept if tail.pos == pos)
        self._kept[seq] = tuple(tail for tail in kept if tail.pos < pos)

    def remove(self, seq: int) -> None:
        """Forget a sequence, also as something that a running call would go back to."""
        for books in (self._tails, self._kept, self._pinned):
            books.pop(seq, None)

    def share(self, source: int, target: int) -> None:
        """Make `target` go on from where `source` is."""
        self.remove(target)
        if source in self._tails:
            self._tails[target] = self._tails[source]

    def move(self, seq: int, pos: int) -> None:
        """Give a sequence's last token another position."""
        self._kept.pop(seq, None)
        self._tails[seq] = Tail(pos, self._tails[seq].slot)

    def clear(self) -> None:
        self._tails, self._kept, self._pinned = {}, {}, {}
