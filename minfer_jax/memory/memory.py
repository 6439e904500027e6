"""All that a context remembers: the regions on the device, and the books of every part.

A part is a cache of keys and values (`kv`) or the recurrent states (`recurrent`); a plan says which
of them there are. An operation on sequences is carried out by all parts or by none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax import Array

from minfer_jax.batch import Ubatch
from minfer_jax.device import Device
from minfer_jax.memory.kv import CacheClaim, KVCache
from minfer_jax.memory.plan import MemoryPlan
from minfer_jax.memory.recurrent import RecurrentStates, StateClaim
from minfer_jax.memory.regions import CellMove, copy_cells, permute_cells, shift_keys
from minfer_jax.models.hparams import HParams
from minfer_jax.ops.cpu.pages import zeros

END = 1 << 31
"""A position behind every other."""

_GONE = np.int32(-1)
"""The position of a token that is forgotten."""


@dataclass(frozen=True)
class Claim:
    """What one ubatch writes, part by part."""

    caches: tuple[CacheClaim, ...]
    states: StateClaim | None


class Memory:
    """Regions of a plan, made at first use, and what lies in them."""

    def __init__(self, plan: MemoryPlan, device: Device, n_seq_max: int) -> None:
        self.plan = plan
        self.n_seq_max = n_seq_max
        self.caches = tuple(KVCache(spec) for spec in plan.caches)
        self.states = RecurrentStates(plan.recurrent) if plan.recurrent else None
        self._device = device
        self._regions: tuple[Array, ...] | None = None
        self._ready: Claim | None = None

    # --- the regions ----------------------------------------------------------------------------

    @property
    def lost(self) -> bool:
        """Whether regions were donated to a program whose outputs never came back."""
        return any(region.is_deleted() for region in self._regions or ())

    def abstract_regions(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and types of the regions, to trace with."""
        sharding = jax.sharding.SingleDeviceSharding(self._device)
        layout = self.plan.layout
        return tuple(jax.ShapeDtypeStruct(s, t, sharding=sharding) for s, t in layout)

    def regions(self) -> tuple[Array, ...]:
        """The regions, to be donated to a step whose outputs go to `take_back`.

        They are made on the device: one that came from the host would not be donated in place.
        """
        if self._regions is None:
            self._regions = zeros(self.plan.layout, self._device)
        return self._regions

    def take_back(self, regions: tuple[Array, ...]) -> None:
        """The regions as a step returned them."""
        self._regions = regions

    def draft(self) -> Memory:
        """A copy of all books, over the same regions: to be changed and adopted, or forgotten."""
        other = copy.copy(self)
        other.caches, other.states = copy.deepcopy((self.caches, self.states))
        return other

    def adopt(self, draft: Memory) -> None:
        """Hold what a draft holds, whose regions have been written."""
        self.caches, self.states, self._regions = draft.caches, draft.states, draft._regions

    def drop(self) -> None:
        """Forget everything, the regions too: a step failed after they were donated to it."""
        self._regions = None
        self.clear()

    # --- claiming room --------------------------------------------------------------------------

    def begin(self, ubatches: Sequence[Ubatch]) -> bool:
        """A call begins, whose claims may all be taken back until `end`.

        False, and nothing changed, unless all ubatches find room, one after the other.
        """
        if self.states:
            self.states.begin()
        claims: list[Claim] = []
        for ubatch in ubatches:
            claim = self.claim(ubatch)
            if claim is None:
                break
            claims.append(claim)
        fits = len(claims) == len(ubatches)
        if fits and len(claims) == 1:
            self._ready = claims[0]  # which need not be found again
            return True
        for claim in reversed(claims):
            self.undo(claim)
        if not fits:
            self.end()
        return fits

    def next_claim(self, ubatch: Ubatch) -> Claim:
        """Room for the next ubatch of this call."""
        claim, self._ready = self._ready or self.claim(ubatch), None
        assert claim is not None, "the call found room for all of its ubatches"
        return claim

    def end(self) -> None:
        """The call is over."""
        self._ready = None
        if self.states:
            self.states.end()

    def claim(self, ubatch: Ubatch) -> Claim | None:
        """Room for a ubatch's rows; None, and nothing changed, if there is not enough."""
        claims: list[CacheClaim] = []
        for cache in self.caches:
            claim = cache.claim(ubatch)
            if claim is None:
                for part, done in zip(self.caches, claims, strict=False):
                    part.undo(done)
                return None
            claims.append(claim)
        return Claim(tuple(claims), self.states.claim(ubatch) if self.states else None)

    def undo(self, claim: Claim) -> None:
        """Take a claim back; the last one first."""
        for cache, part in zip(self.caches, claim.caches, strict=True):
            cache.undo(part)
        if self.states and claim.states:
            self.states.undo(claim.states)

    def go_back(self, seq: int, end: int) -> bool:
        """Return to the first `end` positions of a sequence after steps of this call may have run.

        False if it had to be forgotten: what the steps overwrote would be seen again.
        """
        if self.states:
            self.states.restore(seq)
        possible = self._can_go_on(seq, lambda pos: np.where(pos < end, pos, _GONE))
        for cache in self.caches:
            cache.remove(seq, end if possible else 0, END)
        if self.states and not possible:
            self.states.remove(seq)
        return possible

    def _can_go_on(self, seq: int, change: Callable[[np.ndarray], np.ndarray]) -> bool:
        """Whether sliding windows hold all that the next token of a sequence sees in them, once
        `change` gives its tokens other positions (a negative one: forgotten)."""
        rolling = [cache for cache in self.caches if cache.spec.window]
        if not rolling:
            return True
        whole = [cache for cache in self.caches if not cache.spec.window]
        fed = whole[0].positions(seq) if whole else np.arange(self.pos_max(seq) + 1, dtype=np.int32)
        fed = change(fed)
        for cache in rolling:
            first = cache.first_needed(int(fed.max(initial=-1)) + 1)
            held = change(cache.positions(seq))
            if np.count_nonzero(held >= first) < np.count_nonzero(fed >= first):
                return False
        return True

    # --- what a graph is fed --------------------------------------------------------------------

    def straight(self, ubatch: Ubatch) -> bool:
        """Whether what rows see is one run of cells in every cache that can say so."""
        return all(cache.spec.window or cache.straight(ubatch) for cache in self.caches)

    def rows(self, ubatch: Ubatch, claim: Claim, mapped: bool) -> list[np.ndarray]:
        """What each part says of the rows, in the order of the plan: int32 [fields, n] each."""
        parts = [
            cache.rows(ubatch, part.cells, mapped or bool(cache.spec.window))
            for cache, part in zip(self.caches, claim.caches, strict=True)
        ]
        if self.states and claim.states:
            parts.append(self.states.rows(claim.states))
        return parts

    @property
    def unified(self) -> bool:
        """Whether sequences share their cells."""
        return any(cache.unified for cache in self.caches)

    def numbers(self, ubatch: Ubatch) -> np.ndarray:
        """The rows' sequences as the masks of cells number them: int32 [n]."""
        alone = self.caches and not self.unified
        return np.zeros(len(ubatch), np.int32) if alone else ubatch.seq_id

    def maps(self, mapped: bool) -> tuple[np.ndarray, ...]:
        """Positions and masks of the cells of the caches whose rows are mapped."""
        return tuple(cache.map() for cache in self.caches if mapped or cache.spec.window)

    # --- sequences ------------------------------------------------------------------------------

    def pos_min(self, seq: int) -> int:
        """The first position that all parts still hold; -1 if the sequence is empty."""
        found = [cache.pos_min(seq) for cache in self.caches]
        return max(found + ([self.states.pos(seq)] if self.states else []), default=-1)

    def pos_max(self, seq: int) -> int:
        """The last position of a sequence; -1 if it is empty."""
        if self.caches:
            return self.caches[0].pos_max(seq)
        return self.states.pos(seq) if self.states else -1

    def ends(self) -> list[int]:
        """The next position of every sequence."""
        return [self.pos_max(seq) + 1 for seq in range(self.n_seq_max)]

    def can_remove(self, seq: int, p0: int, p1: int) -> bool:
        """Whether the tokens at p0 <= position < p1 can be forgotten.

        Not where a sliding window or a recurrent state has already forgotten what would be seen
        again.
        """
        last = self.pos_max(seq)
        if p0 > last or p0 >= p1:
            return True
        if p0 <= 0 and p1 > last:
            return True
        if self.states and not (p1 > last and self.states.can_go_back(seq, p0 - 1)):
            return False
        return self._can_go_on(seq, lambda pos: np.where((pos < p0) | (pos >= p1), pos, _GONE))

    def remove(self, seq: int, p0: int, p1: int) -> None:
        """Forget the tokens at p0 <= position < p1, which `can_remove`."""
        last = self.pos_max(seq)
        if p0 > last or p0 >= p1:
            return
        if self.states and p1 > last:
            self.states.go_back(seq, p0 - 1)
        for cache in self.caches:
            cache.remove(seq, p0, p1)

    def can_share(self, source: int, p0: int, p1: int) -> bool:
        """Whether a copy of the tokens at p0 <= position < p1 could go on as its source would."""
        last = self.pos_max(source)
        if p0 <= 0 and p1 > last:
            return True
        if self.states:
            return False
        return self._can_go_on(source, lambda pos: np.where((pos >= p0) & (pos < p1), pos, _GONE))

    def share(self, source: int, target: int, p0: int, p1: int) -> None:
        """Make `target` hold what `source` holds in p0..p1, and nothing else."""
        if self.caches and not self.unified and self.pos_max(source) >= 0:
            self._copy_stream(source, target)  # first: the books tell of it once it is done
        for cache in self.caches:
            cache.share(source, target, p0, p1)
        if self.states:
            self.states.share(source, target)

    def alike(self, a: int, b: int) -> bool:
        """Whether two sequences hold the same, so that they can share what comes next."""
        same = all(cache.alike(a, b) for cache in self.caches)
        return same and (self.states is None or self.states.slot(a) == self.states.slot(b))

    @property
    def shareable(self) -> bool:
        """Whether a row can belong to several sequences."""
        return bool(self.caches or self.states) and all(cache.unified for cache in self.caches)

    def _copy_stream(self, source: int, target: int) -> None:
        moves = [
            CellMove(cache.first_cell(source), cache.first_cell(target), cache.spec.stream_cells)
            for cache in self.caches
        ]
        arrays = [len(cache.spec.k_layout + cache.spec.v_layout) for cache in self.caches]
        self._regions = copy_cells(self.regions(), moves, arrays)

    @property
    def can_shift(self) -> bool:
        """Whether positions can be changed."""
        return bool(self.caches or self.states)

    def shared(self, seq: int, p0: int, p1: int) -> bool:
        """Whether another sequence holds any of these tokens, too."""
        return any(cache.shared(seq, p0, p1) for cache in self.caches)

    def can_move(self, seq: int, p0: int, p1: int, to: Callable[[np.ndarray], np.ndarray]) -> bool:
        """Whether the tokens at p0 <= position < p1 can have other positions.

        Not some of them where there is a recurrent state, nor where a sliding window has forgotten
        tokens that would come into it again.
        """
        last = self.pos_max(seq)
        if last < p0 or p0 >= p1:
            return True
        if self.states and not (p0 <= 0 and p1 > last):
            return False
        return self._can_go_on(seq, lambda pos: np.where((pos >= p0) & (pos < p1), to(pos), pos))

    def move(self, seq: int, p0: int, p1: int, to: Callable[[np.ndarray], np.ndarray]) -> None:
        """Give the tokens at p0 <= position < p1 other positions; negative ones are forgotten."""
        last = self.pos_max(seq)
        if last < p0 or p0 >= p1:
            return
        if self.states and p1 > last:
            pos = int(to(np.array([self.states.pos(seq)], np.int32))[0])
            if pos < 0:
                self.states.remove(seq)
            else:
                self.states.move(seq, pos)
        for cache in self.caches:
            cache.move(seq, p0, p1, to)

    @property
    def shifted(self) -> bool:
        """Whether keys have to be rotated before they are read."""
        return any(cache.shifted for cache in self.caches)

    def apply_shifts(self, hp: HParams, factors: Array | None) -> None:
        """Rotate the keys of cells whose positions have changed, each by the sum of the changes."""
        regions = list(self.regions())
        start = 0
        for cache in self.caches:
            n_k, n_v = len(cache.spec.k_layout), len(cache.spec.v_layout)
            if cache.shifted:
                ropes = tuple(hp.rope_of(il) for il in cache.spec.layers)
                regions[start : start + n_k] = shift_keys(
                    tuple(regions[start : start + n_k]),
                    cache.shifts(),
                    factors,
                    spec=cache.spec,
                    ropes=ropes,
                )
                self._regions = tuple(regions)
                cache.forget_shifts()
            start += n_k + n_v

    def defrag(self) -> bool:
        """Move tokens so that sequences lie in runs of cells. False if they do already."""
        regions = list(self.regions())
        start, moved = 0, False
        for cache in self.caches:
            n = len(cache.spec.k_layout + cache.spec.v_layout)
            order = cache.order()
            if order is not None:
                regions[start : start + n] = permute_cells(tuple(regions[start : start + n]), order)
                self._regions = tuple(regions)
                cache.permute(order)
                moved = True
            start += n
        return moved

    def clear(self) -> None:
        """Forget all tokens. The regions stay."""
        for cache in self.caches:
            cache.clear()
        if self.states:
            self.states.clear()
