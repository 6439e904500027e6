"""Which token lies where: position and sequences of every cell of one stream, on the host.

Sequences are numbered within the stream. The arrays are the truth; what is remembered of each
sequence beside them (`SeqRange`) only saves looking through all cells at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from minfer_jax.memory.plan import WORD

_EMPTY = -1


@dataclass(frozen=True)
class SeqRange:
    """What one sequence holds. `first_cell` >= 0: a straight run of cells from there on, one
    position after the other."""

    n: int = 0
    pos_min: int = -1
    pos_max: int = -1
    first_cell: int = -1

    @property
    def straight(self) -> bool:
        return self.n == 0 or self.first_cell >= 0


@dataclass(frozen=True)
class Undo:
    """What a claim replaced."""

    cells: np.ndarray | slice
    pos: np.ndarray
    bits: np.ndarray
    shift: np.ndarray
    head: int
    ranges: dict[int, SeqRange | None]


class Cells:
    """`n` cells for `n_seq` sequences. A position is -1 where a cell is empty."""

    def __init__(self, n: int, n_seq: int) -> None:
        words = -(-n_seq // WORD)
        self.n_seq = n_seq
        self.pos = np.full(n, _EMPTY, np.int32)
        self.bits = np.zeros((words, n), np.uint32)
        """Sequences of a cell: bit 32w + b of sequence 32w + b."""
        self.shift = np.zeros(n, np.int32)
        """By how much a cell's position has moved since its key was rotated."""
        self.moved = False
        """Whether any has."""
        self.head = 0
        """Where the search for empty cells begins."""
        self._ranges: list[SeqRange | None] = [SeqRange()] * n_seq

    def __len__(self) -> int:
        return len(self.pos)

    @property
    def used(self) -> int:
        return int(np.count_nonzero(self.pos >= 0))

    def held(self, seq: int) -> np.ndarray:
        """Which cells hold a token of a sequence: bool [n]."""
        return (self.bits[seq // WORD] >> np.uint32(seq % WORD) & np.uint32(1)).astype(bool)

    def range(self, seq: int) -> SeqRange:
        """What a sequence holds."""
        found = self._ranges[seq]
        if found is None:
            found = self._ranges[seq] = self._measure(seq)
        return found

    def _measure(self, seq: int) -> SeqRange:
        cells = np.flatnonzero(self.held(seq))
        n = len(cells)
        if n == 0:
            return SeqRange()
        pos = self.pos[cells]
        low, high = int(pos.min()), int(pos.max())
        run = cells[-1] - cells[0] == n - 1 == high - low
        straight = run and bool((np.diff(pos) == 1).all())
        return SeqRange(n, low, high, int(cells[0]) if straight else -1)

    def sequences(self) -> list[int]:
        """Those that hold a token."""
        return [seq for seq in range(self.n_seq) if self.range(seq).n]

    def claim(
        self,
        pos: np.ndarray,
        seqs: Sequence[Sequence[int]],
        reusable: Callable[[], np.ndarray] | None = None,
    ) -> tuple[np.ndarray, Undo] | None:
        """Cells int32 [n] for tokens at `pos` of `seqs`, and how to give them back.

        `reusable` tells cells that may be overwritten though they hold a token: bool [n]. None, and
        nothing changed, if there are not enough.
        """
        cells = self.find(len(pos), reusable)
        if cells is None:
            return None
        lost = self._sequences_of(cells) if reusable else []
        touched = {*lost, *(seq for row in seqs for seq in row)}
        begin, end = int(cells[0]), int(cells[-1]) + 1
        # What a slice takes is neither looked up nor scattered: this runs for every row of a step.
        where = slice(begin, end) if end - begin == len(cells) else cells
        undo = Undo(
            where,
            self.pos[where].copy(),
            self.bits[:, where].copy(),
            self.shift[where].copy(),
            self.head,
            {seq: self._ranges[seq] for seq in touched},
        )
        self.pos[where] = pos
        self.shift[where] = 0
        self.bits[:, where] = self._masks(seqs)
        self.head = end % len(self)
        for seq in lost:
            self._ranges[seq] = None
        self._extend(cells, pos, seqs)
        return cells, undo

    def put(self, cells: np.ndarray, pos: np.ndarray, masks: np.ndarray) -> None:
        """Hold tokens of any positions in these cells, whatever is in them; masks as in `bits`."""
        touched = self._sequences_of(cells)
        self.pos[cells] = pos
        self.shift[cells] = 0
        self.bits[:, cells] = masks
        self.head = (int(cells[-1]) + 1) % len(self)
        for seq in {*touched, *self._sequences_of(cells)}:
            self._ranges[seq] = None

    def undo(self, undo: Undo) -> None:
        """Take a claim back; the last one first."""
        self.pos[undo.cells] = undo.pos
        self.bits[:, undo.cells] = undo.bits
        self.shift[undo.cells] = undo.shift
        self.head = undo.head
        for seq, was in undo.ranges.items():
            self._ranges[seq] = was

    def find(self, n: int, reusable: Callable[[], np.ndarray] | None) -> np.ndarray | None:
        """The next n usable cells in the ring that begins at the head; None if there are fewer."""
        if self.head + n <= len(self):
            run = slice(self.head, self.head + n)
            if (self.pos[run] < 0).all():
                return np.arange(run.start, run.stop, dtype=np.int32)
        usable = self.pos < 0
        if reusable is not None and np.count_nonzero(usable) < n:
            usable |= reusable()
        cells = np.flatnonzero(usable).astype(np.int32)
        if len(cells) < n:
            return None
        start = int(np.searchsorted(cells, self.head))
        return np.concatenate([cells[start:], cells[:start]])[:n]

    def _masks(self, seqs: Sequence[Sequence[int]]) -> np.ndarray:
        """The masks of rows' sequences: uint32 [words, n]."""
        masks = np.zeros((len(self.bits), len(seqs)), np.uint32)
        for i, row in enumerate(seqs):
            for seq in row:
                masks[seq // WORD, i] |= np.uint32(1 << seq % WORD)
        return masks

    def _sequences_of(self, cells: np.ndarray) -> list[int]:
        together = np.bitwise_or.reduce(self.bits[:, cells], axis=1).tolist()
        return [
            32 * word + bit
            for word, mask in enumerate(together)
            if mask
            for bit in range(WORD)
            if mask >> bit & 1
        ]

    def _extend(self, cells: np.ndarray, pos: np.ndarray, seqs: Sequence[Sequence[int]]) -> None:
        """Note tokens that go on where their sequences end."""
        rows: dict[int, list[int]] = {}
        for i, row in enumerate(seqs):
            for seq in row:
                rows.setdefault(seq, []).append(i)
        for seq, which in rows.items():
            held = self._ranges[seq]
            if held is None:
                continue
            first, last, n = which[0], which[-1], len(which)
            begin = int(cells[first])
            run = n == 1 or (
                int(cells[last]) - begin == n - 1 and bool((np.diff(cells[which]) == 1).all())
            )
            low, high = int(pos[first]), int(pos[last])
            follows = held.n == 0 or (
                held.first_cell >= 0
                and held.first_cell + held.n == begin
                and held.pos_max + 1 == low
            )
            self._ranges[seq] = SeqRange(
                held.n + n,
                held.pos_min if held.n else low,
                high,
                (held.first_cell if held.n else begin) if run and follows else -1,
            )

    def remove(self, seq: int, p0: int, p1: int) -> None:
        """Forget the tokens of a sequence at p0 <= position < p1."""
        held = self.range(seq)
        if not held.n or p0 > held.pos_max or p1 <= held.pos_min:
            return
        if held.first_cell >= 0:
            begin = held.first_cell + max(p0 - held.pos_min, 0)
            end = held.first_cell + min(p1 - held.pos_min, held.n)
            cells = np.arange(begin, end, dtype=np.int32)
        else:
            mask = self.held(seq) & (self.pos >= p0) & (self.pos < p1)
            cells = np.flatnonzero(mask).astype(np.int32)
        self._drop(seq, cells)
        if held.first_cell >= 0 and p1 > held.pos_max:  # a tail: the rest stays straight
            n = max(p0 - held.pos_min, 0)
            shorter = replace(held, n=n, pos_max=held.pos_min + n - 1)
            self._ranges[seq] = shorter if n else SeqRange()
        else:
            self._ranges[seq] = None

    def _drop(self, seq: int, cells: np.ndarray) -> None:
        """Take a sequence off cells; what belongs to nobody then is empty."""
        if not len(cells):
            return
        self.bits[seq // WORD, cells] &= ~np.uint32(1 << seq % WORD)
        freed = cells[~self.bits[:, cells].any(axis=0)]
        if len(freed):
            self.pos[freed] = _EMPTY
            self.shift[freed] = 0
            self.head = min(self.head, int(freed[0]))

    def share(self, source: int, target: int, p0: int, p1: int) -> None:
        """Let `target`, which is empty, hold what `source` holds at p0 <= position < p1."""
        held = self.range(source)
        mask = self.held(source)
        if p0 > held.pos_min or p1 <= held.pos_max:
            mask &= (self.pos >= p0) & (self.pos < p1)
        self.bits[target // WORD, mask] |= np.uint32(1 << target % WORD)
        whole = p0 <= held.pos_min and p1 > held.pos_max
        self._ranges[target] = held if whole else None

    def shared(self, seq: int, p0: int, p1: int) -> bool:
        """Whether another sequence holds any of these tokens, too."""
        mask = self.held(seq) & (self.pos >= p0) & (self.pos < p1)
        others = self.bits[:, mask].copy()
        others[seq // WORD] &= ~np.uint32(1 << seq % WORD)
        return bool(others.any())

    def move(self, seq: int, p0: int, p1: int, to: Callable[[np.ndarray], np.ndarray]) -> None:
        """Give the tokens at p0 <= position < p1 other positions; a negative one is forgotten."""
        cells = np.flatnonzero(self.held(seq) & (self.pos >= p0) & (self.pos < p1))
        if not len(cells):
            return
        old = self.pos[cells]
        new = to(old).astype(np.int32)
        self.shift[cells] += new - old
        self.moved = True
        self.pos[cells] = new
        self._ranges[seq] = None
        self._drop(seq, cells[new < 0].astype(np.int32))

    def order(self) -> np.ndarray:
        """A permutation int32 [n] that makes sequences straight where it can: cell i is to hold
        what cell order[i] holds. Empty cells come last."""
        lowest = np.full(len(self), self.n_seq, np.int64)
        for seq in reversed(self.sequences()):
            lowest[self.held(seq)] = seq
        return np.lexsort((self.pos, lowest)).astype(np.int32)

    def permute(self, order: np.ndarray) -> None:
        """Move the books as the regions were."""
        self.pos, self.shift = self.pos[order], self.shift[order]
        self.bits = self.bits[:, order]
        self.head = self.used % len(self)
        self._ranges = [None] * self.n_seq

    def clear(self) -> None:
        """Forget everything."""
        self.pos.fill(_EMPTY)
        self.bits.fill(0)
        self.shift.fill(0)
        self.moved = False
        self.head = 0
        self._ranges = [SeqRange()] * self.n_seq

    def take(self, other: Cells, p0: int, p1: int) -> None:
        """Hold what another stream of as many cells holds of its one sequence in p0..p1."""
        self.pos, self.bits = other.pos.copy(), other.bits.copy()
        self.shift, self.moved, self.head = other.shift.copy(), other.moved, other.head
        self._ranges = list(other._ranges)
        held = self.range(0)
        if held.n:
            self.remove(0, -1, p0)
            self.remove(0, p1, held.pos_max + 1)
