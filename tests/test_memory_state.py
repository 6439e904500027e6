"""What a memory holds, out of its cells and into those of another: nothing lost, nothing mixed."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax.batch import Batch, check_batch, split_equal, split_simple
from minfer_jax.errors import StateError
from minfer_jax.history import History
from minfer_jax.memory import state
from minfer_jax.memory.memory import END, Memory
from minfer_jax.memory.plan import CacheSpec, MemoryPlan, RecurrentSpec
from minfer_jax.memory.regions import permute_cells
from minfer_jax.memory.state import collect, model_digest, prepare, record
from minfer_jax.memory.state_format import SavedOutputs, decode, encode, model_form
from minfer_jax.models.weights import RowRange, WeightView

N_SEQ = 3
WINDOW = 4
N_VOCAB = 900
"""Tokens, plus the number of a head, that float16 can tell apart."""
NOTHING = SavedOutputs(0, np.zeros(0, np.int32), np.zeros((0, N_VOCAB), np.float32), False)


def plan(*, unified=False, window_cells=0, size=40, caches=True, recurrent=False, n_seq=N_SEQ):
    """Layers 0 and 2 see everything, 1 and 3 a window: one cache for all, or one for each kind."""
    spec = CacheSpec(
        layers=(0, 1, 2, 3),
        n_head_kv=2,
        head_dim_k=3,
        head_dim_v=1,
        types=("f32", "f16"),
        window=0,
        n_stream=1 if unified else n_seq,
        stream_cells=-(-size // 8) * 8,
        stream_size=size,
        n_seq=n_seq if unified else 1,
    )
    specs = [spec]
    if window_cells:
        rolls = {"window": WINDOW, "stream_cells": window_cells, "stream_size": window_cells}
        specs = [replace(spec, layers=(0, 2)), replace(spec, layers=(1, 3), **rolls)]
    states = RecurrentSpec(layers=(4, 5), shapes=((2,), (1, 3)), n_slots=2 * n_seq, n_snapshots=0)
    return MemoryPlan(caches=tuple(specs) * caches, recurrent=states if recurrent else None)


class Box:
    """A memory in whose cells lies which tokens they are of."""

    def __init__(self, n_seq: int = N_SEQ, **options) -> None:
        self.store = Memory(plan(n_seq=n_seq, **options), jax.devices()[0], n_seq)
        self.history = History(n_seq)
        self.form = model_form(self.store.plan, "", n_vocab=N_VOCAB, n_embd=1)

    def feed(self, seq, tokens) -> bool:
        """Tokens of one sequence, or of all that are named."""
        batch = Batch(token=tokens, seq_id=[seq] * len(tokens))
        checked = check_batch(batch, n_vocab=N_VOCAB, n_embd=1, n_past=self.store.ends())
        ubatches = (split_equal if self.store.states else split_simple)(checked, 1)
        if not self.store.begin(ubatches):
            return False
        for ubatch in ubatches:
            self._write(self.store.next_claim(ubatch), int(ubatch.token[0]))
        self.store.end()
        self.history.extend(checked)
        return True

    def _write(self, claim, token):
        regions = [np.array(region) for region in self.store.regions()]
        at = 0
        for cache, part in zip(self.store.caches, claim.caches, strict=True):
            for _ in range(2):
                heads = np.array([10 * il + h for il in cache.spec.layers for h in (0, 1)])
                regions[at][:, part.cells] = (token + heads)[:, None, None]
                at += 1
        for region in regions[at:]:
            read, written = claim.states.read[0], claim.states.written[0]
            was = region[:, read] if read < region.shape[1] else 0
            region[:, written] = (
                was * 2 + token + np.array([0, 1]).reshape(2, *[1] * (region.ndim - 2))
            )
        self.store.take_back(tuple(map(jnp.asarray, regions)))

    def held(self, seq):
        """What a sequence holds: {layer: sorted (position, rows)}, and its state."""
        regions = [np.array(region) for region in self.store.regions()]
        out, at = {}, 0
        for cache in self.store.caches:
            books, local = cache.at(seq)
            cells = np.flatnonzero(books.held(local))
            where = cells + cache.first_cell(seq)
            for i, il in enumerate(cache.spec.layers):
                heads = [r[2 * i + h, where] for r in regions[at : at + 2] for h in (0, 1)]
                rows = np.concatenate(heads, axis=1)  # [cells, both heads of K, and of V]
                out[il] = sorted(zip(books.pos[cells].tolist(), rows.tolist(), strict=True))
            at += 2
        slot = self.store.states.slot(seq) if self.store.states else None
        out["state"] = [] if slot is None else [region[:, slot].tolist() for region in regions[at:]]
        out["tokens"] = self.history.tokens(seq)
        return out

    def everything(self):
        return [self.held(seq) for seq in range(self.store.n_seq_max)], self.store.ends()

    def save(self, seq=None) -> bytes:
        return encode(collect(self.store, self.history, NOTHING, seq), self.form)

    def load(self, data, seq=None) -> None:
        saved = decode(data, self.form)
        self.store.adopt(prepare(self.store, saved, seq).write())
        record(self.history, saved, seq)
        self.check_books()

    def check_books(self):
        """What is remembered of the sequences is what the cells say."""
        for cache in self.store.caches:
            for books in cache.streams:
                assert ((books.pos >= 0) == books.bits.any(axis=0)).all()
                for seq in range(books.n_seq):
                    assert books.range(seq) == books._measure(seq)


def tokens_at(held, layer):
    """Which tokens, by position, a layer holds."""
    return {pos: rows[0] - 10 * layer for pos, rows in held[layer]}


def seen(held, end):
    """What the next token of a sequence sees, and its history."""
    return {
        il: [row for row in rows if il in (0, 2) or row[0] > end - WINDOW]
        for il, rows in held.items()
        if isinstance(il, int)
    } | {"tokens": held["tokens"], "state": held["state"]}


KINDS = [
    {},
    {"unified": True},
    {"unified": True, "recurrent": True},
    {"window_cells": 8},
    {"window_cells": 16, "unified": True},
    {"caches": False, "recurrent": True},
]
IDS = ["streams", "unified", "hybrid", "swa-streams", "swa-unified", "recurrent"]


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
@pytest.mark.parametrize("seq", [0, 2])
def test_a_sequence_becomes_another_one(kind, seq):
    a, b = Box(**kind), Box(**kind)
    a.feed(0, range(100, 110))
    a.feed(seq, range(200, 207))
    b.feed(0, range(300, 305))
    b.feed(1, range(400, 403))
    want, kept, end = a.held(seq), b.held(0), a.store.ends()[seq]
    b.load(a.save(seq), 1)
    assert seen(b.held(1), end) == seen(want, end)
    assert b.held(0) == kept
    assert b.store.ends() == [5, end, 0]
    assert want["tokens"] == (
        [*range(100, 110), *range(200, 207)] if seq == 0 else [*range(200, 207)]
    )


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_everything_comes_back_as_it_lay(kind):
    a, b = Box(**kind), Box(**kind)
    for i in range(4):  # interleaved, and beyond the window
        a.feed(0, range(100 + 3 * i, 103 + 3 * i))
        a.feed(2, [200 + i])
    b.feed(1, range(300, 309))
    want = a.everything()
    b.load(a.save())
    assert b.everything() == want
    for ours, theirs in zip(a.store.caches, b.store.caches, strict=True):
        for one, other in zip(ours.streams, theirs.streams, strict=True):
            np.testing.assert_array_equal(one.pos, other.pos)
            np.testing.assert_array_equal(one.bits, other.bits)
            assert one.head == other.head


def test_a_rolled_window_of_one_sequence_comes_back_as_it_lay():
    a, b = Box(window_cells=8), Box(window_cells=8)
    a.feed(1, range(100, 119))
    b.load(a.save(1), 2)
    rolled = [box.store.caches[1].streams[seq] for box, seq in ((a, 1), (b, 2))]
    np.testing.assert_array_equal(rolled[0].pos, [16, 17, 18, 11, 12, 13, 14, 15])
    np.testing.assert_array_equal(rolled[1].pos, rolled[0].pos)
    assert rolled[1].head == 3


def test_shared_cells_are_stored_and_loaded_once():
    a, b = Box(unified=True, recurrent=True), Box(unified=True, recurrent=True)
    a.feed(0, range(100, 110))
    alone = len(a.save())
    for target in (1, 2):
        a.store.share(0, target, 0, END)
        a.history.copy(0, target, 0, END)
    want = a.everything()
    assert len(a.save()) < alone + 2 * 4 * 10 + 50  # tokens, and a few digits
    b.load(a.save())
    assert b.everything() == want
    assert b.store.caches[0].streams[0].used == 10
    assert len({b.store.states.slot(seq) for seq in range(3)}) == 1
    a.feed(1, [5])
    b.feed(1, [5])
    assert b.everything() == a.everything()


@pytest.mark.parametrize("recurrent", [False, True])
def test_sharing_is_taken_apart_between_streams_and_kept_apart_on_the_way_back(recurrent):
    a, b, c = (
        Box(unified=True, recurrent=recurrent),
        Box(recurrent=recurrent),
        Box(unified=True, recurrent=recurrent),
    )
    a.feed(0, range(100, 110))
    a.store.share(0, 2, 0, END)
    a.history.copy(0, 2, 0, END)
    a.feed(2, [7, 8])
    want = a.everything()
    b.load(a.save())
    assert b.everything() == want
    c.load(b.save())
    assert c.everything() == want
    assert [box.store.caches[0].streams[0].used for box in (a, c)] == [12, 22]


@pytest.mark.parametrize("recurrent", [False, True])
def test_other_sizes(recurrent):
    a, b = Box(recurrent=recurrent), Box(size=24, n_seq=2, recurrent=recurrent)
    a.feed(0, range(100, 120))
    a.feed(1, range(200, 224))
    b.load(a.save())
    assert b.everything() == (a.everything()[0][:2], [20, 24])
    a.feed(1, [5])
    before = b.everything()
    for data, seq in ((a.save(), None), (a.save(1), 0)):
        with pytest.raises(
            StateError, match="does not fit: it holds 25 tokens, and 24 of 24 cells"
        ):
            b.load(data, seq)
        assert b.everything() == before
    a.store.remove(1, 0, END)
    a.feed(2, [1])
    with pytest.raises(StateError, match="holds a sequence 2; this context has sequences 0 to 1"):
        b.load(a.save())
    assert b.everything() == before
    b.load(a.save(2), 1)
    assert b.store.ends() == [20, 1]


def test_holes_are_filled_in_the_order_of_positions():
    a, b = Box(unified=True), Box(unified=True)
    a.feed(0, range(100, 120))
    b.feed(0, range(300, 330))
    b.feed(1, [400, 401, 402])
    b.store.remove(0, 3, 8)
    b.store.remove(0, 20, 29)
    kept = b.held(1)
    with pytest.raises(StateError, match="it holds 22 tokens, and 21 of 40 cells"):
        a.feed(0, [120, 121])
        b.load(a.save(0), 2)
    a.store.remove(0, 20, END)
    a.history.remove(0, 20, END)
    b.load(a.save(0), 2)
    assert (b.held(2), b.held(1)) == (a.held(0), kept)
    books = b.store.caches[0].streams[0]
    cells = np.flatnonzero(books.held(2))
    assert cells.tolist() == [*range(3, 8), *range(20, 29), *range(33, 39)]
    assert books.pos[cells].tolist() == list(range(20))  # the search begins at cell 3
    assert books.head == 39


def test_the_replaced_sequence_makes_room():
    a, b = Box(unified=True), Box(unified=True)
    a.feed(0, range(100, 130))
    b.feed(0, range(300, 308))
    b.feed(1, range(400, 420))
    b.load(a.save(0), 1)
    assert b.held(1) == a.held(0)


def test_a_window_cache_takes_what_is_seen_if_not_more():
    full, rolls = Box(), Box(window_cells=8)
    full.feed(0, range(100, 106))
    rolls.load(full.save(0), 0)
    assert rolls.store.caches[1].pos_min(0) == 0  # all of it fits
    full.feed(0, range(106, 130))
    want = full.held(0)
    rolls.load(full.save(0), 0)
    got = rolls.held(0)
    assert (got[0], got[2]) == (want[0], want[2])
    for il in (1, 3):
        assert tokens_at(got, il) == {pos: 100 + pos for pos in (27, 28, 29)}  # with the next: 4
        assert got[il] == want[il][-3:]
    assert rolls.store.can_remove(0, 30, END) and not rolls.store.can_remove(0, 29, END)


def test_a_full_window_cache_gives_up_what_nobody_sees():
    a, b = Box(), Box(window_cells=16, unified=True)
    a.feed(0, range(100, 110))
    b.feed(1, range(200, 214))
    b.load(a.save(0), 0)
    assert tokens_at(b.held(0), 1) == {pos: 100 + pos for pos in (7, 8, 9)}
    seen = tokens_at(b.held(1), 1)
    assert {pos: seen[pos] for pos in (11, 12, 13)} == {pos: 200 + pos for pos in (11, 12, 13)}
    assert len(seen) == 13  # two cells were free
    assert tokens_at(b.held(1), 0) == {pos: 200 + pos for pos in range(14)}


def test_a_window_that_has_forgotten_cannot_become_whole():
    a, b = Box(window_cells=8), Box()
    a.feed(0, range(100, 108))
    b.load(a.save(0), 0)
    assert b.held(0) == a.held(0)
    a.feed(0, [108])
    before = b.everything()
    for data, seq in ((a.save(0), 1), (a.save(), None)):
        with pytest.raises(StateError, match="sliding-window layers have forgotten tokens"):
            b.load(data, seq)
        assert b.everything() == before


def test_caches_need_not_have_tokens_in_the_same_order():
    a, b = Box(window_cells=16, unified=True), Box(unified=True)
    a.feed(0, range(100, 106))
    a.feed(1, range(200, 206))
    want = a.everything()
    order = np.random.default_rng(3).permutation(16).astype(np.int32)
    regions = a.store.regions()
    a.store.take_back((*regions[:2], *permute_cells(regions[2:], order)))
    a.store.caches[1].permute(order)
    assert a.everything() == want
    for data, seq in ((a.save(), None), (a.save(1), 2)):
        b.load(data, seq)
        assert b.held(1) == want[0][1]
    assert b.held(2) == b.held(1)
    c = Box(window_cells=16, unified=True)
    c.feed(0, [1, 2])
    c.load(a.save(1), 1)
    assert c.held(1) == want[0][1]
    assert [cache.streams[0].range(1).first_cell for cache in c.store.caches] == [2, 2]


def test_what_lay_beside_others_is_put_together():
    a, b = Box(unified=True), Box(unified=True)
    a.feed(0, range(100, 110))
    a.feed(1, range(200, 205))
    b.load(a.save(1), 1)
    books = b.store.caches[0].streams[0]
    assert (books.range(1).first_cell, books.head) == (0, 5)
    a.store.remove(0, 0, END)  # alone it stays where it is
    b.store.clear()
    b.load(a.save(1), 1)
    assert books is not (books := b.store.caches[0].streams[0])
    assert (books.range(1).first_cell, books.head) == (10, 0)


def test_sequences_are_straightened_where_they_cannot_lie_as_they_lay():
    a, b = Box(unified=True), Box(unified=True, size=24)
    a.feed(1, range(300, 310))
    for i in range(10):
        a.feed(2, [100 + i])
        a.feed(0, [200 + i])
    a.store.remove(1, 0, END)
    a.history.remove(1, 0, END)
    b.load(a.save())
    assert b.everything() == a.everything()
    books = b.store.caches[0].streams[0]
    assert [books.range(seq).first_cell for seq in (0, 2)] == [0, 10]


def test_which_kind_of_state_goes_where():
    a = Box()
    a.feed(0, [1, 2])
    before = a.everything()
    with pytest.raises(StateError, match="say which one it is to become"):
        a.load(a.save(0))
    with pytest.raises(StateError, match="a whole context: it cannot be loaded as a sequence"):
        a.load(a.save(), 0)
    assert a.everything() == before


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_nothing_is_saved_and_loaded_too(kind):
    a, b = Box(**kind), Box(**kind)
    b.feed(0, [1, 2])
    b.feed(1, [3])
    b.load(a.save(1), 0)
    assert b.store.ends() == [0, 1, 0] and b.history.tokens(0) == []
    assert a.store._regions is None  # nothing was there to be read
    b.load(a.save())
    assert b.store.ends() == [0, 0, 0]
    assert b.feed(0, [5, 6]) and b.history.tokens(0) == [5, 6]


def test_gaps_and_repeated_positions():
    a, b = Box(unified=True), Box(unified=True)
    a.feed(0, range(100, 112))
    a.store.remove(0, 4, 7)
    a.store.move(0, 7, END, lambda pos: pos // 2)  # 3 twice, then 4, 4, 5
    a.history.spoil(0)
    for cache in a.store.caches:
        cache.forget_shifts()
    b.feed(1, [1, 2, 3])
    want = a.held(0)
    assert [pos for pos, _ in want[0]] == [0, 1, 2, 3, 3, 4, 4, 5, 5]
    b.load(a.save(0), 0)
    assert b.held(0) == want and want["tokens"] is None
    b.load(a.save())
    assert b.held(0) == want


def test_long_sequences_go_in_parts(monkeypatch):
    a, b, c = Box(size=120), Box(size=120), Box(size=200, unified=True)
    a.feed(0, range(120))
    c.feed(1, range(500, 520))
    monkeypatch.setattr(state, "CHUNK", 32)
    monkeypatch.setattr(state, "_BUCKETS", (8, 32))
    b.load(a.save(0), 1)
    assert b.held(1) == a.held(0)
    c.load(a.save(0), 0)
    assert c.held(0) == a.held(0)
    assert tokens_at(c.held(1), 2) == {pos: 500 + pos for pos in range(20)}


def test_programs_are_compiled_for_few_sizes():
    a, b = Box(size=80), Box(size=80)
    before = state.put_cells._cache_size()
    for n in (1, 3, 15, 16, 17, 40, 64):
        a.store.clear()
        a.history.clear()
        a.feed(0, range(n))
        b.load(a.save(0), 0)
    assert state.put_cells._cache_size() - before == 2  # for 16 and 64 cells


def test_regions_are_written_in_place():
    a, b = Box(), Box()
    a.feed(0, range(10))
    b.feed(0, range(5))
    b.store.take_back(tuple(jnp.copy(region) for region in b.store.regions()))
    before = [region.unsafe_buffer_pointer() for region in b.store.regions()]
    b.load(a.save(0), 1)
    assert [region.unsafe_buffer_pointer() for region in b.store.regions()] == before


def test_a_load_that_fails_before_a_donation_changes_nothing(monkeypatch):
    a, b = Box(), Box()
    a.feed(0, range(10))
    b.feed(0, range(5))
    before = b.everything()

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(state, "put_cells", fail)
        with pytest.raises(MemoryError):
            b.load(a.save(0), 0)
    assert not b.store.lost
    assert b.everything() == before


def test_a_load_that_fails_after_one_leaves_the_memory_lost(monkeypatch):
    a, b = Box(window_cells=8), Box(window_cells=8)
    a.feed(0, range(10))
    b.feed(0, range(5))
    put, calls = state.put_cells, []

    def fail_at_last(regions, *rest):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return put(regions, *rest)

    monkeypatch.setattr(state, "put_cells", fail_at_last)
    with pytest.raises(MemoryError):
        b.load(a.save(0), 0)
    assert b.store.lost


# --- any memory into any other ------------------------------------------------------------------

FEEDS = st.lists(
    st.tuples(
        st.sampled_from(["feed", "feed", "feed", "remove", "share"]),
        st.integers(0, N_SEQ - 1),
        st.integers(0, N_SEQ - 1),
        st.integers(0, 12),
        st.integers(1, 12),
    ),
    max_size=7,
)
SHAPES = st.fixed_dictionaries(
    {"unified": st.booleans(), "window_cells": st.sampled_from([0, 8, 16]), "size": st.just(40)}
)


def live(box, ops):
    """Random operations, as `Sequences` would let them through."""
    token = 0
    for what, seq, other, p0, n in ops:
        store = box.store
        if what == "feed":
            box.feed(seq, range(token, token + n))
            token += n
        elif what == "remove" and store.can_remove(seq, p0, p0 + n):
            store.remove(seq, p0, p0 + n)
            box.history.remove(seq, p0, p0 + n)
        elif what == "share" and seq != other and store.can_share(seq, 0, p0 + 1):
            store.share(seq, other, 0, p0 + 1)
            box.history.copy(seq, other, 0, p0 + 1)


@settings(deadline=None, max_examples=60)
@given(SHAPES, FEEDS, SHAPES, FEEDS, st.integers(0, N_SEQ - 1), st.sampled_from([None, 0, 2]))
def test_any_memory_into_any_other(shape, ops, into, others, seq, target):
    a, b = Box(**shape), Box(**into)
    live(a, ops)
    live(b, others)
    whole = target is None
    want, before = a.everything(), b.everything()
    data = a.save(None if whole else seq)
    try:
        b.load(data, target)
    except StateError:
        assert b.everything() == before
        return
    got, ends = b.everything()
    for number in range(N_SEQ):
        if whole or number == target:
            source = number if whole else seq
            assert ends[number] == want[1][source]
            assert seen(got[number], ends[number]) == seen(want[0][source], ends[number])
        else:
            assert ends[number] == before[1][number]
            assert seen(got[number], ends[number]) == seen(before[0][number], ends[number])


# --- fingerprints -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Params:
    n: int
    scale: float = 1.0


@dataclass(frozen=True)
class LaterParams:
    n: int
    scale: float = 1.0
    added: tuple[int, ...] = ()


def view(**changes):
    arrays = {"a+b": object(), "norm": jnp.ones(4), "table": jnp.ones((2, 2)), **changes}
    return WeightView(arrays, {"a": RowRange("a+b", 0, 4), "b": RowRange("a+b", 16, 24)})


def test_what_tells_models_apart():
    same = model_digest(Params(1), view())
    assert model_digest(Params(1, 1.0), view()) == same
    # However rows are padded and whatever they are packed into.
    other = WeightView(
        {"a": object(), "b": object(), "norm": jnp.ones(4), "table": jnp.ones((2, 2))},
        {"b": RowRange("b", 0, 8), "a": RowRange("a", 0, 4)},
    )
    assert model_digest(Params(1), other) == same
    assert model_digest(LaterParams(1), view()) == same
    differ = [
        model_digest(Params(1, 3.0), view()),
        model_digest(LaterParams(1, added=(1,)), view()),
        model_digest(Params(2), view()),
        model_digest(Params(1, 2.0), view()),
        model_digest(Params(1), view(norm=jnp.ones(4).at[2].set(0.5))),
        model_digest(Params(1), view(norm=jnp.ones(5))),
        model_digest(Params(1), view(bias=jnp.ones(4))),
        model_digest(Params(1), view(table=jnp.ones((4, 1)))),
        model_digest(Params(1), replace(view(), ranges={"a": RowRange("a+b", 0, 5)})),
    ]
    assert len({same, *differ}) == 10
