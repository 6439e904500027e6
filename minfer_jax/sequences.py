"""Operations on a context's sequences: what is forgotten, shared, moved.

Positions `p0` <= p < `p1` are meant; a negative `p0` is the beginning, a negative `p1` the end, and
a range that is empty changes nothing. What an operation cannot do it does not do in part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from minfer_jax.errors import UsageError
from minfer_jax.memory.memory import END

if TYPE_CHECKING:
    from minfer_jax.context import Context

_MAX_POSITION = (1 << 31) - 1


class Sequences:
    """The sequences of one context, which are numbered from 0."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = context.store

    def __len__(self) -> int:
        return self._context.n_seq_max

    def n_past(self, seq: int = 0) -> int:
        """The next position of a sequence."""
        return self._store.pos_max(self._checked(seq)) + 1

    @property
    def lengths(self) -> tuple[int, ...]:
        """The next position of every sequence."""
        return tuple(self._store.ends())

    @property
    def bytes_per_cell(self) -> int:
        """Bytes that one token occupies in the caches of keys and values."""
        return self._store.plan.bytes_per_cell

    @property
    def can_shift(self) -> bool:
        """Whether positions of tokens can be changed (`seq_add`, `seq_div`)."""
        return self._store.can_shift

    def seq_pos_min(self, seq: int) -> int:
        """The first position of a sequence that all layers still hold; -1 if it is empty.

        Layers with a sliding window forget what is behind it; a recurrent layer holds the last
        position only.
        """
        return self._store.pos_min(self._checked(seq))

    def seq_pos_max(self, seq: int) -> int:
        """The last position of a sequence; -1 if it is empty."""
        return self._store.pos_max(self._checked(seq))

    def clear(self) -> None:
        """Forget all tokens and outputs."""
        with self._context.alone():
            self._store.clear()
            self._context.history.clear()
            self._context.forget_outputs()

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> bool:
        """Forget tokens of a sequence (-1: of every one).

        False, and nothing changed, where a sliding window or a recurrent state has forgotten what
        the rest would see: clear the sequence and feed it again.
        """
        with self._context.alone():
            seqs = [self._checked(seq, lowest=-1)]
            if seq == -1:
                seqs = list(range(len(self)))
            p0, p1 = _range(p0, p1)
            if not all(self._store.can_remove(s, p0, p1) for s in seqs):
                return False
            for s in seqs:
                self._store.remove(s, p0, p1)
                self._context.history.remove(s, p0, p1)
            return True

    def seq_cp(self, source: int, target: int, p0: int = -1, p1: int = -1) -> bool:
        """Make `target` hold what `source` holds, and nothing else.

        Nothing is copied where sequences share their cells; a stream of cells of its own is. False,
        and nothing changed, where a part of the source cannot go on by itself.
        """
        with self._context.alone():
            source, target = self._checked(source), self._checked(target)
            p0, p1 = _range(p0, p1)
            if source == target or p0 >= p1:
                return True
            if not self._store.can_share(source, p0, p1):
                return False
            with self._context.changing_regions("a copy"):
                self._store.share(source, target, p0, p1)
            self._context.history.copy(source, target, p0, p1)
            return True

    def seq_keep(self, seq: int) -> None:
        """Forget every sequence but this one."""
        with self._context.alone():
            kept = self._checked(seq)
            for s in range(len(self)):
                if s != kept:
                    self._store.remove(s, 0, END)
                    self._context.history.remove(s, 0, END)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> bool:
        """Add `delta` to positions; tokens whose position would be negative are forgotten.

        Keys are rotated before the next batch, once, by the sum of all changes. False, and nothing
        changed, where a sliding window has forgotten what would be seen again. Raises `UsageError`
        for a memory that cannot, and for tokens that another sequence shares.
        """
        delta = _position("delta", delta)
        if self.seq_pos_max(seq) + delta > _MAX_POSITION:
            raise UsageError(f"a delta of {delta} leads past position {_MAX_POSITION}")
        if delta == 0:
            return True
        return self._move(seq, p0, p1, lambda pos: pos + np.int32(delta))

    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> bool:
        """Divide positions by `d`, rounded down; otherwise as `seq_add`."""
        if isinstance(d, bool) or not isinstance(d, int) or not 1 <= d <= _MAX_POSITION:
            raise UsageError(f"the divisor is {d!r}; allowed: 1 to {_MAX_POSITION}")
        return d == 1 or self._move(seq, p0, p1, lambda pos: pos // np.int32(d))

    def _move(self, seq: int, p0: int, p1: int, to: Callable[[np.ndarray], np.ndarray]) -> bool:
        with self._context.alone():
            seq = self._checked(seq)
            p0, p1 = _range(p0, p1)
            if not self.can_shift:
                raise UsageError("the positions of this model's tokens cannot be changed")
            if self._store.shared(seq, p0, p1):
                raise UsageError(
                    f"tokens of sequence {seq} are shared with another sequence, whose positions"
                    " would change, too"
                )
            if not self._store.can_move(seq, p0, p1, to):
                return False
            if p0 < p1 and p0 <= self._store.pos_max(seq):
                self._store.move(seq, p0, p1, to)
                self._context.history.spoil(seq)
            return True

    def defrag(self) -> bool:
        """Move tokens so that each sequence lies in one run of cells, where sequences share none.

        Nothing needs it: scattered cells are found through a map. It makes steps cheaper again
        after removals. False if there was nothing to do.
        """
        with self._context.alone(), self._context.changing_regions("a defragmentation"):
            return self._store.defrag()

    def _checked(self, seq: int, lowest: int = 0) -> int:
        if isinstance(seq, bool) or not isinstance(seq, int | np.integer):
            raise UsageError(f"the sequence is {seq!r}, not an integer")
        if not lowest <= seq < len(self):
            raise UsageError(f"the sequence is {seq}; allowed: {lowest} to {len(self) - 1}")
        return int(seq)


def _range(p0: int, p1: int) -> tuple[int, int]:
    p0, p1 = _position("p0", p0), _position("p1", p1)
    return max(p0, 0), END if p1 < 0 else p1


def _position(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise UsageError(f"{name} is {value!r}, not an integer")
    if not -_MAX_POSITION <= value <= _MAX_POSITION:
        raise UsageError(f"{name} is {value}; allowed: {-_MAX_POSITION} to {_MAX_POSITION}")
    return int(value)
