"""The host's side of one cache of keys and values: which cells, in which stream, at what position.

All sequences share one stream of cells, or each has its own. The regions themselves are only handed
on: what lies in a cell that no sequence holds is garbage that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from minfer_jax.batch import Ubatch
from minfer_jax.memory.cells import Cells, Undo
from minfer_jax.memory.plan import CacheSpec


@dataclass(frozen=True)
class CacheClaim:
    """Cells that one ubatch writes: those of its rows int32 [n], and how to give them back."""

    cells: np.ndarray
    undo: tuple[tuple[int, Undo], ...]


class KVCache:
    """The books of one `CacheSpec`."""

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.streams = [Cells(spec.stream_size, spec.n_seq) for _ in range(spec.n_stream)]

    @property
    def unified(self) -> bool:
        return self.spec.n_stream == 1

    def at(self, seq: int) -> tuple[Cells, int]:
        """The stream of a sequence, and the sequence's number there."""
        return (self.streams[0], seq) if self.unified else (self.streams[seq], 0)

    def first_cell(self, seq: int) -> int:
        """Where a sequence's stream begins in the regions."""
        return 0 if self.unified else seq * self.spec.stream_cells

    # --- claiming cells -------------------------------------------------------------------------

    def claim(self, ubatch: Ubatch) -> CacheClaim | None:
        """Cells for a ubatch's rows; None, and nothing changed, if there are not enough."""
        if self.unified:
            found = self._claim(0, ubatch.pos, ubatch.seqs)
            return None if found is None else CacheClaim(found[0], ((0, found[1]),))
        cells = np.empty(len(ubatch.pos), np.int32)
        undo: list[tuple[int, Undo]] = []
        for seq in dict.fromkeys(ubatch.seq_id.tolist()):
            rows = np.flatnonzero(ubatch.seq_id == seq)
            found = self._claim(seq, ubatch.pos[rows], [(0,)] * len(rows))
            if found is None:
                self._undo(undo)
                return None
            cells[rows] = found[0] + np.int32(self.first_cell(seq))
            undo.append((seq, found[1]))
        return CacheClaim(cells, tuple(undo))

    def _claim(
        self, stream: int, pos: np.ndarray, seqs: Sequence[tuple[int, ...]]
    ) -> tuple[np.ndarray, Undo] | None:
        cells = self.streams[stream]
        reusable = partial(self._out_of_window, cells) if self.spec.window else None
        return cells.claim(pos, seqs, reusable)

    def _out_of_window(self, cells: Cells) -> np.ndarray:
        """Which cells no next token of any of their sequences will see: bool [n]."""
        seen = np.zeros(len(cells), bool)
        for seq in cells.sequences():
            first = cells.range(seq).pos_max + 2 - self.spec.window
            seen |= cells.held(seq) & (cells.pos >= first)
        return ~seen

    def undo(self, claim: CacheClaim) -> None:
        """Take a claim back; the last one first."""
        self._undo(list(claim.undo))

    def _undo(self, undo: list[tuple[int, Undo]]) -> None:
        for stream, each in reversed(undo):
            self.streams[stream].undo(each)

    def find(self, stream: int, n: int, *, reuse: bool) -> np.ndarray | None:
        """Cells of a stream that could be taken: int32 [n]; None if there are not enough.

        With `reuse` also those that no sliding window sees any more.
        """
        cells = self.streams[stream]
        reusable = partial(self._out_of_window, cells) if reuse and self.spec.window else None
        return cells.find(n, reusable)

    # --- what a graph is fed --------------------------------------------------------------------

    def straight(self, ubatch: Ubatch) -> bool:
        """Whether what each row sees is one run of cells, in the order of positions."""
        if self.spec.window:
            return False
        seqs = dict.fromkeys(row[0] for row in ubatch.seqs)
        return all(cells.range(s).straight for cells, s in map(self.at, seqs))

    def rows(self, ubatch: Ubatch, cells: np.ndarray, mapped: bool) -> np.ndarray:
        """Cell, first and last cell seen of every row: int32 [3, n].

        Of mapped rows the last two only say in which cells to look.
        """
        rows = np.empty((3, len(cells)), np.int32)
        rows[0] = cells
        if not mapped:
            first = {s: self._run_begin(s) for s in {row[0] for row in ubatch.seqs}}
            rows[1] = [first[row[0]] for row in ubatch.seqs]
            rows[2] = cells
            return rows
        extent = {
            s: self._extent(s) for s in {0 if self.unified else row[0] for row in ubatch.seqs}
        }
        rows[1:] = np.array(
            [extent[0 if self.unified else row[0]] for row in ubatch.seqs], np.int32
        ).T
        return rows

    def _run_begin(self, seq: int) -> int:
        cells, local = self.at(seq)
        return self.first_cell(seq) + cells.range(local).first_cell

    def _extent(self, seq: int) -> tuple[int, int]:
        """The first and the last cell in use of a sequence's stream."""
        used = np.flatnonzero(self.at(seq)[0].pos >= 0)
        begin = self.first_cell(seq)
        return begin + int(used[0]), begin + int(used[-1])

    def map(self) -> np.ndarray:
        """Positions and masks of all cells: int32 [1 + words, n_cells], fresh."""
        spec = self.spec
        out = np.zeros((1 + spec.words, spec.n_cells), np.int32)
        out[0] = -1
        for i, cells in enumerate(self.streams):
            begin = i * spec.stream_cells
            out[0, begin : begin + len(cells)] = cells.pos
            out[1:, begin : begin + len(cells)] = cells.bits.view(np.int32)
        return out

    # --- operations on sequences ----------------------------------------------------------------

    def pos_min(self, seq: int) -> int:
        cells, local = self.at(seq)
        return cells.range(local).pos_min

    def pos_max(self, seq: int) -> int:
        cells, local = self.at(seq)
        return cells.range(local).pos_max

    def first_needed(self, pos: int) -> int:
        """The first position that a token at `pos` sees."""
        return max(0, pos + 1 - self.spec.window) if self.spec.window else 0

    def positions(self, seq: int) -> np.ndarray:
        """Where the tokens of a sequence are that are held: int32, in no order."""
        cells, local = self.at(seq)
        return cells.pos[cells.held(local)]

    def alike(self, a: int, b: int) -> bool:
        """Whether two sequences hold the same cells of one stream."""
        cells = self.streams[0]
        return self.unified and bool((cells.held(a) == cells.held(b)).all())

    def remove(self, seq: int, p0: int, p1: int) -> None:
        cells, local = self.at(seq)
        cells.remove(local, p0, p1)

    def share(self, source: int, target: int, p0: int, p1: int) -> None:
        """Make `target` hold what `source` holds in p0..p1, and nothing else. The regions are not
        changed: streams of their own are to be copied."""
        if self.unified:
            self.streams[0].remove(target, 0, self.pos_max(target) + 1)
            self.streams[0].share(source, target, p0, p1)
        else:
            self.streams[target].take(self.streams[source], p0, p1)

    def move(self, seq: int, p0: int, p1: int, to: Callable[[np.ndarray], np.ndarray]) -> None:
        cells, local = self.at(seq)
        cells.move(local, p0, p1, to)

    def shared(self, seq: int, p0: int, p1: int) -> bool:
        """Whether other sequences hold any of these tokens, too."""
        cells, local = self.at(seq)
        return cells.shared(local, p0, p1)

    @property
    def shifted(self) -> bool:
        """Whether the position of any cell has changed since its key was rotated."""
        return any(cells.moved for cells in self.streams)

    def shifts(self) -> np.ndarray:
        """By how much each cell's key has to be rotated further: int32 [n_cells]."""
        out = np.zeros(self.spec.n_cells, np.int32)
        for i, cells in enumerate(self.streams):
            begin = i * self.spec.stream_cells
            out[begin : begin + len(cells)] = cells.shift
        return out

    def forget_shifts(self) -> None:
        """All keys have been rotated."""
        for cells in self.streams:
            cells.shift.fill(0)
            cells.moved = False

    def order(self) -> np.ndarray | None:
        """Where each cell's content is to come from to make sequences straight: int32 [n_cells];
        None if they are, or cannot be any straighter."""
        if all(c.range(s).straight for c in self.streams for s in c.sequences()):
            return None
        base = np.arange(self.spec.n_cells, dtype=np.int32)
        moves = base.copy()
        for i, cells in enumerate(self.streams):
            begin = i * self.spec.stream_cells
            moves[begin : begin + len(cells)] = cells.order() + np.int32(begin)
        return None if (moves == base).all() else moves

    def permute(self, order: np.ndarray) -> None:
        for i, cells in enumerate(self.streams):
            begin = i * self.spec.stream_cells
            cells.permute(order[begin : begin + len(cells)] - begin)

    def clear(self) -> None:
        for cells in self.streams:
            cells.clear()
