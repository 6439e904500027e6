"""From what a context remembers to a state, and back into cells of any context of the same model.

A load is prepared on a draft of the books. Whatever is wrong or does not fit is found there, before
a region is touched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING

import numpy as np

from minfer_jax.errors import StateError
from minfer_jax.history import History
from minfer_jax.memory.cells import Cells
from minfer_jax.memory.kv import KVCache
from minfer_jax.memory.memory import END, Memory
from minfer_jax.memory.plan import WORD
from minfer_jax.memory.regions import put_cells, take_cells
from minfer_jax.memory.state_format import (
    SavedCache,
    SavedOutputs,
    SavedSequence,
    SavedState,
    SavedStream,
)
from minfer_jax.models.hparams import HParams

if TYPE_CHECKING:
    from minfer_jax.models.weights import WeightView

CHUNK = 1024
"""Cells that go to or from a region at a time."""
_BUCKETS = (16, 64, 256, CHUNK)
"""Sizes that programs are compiled for."""


def model_digest(hp: HParams, weights: WeightView) -> str:
    """What tells models apart: hyperparameters, tensors, and the values of vectors.

    Norm weights and biases stand for all values: they are small, and the same however matrices are
    packed.
    """
    digest = hashlib.blake2b(repr(_described(hp)).encode(), digest_size=16)
    for name, rows in sorted(weights.ranges.items()):
        digest.update(f"\n{name} {rows.stop - rows.start}".encode())
    packed = {rows.array for rows in weights.ranges.values()}
    for name in sorted(weights.arrays.keys() - packed):
        tensor = weights.vector(name)
        digest.update(f"\n{name} {tensor.shape}\n".encode())
        if tensor.ndim == 1:
            digest.update(np.asarray(tensor).tobytes())
    return digest.hexdigest()


def _described(value: object) -> object:
    """A dataclass without the fields that are as they are by default: a new one changes nothing."""
    if not is_dataclass(value):
        return value
    pairs = [(f, getattr(value, f.name)) for f in fields(value)]
    return [(f.name, _described(v)) for f, v in pairs if f.default is MISSING or v != f.default]


# --- saving -------------------------------------------------------------------------------------


def collect(store: Memory, history: History, outputs: SavedOutputs, seq: int | None) -> SavedState:
    """What there is to be saved of sequence `seq`, or of everything: to be encoded at once, as rows
    are fetched from the regions meanwhile."""
    seqs = [seq] if seq is not None else list(range(store.n_seq_max))
    rows = {s: _output_row(history, outputs, s) for s in seqs}
    if seq is not None:
        outputs = _only_row(outputs, rows[seq])
        rows = {seq: 0 if len(outputs.index) else -1}
    slot_of = {s: store.states.slot(s) for s in seqs} if store.states else {}
    slots = sorted({slot for slot in slot_of.values() if slot is not None})
    sequences = []
    for s in seqs:
        end, tokens, slot = store.pos_max(s) + 1, history.tokens(s), slot_of.get(s)
        plain = tokens is not None and len(tokens) == end
        state = -1 if slot is None else slots.index(slot)
        saved = np.array(tokens, np.int32) if plain else None
        sequences.append(SavedSequence(saved, end, state, rows[s]))
    caches, at = [], 0
    for cache in store.caches:
        n = len(cache.spec.k_layout + cache.spec.v_layout)
        caches.append(_collect_cache(store, cache, range(at, at + n), seq))
        at += n
    states = _fetch(store, range(at, len(store.plan.layout)), np.array(slots, np.int32))
    return SavedState(seq is not None, tuple(sequences), tuple(caches), states, len(slots), outputs)


def _output_row(history: History, outputs: SavedOutputs, seq: int) -> int:
    """The row of the last batch that a sequence ends with, if its output is there; else -1."""
    row = history.last_row(seq)
    return row if row is not None and row in outputs.index else -1


def _only_row(outputs: SavedOutputs, row: int) -> SavedOutputs:
    """The outputs of a batch of this one row; -1: of none."""
    which = outputs.index == row
    index = np.zeros(int(which.sum()), np.int32)
    return SavedOutputs(len(index), index, outputs.rows[which], outputs.embeddings)


def _collect_cache(store: Memory, cache: KVCache, arrays: range, seq: int | None) -> SavedCache:
    """The cells of one cache, whose regions are `arrays` of the memory's."""
    spec = cache.spec
    numbers = range(spec.n_stream) if seq is None or cache.unified else [seq]
    streams, cells, pos, masks = [], [], [], []
    for number in numbers:
        books = cache.streams[number]
        held = books.pos >= 0 if seq is None else books.held(cache.at(seq)[1])
        found = np.flatnonzero(held).astype(np.int32)
        whole = len(found) == books.used
        head = books.head if whole else 0
        streams.append(SavedStream(len(found), len(books), head, whole))
        cells.append(found)
        pos.append(books.pos[found])
        if seq is None and cache.unified:
            masks.append(books.bits[:, found])
        else:
            n_seq = store.n_seq_max if seq is None else 1
            masks.append(_mask_of(number if seq is None else 0, n_seq, len(found)))
    placed = [c + np.int32(i * spec.stream_cells) for i, c in zip(numbers, cells, strict=True)]
    return SavedCache(
        spec.layers,
        tuple(streams),
        np.concatenate(cells),
        np.concatenate(pos),
        np.concatenate(masks, axis=1),
        _fetch(store, arrays, np.concatenate(placed)),
    )


def _mask_of(seq: int, n_seq: int, n: int) -> np.ndarray:
    """Masks of `n` cells that belong to one of `n_seq` sequences: uint32 [words, n]."""
    masks = np.zeros((-(-n_seq // WORD), n), np.uint32)
    masks[seq // WORD] = np.uint32(1 << seq % WORD)
    return masks


def _fetch(store: Memory, arrays: range, cells: np.ndarray) -> Iterator[np.ndarray]:
    """What lies in `cells` (or slots) of these regions, one after the other: [heads, n, ...]."""
    for i in arrays:
        shape, dtype = store.plan.layout[i]
        out = np.empty((shape[0], len(cells), *shape[2:]), dtype)
        for start in range(0, len(cells), CHUNK):
            part = cells[start : start + CHUNK]
            rows = take_cells(store.regions()[i], _padded(part, 0))
            out[:, start : start + len(part)] = np.asarray(rows)[:, : len(part)]
        yield out


def _padded(cells: np.ndarray, fill: int) -> np.ndarray:
    """Cells as long as the next bucket, with `fill` behind them: int32."""
    size = next(size for size in _BUCKETS if len(cells) <= size)
    out = np.full(size, fill, np.int32)
    out[: len(cells)] = cells
    return out


# --- loading ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """Rows of a saved array, and where they go in one of a region: heads and cells."""

    arrays: Sequence[np.ndarray]
    heads: np.ndarray
    into: np.ndarray
    rows: np.ndarray


@dataclass
class Load:
    """A load that is known to fit: books as they will be, and what regions have to be written."""

    draft: Memory
    writes: list[tuple[range, np.ndarray, list[_Source]]] = field(default_factory=list)
    """Regions, cells or slots of theirs, and what goes there."""

    def write(self) -> Memory:
        """Write the regions, which are donated: the memory to be adopted."""
        for arrays, cells, sources in self.writes:
            for start in range(0, len(cells), CHUNK):
                self._put(arrays, cells[start : start + CHUNK], sources, start)
        if self.writes:
            for region in self.draft.regions():
                region.block_until_ready()
        return self.draft

    def _put(self, arrays: range, cells: np.ndarray, sources: list[_Source], start: int) -> None:
        regions = list(self.draft.regions())
        now = slice(arrays.start, arrays.stop)
        where = _padded(cells, regions[arrays.start].shape[1])
        new = []
        for i, region in enumerate(regions[now]):
            rows = np.zeros((region.shape[0], len(where), *region.shape[2:]), region.dtype)
            for source in sources:
                part = source.rows[start : start + len(cells)]
                rows[source.into, : len(part)] = source.arrays[i][np.ix_(source.heads, part)]
            new.append(rows)
        regions[now] = put_cells(tuple(regions[now]), where, tuple(new))
        self.draft.take_back(tuple(regions))


def prepare(store: Memory, state: SavedState, seq: int | None) -> Load:
    """Find room for a state: for a single sequence as `seq`, which it replaces, else for all.

    Raises `StateError`, and nothing has changed, if it does not fit.
    """
    targets = _targets(store, state, seq)
    load = Load(store.draft())
    draft = load.draft
    if seq is None:
        draft.clear()
    else:
        draft.remove(seq, 0, END)
    at = 0
    for cache in draft.caches:
        n = len(cache.spec.k_layout + cache.spec.v_layout)
        cells, sources = _place(cache, state, targets)
        if len(cells):
            load.writes.append((range(at, at + n), cells, sources))
        at += n
    if draft.states:
        slots, which = _place_states(draft, state, targets)
        if len(slots):
            arrays = tuple(state.states)
            heads = np.arange(len(draft.states.spec.layers))
            source = _Source(arrays, heads, heads, which)
            load.writes.append((range(at, at + len(arrays)), slots, [source]))
    return load


def _targets(store: Memory, state: SavedState, seq: int | None) -> dict[int, int]:
    """What becomes of the state's sequences that hold something: their number in the context."""
    if state.single and seq is None:
        raise StateError("the state is one of a single sequence: say which one it is to become")
    if seq is not None and not state.single:
        raise StateError("the state is one of a whole context: it cannot be loaded as a sequence")
    if seq is not None:
        return {0: seq} if state.sequences[0].end else {}
    held = [s for s, saved in enumerate(state.sequences) if saved.end]
    if held and held[-1] >= store.n_seq_max:
        raise StateError(
            f"the state holds a sequence {held[-1]}; this context has sequences 0 to"
            f" {store.n_seq_max - 1}"
        )
    return {s: s for s in held}


def _place(
    cache: KVCache, state: SavedState, targets: dict[int, int]
) -> tuple[np.ndarray, list[_Source]]:
    """Cells in the regions of a cache, int32 [n], and the rows that go there; the books hold them
    already."""
    saved = [s for s in state.caches if set(s.layers) & set(cache.spec.layers)]
    order = [_aligned(saved[0], other) for other in saved]
    cells, rows = [], []
    for number in [0] if cache.unified else targets.values():
        mine = targets if cache.unified else {s: 0 for s, t in targets.items() if t == number}
        found, which = _place_stream(cache, number, saved[0], mine, single=state.single)
        cells.append(found)
        rows.append(which)
    if not cells:
        return np.zeros(0, np.int32), []
    row = np.concatenate(rows)
    sources = [_source(cache, s, o[row]) for s, o in zip(saved, order, strict=True)]
    return np.concatenate(cells), sources


def _aligned(first: SavedCache, other: SavedCache) -> np.ndarray:
    """Which cell of `other` holds the token that each cell of `first` holds: int [N]."""
    if first is other:
        return np.arange(len(first.cell))
    a, b = (np.lexsort((cache.pos, *cache.mask)) for cache in (first, other))
    alike = np.array_equal(first.pos[a], other.pos[b])
    if not alike or not np.array_equal(first.mask[:, a], other.mask[:, b]):
        raise StateError(
            "the state's sliding-window layers have forgotten tokens that this context keeps: use"
            " one whose window layers roll, too (no swa_full)"
        )
    out = np.empty(len(a), np.int64)
    out[a] = b
    return out


def _source(cache: KVCache, saved: SavedCache, rows: np.ndarray) -> _Source:
    """The rows of those layers of a saved cache that a cache has."""
    spec = cache.spec
    shared = [il for il in spec.layers if il in saved.layers]
    heads, into = (
        np.concatenate(
            [layers.index(il) * spec.n_head_kv + np.arange(spec.n_head_kv) for il in shared]
        )
        for layers in (saved.layers, spec.layers)
    )
    return _Source(tuple(saved.rows), heads, into, rows)


def _place_stream(
    cache: KVCache, number: int, saved: SavedCache, targets: dict[int, int], *, single: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Give tokens cells of one stream: those in the regions, int32 [n], and which tokens, [n].

    `targets`: the numbers that the state's sequences have in this stream.
    """
    books, spec = cache.streams[number], cache.spec
    masks = np.zeros((len(books.bits), len(saved.cell)), np.uint32)
    for s, target in targets.items():
        masks[target // WORD, saved.held(s)] |= np.uint32(1 << target % WORD)
    rows = np.flatnonzero(masks.any(axis=0))
    if not len(rows):
        return np.zeros(0, np.int32), rows
    copy = _copied(books, saved, rows, 0 if single or cache.unified else number)
    if copy is not None:
        cells, head = copy
    else:
        rows = rows[_in_order(saved, targets, rows)]
        cells, head = cache.find(number, len(rows), reuse=False), -1
        if cells is None and spec.window:
            rows = rows[_needed(cache, saved, targets, rows)]
            cells = cache.find(number, len(rows), reuse=True)
    if cells is None:
        raise StateError(
            f"the state does not fit: it holds {len(rows)} tokens, and"
            f" {len(books) - books.used} of {len(books)} cells are free"
        )
    books.put(cells, saved.pos[rows], masks[:, rows])
    if head >= 0:
        books.head = head
    return cells + np.int32(cache.first_cell(number)), rows


def _copied(
    books: Cells, saved: SavedCache, rows: np.ndarray, number: int
) -> tuple[np.ndarray, int] | None:
    """The cells in which the tokens lay, and where the search went on, if a stream can be as it
    was: then what follows is computed as it would have been, bit for bit."""
    if books.used or number >= len(saved.streams) or not saved.streams[number].whole:
        return None
    stream = saved.streams[number]
    cells = saved.cell[rows].astype(np.int32)
    if len(rows) != stream.n or int(cells.max()) >= len(books):
        return None
    return cells, stream.head % len(books)


def _in_order(saved: SavedCache, targets: dict[int, int], rows: np.ndarray) -> np.ndarray:
    """How to sort tokens by their first sequence, then by position: runs of cells are cheap."""
    first = np.full(len(rows), END, np.int64)
    for s in sorted(targets, reverse=True):
        first[saved.held(s)[rows]] = s
    return np.lexsort((saved.pos[rows], first))


def _needed(
    cache: KVCache, saved: SavedCache, targets: dict[int, int], rows: np.ndarray
) -> np.ndarray:
    """Which tokens the next one of any of their sequences sees: bool [n]."""
    seen = np.zeros(len(rows), bool)
    for s in targets:
        held = saved.held(s)
        end = int(saved.pos[held].max(initial=-1)) + 1
        seen |= held[rows] & (saved.pos[rows] >= cache.first_needed(end))
    return seen


def _place_states(
    draft: Memory, state: SavedState, targets: dict[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Slots int32 [n] for recurrent states, and which of the saved ones go there."""
    assert draft.states is not None
    owner: dict[int, int] = {}
    slots = []
    for s, target in targets.items():
        saved = state.sequences[s]
        if saved.state in owner:
            draft.states.share(owner[saved.state], target)
            continue
        owner[saved.state] = target
        slots.append(draft.states.place(target, saved.end - 1))
    return np.array(slots, np.int32), np.array(list(owner), np.int64)


def record(history: History, state: SavedState, seq: int | None) -> None:
    """Note what has been loaded."""
    if seq is None:
        history.clear()
    rows = {}
    for s, saved in enumerate(state.sequences):
        target = s if seq is None else seq
        if saved.end or seq is not None:
            tokens = None if saved.tokens is None else saved.tokens.tolist()
            history.set(target, tokens)
            if saved.last_row >= 0:
                rows[target] = saved.last_row
    history.set_last_rows(rows)
