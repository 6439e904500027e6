"""All parts of a memory as one: claims of whole calls, what windows and states can go back to."""

import gc
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from minfer_jax.batch import Batch, Ubatch, check_batch, split_simple
from minfer_jax.memory import plan as plans
from minfer_jax.memory.memory import END, Memory
from minfer_jax.memory.plan import plan_memory
from minfer_jax.models.hparams import HParams
from minfer_jax.ops.rope_spec import RopeSpec

KV = HParams(
    arch="llama",
    n_vocab=8,
    n_ctx_train=64,
    n_embd=8,
    n_layer=2,
    n_head=2,
    n_head_kv=1,
    head_dim_k=4,
    head_dim_v=4,
    n_ff=8,
    norm_eps=1e-5,
    rope=RopeSpec(style="half", n_rot=4),
    attn_scale=0.5,
)
ISWA = replace(KV, n_swa=4, swa_layers=(True, False))
WINDOWS = replace(KV, n_swa=4, swa_layers=(True, True))
MAMBA = replace(KV, attention_layers=(False, False), recurrent_layers=(True, True), states=((3,),))
HYBRID = replace(KV, attention_layers=(False, True), recurrent_layers=(True, False), states=((3,),))


@pytest.fixture(autouse=True)
def blocks_of_4_cells(monkeypatch):
    """So that a window of 4 rolls in a context of 48: it has 8 cells with ubatches of 4 rows."""
    monkeypatch.setattr(plans, "BLOCK", 4)


def memory(hp: HParams, *, n_seq_max: int = 2, n_ctx: int = 48, **options: Any) -> Memory:
    plan = plan_memory(hp, n_ctx=n_ctx, n_seq_max=n_seq_max, n_ubatch=4, **options)
    return Memory(plan, jax.devices("cpu")[0], n_seq_max)


def ubatches(store: Memory, *seqs: Any, n_ubatch: int = 4) -> list[Ubatch]:
    """The next rows of these sequences."""
    batch = check_batch(
        Batch(token=[0] * len(seqs), seq_id=seqs),
        n_vocab=1,
        n_embd=1,
        n_past=store.ends(),
        alike=store.alike if store.shareable else None,
    )
    return split_simple(batch, n_ubatch)


def feed(store: Memory, *seqs: Any) -> bool:
    """One call, without a graph that runs."""
    parts = ubatches(store, *seqs)
    if not store.begin(parts):
        return False
    for part in parts:
        store.next_claim(part)
    store.end()
    return True


def books(store: Memory) -> tuple:
    """All that the books say, to be compared."""
    caches = [
        (c.map().tolist(), [s.head for s in c.streams], c.shifts().tolist()) for c in store.caches
    ]
    states = store.states
    return caches, [(states.pos(s), states.slot(s)) for s in range(2)] if states else []


def can_remove(store: Memory, p0: int, p1: int = END) -> bool:
    return store.can_remove(0, p0, p1)


# --- regions ------------------------------------------------------------------------------------


def test_regions_are_made_at_first_use_and_lie_in_the_order_of_the_plan():
    store = memory(replace(ISWA, recurrent_layers=(True, True), states=((3,), (2, 2))))
    assert not store.lost
    regions = store.regions()
    assert [(r.shape, r.dtype) for r in regions] == [
        (shape, np.dtype(dtype)) for shape, dtype in store.plan.layout
    ]
    assert [(a.shape, a.dtype) for a in store.abstract_regions()] == [
        (r.shape, r.dtype) for r in regions
    ]
    assert store.regions() is regions and not any(r.any() for r in regions)
    store.clear()
    assert store.regions() is regions
    store.drop()
    assert store.regions() is not regions


@pytest.mark.parametrize("which", [0, 1])
def test_regions_that_were_donated_and_never_came_back_are_lost(which):
    store = memory(KV)
    feed(store, 0, 0)
    jax.jit(lambda r: r + np.float16(1), donate_argnums=0)(store.regions()[which])
    assert store.lost
    store.drop()
    assert not store.lost and store.ends() == [0, 0]
    assert not any(r.is_deleted() for r in store.regions())


# --- claims -------------------------------------------------------------------------------------


@pytest.mark.parametrize("hp", [KV, ISWA, WINDOWS, MAMBA, HYBRID])
@pytest.mark.parametrize("kv_unified", [True, False])
def test_a_call_that_does_not_fit_changes_nothing(hp, kv_unified):
    store = memory(hp, n_ctx=26, kv_unified=kv_unified)  # of 13 tokens each
    assert feed(store, *[0] * 9, *[1] * 10)
    before = books(store)
    rows = [0] * 4 + [1] * 4
    if hp in (MAMBA, WINDOWS):  # which go on for ever
        assert feed(store, *rows) and store.ends() == [13, 14]
        return
    assert not feed(store, *rows)
    assert books(store) == before and store.ends() == [9, 10]
    assert feed(store, *[0] * 4, *[1] * 3) and store.ends() == [13, 13]


def test_a_call_of_one_ubatch_is_claimed_once():
    store = memory(HYBRID)
    (part,) = ubatches(store, 0, 1)
    assert store.begin([part]) and store.ends() == [1, 1]
    store.next_claim(part)
    assert store.ends() == [1, 1]
    store.end()
    parts = ubatches(store, *[0] * 6)
    assert store.begin(parts) and store.ends() == [1, 1]  # the dry run left no trace
    for part, end in zip(parts, (5, 7), strict=True):
        store.next_claim(part)
        assert store.ends() == [end, 1]
    store.end()


@pytest.mark.parametrize("hp", [KV, ISWA, MAMBA, HYBRID])
def test_going_back_to_before_a_call(hp):
    store = memory(hp)
    feed(store, 0, 0, 0, 1)
    before = [[c.positions(s).tolist() for s in range(2)] for c in store.caches]
    slots = store.states and [store.states.slot(s) for s in range(2)]
    parts = ubatches(store, *[0, 1] * 4)
    assert store.begin(parts)
    store.next_claim(parts[0])
    assert store.go_back(0, 3) and store.go_back(1, 1)
    store.end()
    assert store.ends() == [3, 1]
    assert before == [[c.positions(s).tolist() for s in range(2)] for c in store.caches]
    assert slots == (store.states and [store.states.slot(s) for s in range(2)])


@pytest.mark.parametrize("hp", [ISWA, WINDOWS])
def test_a_sequence_whose_window_was_overwritten_is_forgotten(hp):
    store = memory(hp, n_seq_max=1)
    for _ in range(4):
        assert feed(store, *[0] * 4)
    parts = ubatches(store, *[0] * 12)
    assert store.begin(parts)
    store.next_claim(parts[0])
    assert store.caches[-1].pos_min(0) == 12
    store.next_claim(parts[1])
    assert store.caches[-1].pos_min(0) == 16  # the token at 16 sees 13, 14 and 15
    assert not store.go_back(0, 16)
    store.end()
    assert store.ends() == [0] and store.pos_min(0) == -1
    assert feed(store, 0) and store.ends() == [1]


def test_rows_and_maps_of_all_parts():
    store = memory(replace(ISWA, recurrent_layers=(True, False), states=((3,),)), n_seq_max=1)
    (part,) = ubatches(store, 0, 0)
    store.begin([part])
    claim = store.next_claim(part)
    whole, window, states = store.rows(part, claim, mapped=False)
    assert whole.tolist() == [[0, 1], [0, 0], [0, 1]]
    assert window.tolist() == [[0, 1], [0, 0], [1, 1]]  # always mapped
    assert states.tolist() == [[2, 2], [0, 0]]
    assert store.straight(part) and len(store.maps(False)) == 1 and len(store.maps(True)) == 2
    assert store.rows(part, claim, mapped=True)[0].tolist() == [[0, 1], [0, 0], [1, 1]]


def test_how_masks_number_sequences():
    for hp, unified, numbers in (
        (KV, True, [1, 0]),
        (KV, False, [0, 0]),
        (HYBRID, False, [0, 0]),
        (MAMBA, False, [1, 0]),
    ):
        store = memory(hp, kv_unified=unified)
        assert store.unified == (unified and hp is KV) and store.shareable == (
            unified or hp is MAMBA
        )
        (part,) = ubatches(store, 1, 0)
        out = store.numbers(part)
        assert out.tolist() == numbers and out.dtype == np.int32


# --- what can be forgotten ----------------------------------------------------------------------


@pytest.mark.parametrize("kv_unified", [True, False])
def test_an_ordinary_cache_forgets_anything(kv_unified):
    store = memory(KV, kv_unified=kv_unified)
    feed(store, *[0] * 9)
    for p0, p1 in ((0, 3), (4, 5), (7, END), (0, END), (20, END), (5, 2)):
        assert can_remove(store, p0, p1)
    store.remove(0, 4, 6)
    store.remove(0, 8, END)
    assert sorted(store.caches[0].positions(0).tolist()) == [0, 1, 2, 3, 6, 7]
    store.remove(0, 5, 2)
    store.remove(0, 8, 20)
    assert store.ends() == [8, 0] and store.pos_min(0) == 0
    store.remove(0, 0, 2)
    assert store.pos_min(0) == 2


@pytest.mark.parametrize("hp", [ISWA, WINDOWS])
def test_a_window_goes_back_as_far_as_it_holds_what_would_be_seen(hp):
    store = memory(hp, n_seq_max=1)
    feed(store, *[0] * 8)
    assert all(can_remove(store, p) for p in range(9))  # nothing is overwritten yet
    feed(store, *[0] * 4)
    feed(store, *[0] * 3)  # 15 tokens, of which the window holds the last 8: 7 to 14
    assert store.caches[-1].pos_min(0) == 7
    assert store.pos_min(0) == 7 and store.pos_max(0) == 14
    # The next token at p sees p - 3 on.
    assert [p for p in range(16) if can_remove(store, p)] == [0, 10, 11, 12, 13, 14, 15]
    store.remove(0, 10, END)
    assert [p for p in range(11) if can_remove(store, p)] == [0, 10]
    feed(store, 0)
    assert [p for p in range(12) if can_remove(store, p)] == [0, 10, 11]


def test_what_matters_is_where_the_sequence_ends_and_not_where_the_removal_begins():
    """Behind a gap the next token comes sooner, and sees tokens that may have been overwritten."""
    store = memory(ISWA, n_seq_max=1)
    feed(store, *[0] * 8)
    store.remove(0, 4, 7)  # 0 to 3, and 7
    for _ in range(5):
        feed(store, 0)  # 8 to 12: three cells are empty, then those of 7 and 0 are overwritten
    assert sorted(store.caches[1].positions(0).tolist()) == [1, 2, 3, 8, 9, 10, 11, 12]
    # 11: 8 to 10 are seen. 10: 7 would be. 6: a token at 4 would see 1, 2 and 3, at 3 also 0.
    assert [p for p in range(14) if can_remove(store, p)] == [0, 4, 5, 6, 7, 11, 12, 13]


def test_a_hole_in_a_window_is_seen_wherever_the_search_for_cells_has_left_it():
    """Cells are overwritten in the order of the ring, which is not always that of positions."""
    store = memory(ISWA, n_seq_max=3, kv_unified=True)  # 16 cells
    feed(store, 1, 1, 1, 1)
    feed(store, *[2] * 4)
    for _ in range(3):
        feed(store, *[0] * 4)  # 8 to 15, then 0 of them again
    store.remove(1, 0, END)
    window = store.caches[1]
    for _ in range(4):
        feed(store, 0)
    held = sorted(window.positions(0).tolist())
    for p in range(store.ends()[0]):
        needed = set(range(max(0, p - 3), p))
        assert can_remove(store, p) == (needed <= set(held)), (p, held)


def test_the_middle_of_a_window_can_go_and_nothing_older_comes_back():
    store = memory(ISWA, n_seq_max=1)
    for _ in range(5):
        feed(store, *[0] * 3)
    assert can_remove(store, 9, 12) and can_remove(store, 0, 3)
    store.remove(0, 9, 12)
    assert sorted(store.caches[1].positions(0).tolist()) == [7, 8, 12, 13, 14]
    assert [p for p in range(16) if can_remove(store, p)] == [0, 13, 14, 15]


def test_states_go_back_to_snapshots_alone():
    for hp in (MAMBA, HYBRID):
        store = memory(hp, n_snapshots=2)
        for n in (3, 2, 4):
            feed(store, *[0] * n)
        assert [p for p in range(11) if can_remove(store, p)] == [0, 3, 5, 9, 10]
        assert not can_remove(store, 0, 3) and not can_remove(store, 3, 5)
        assert store.pos_min(0) == store.pos_max(0) == 8
        store.remove(0, 5, END)
        assert store.ends() == [5, 0]
        assert all(c.positions(0).tolist() == [0, 1, 2, 3, 4] for c in store.caches)
        store.remove(0, 0, END)
        assert store.ends() == [0, 0] and not store.states.can_go_back(0, 2)


# --- copies -------------------------------------------------------------------------------------


def test_a_part_can_be_copied_if_it_could_go_on():
    store = memory(KV)
    feed(store, *[0] * 6)
    assert all(store.can_share(0, p0, p1) for p0, p1 in ((0, END), (0, 3), (2, 5), (3, END)))
    store = memory(ISWA, kv_unified=True)
    for _ in range(9):
        feed(store, *[0] * 3)  # 27 tokens; the window's 12 cells hold 15 to 26
    assert store.caches[1].pos_min(0) == 15
    # A copy that ends at p sees p - 3 on.
    assert [p for p in range(29) if store.can_share(0, 0, p)] == [0, *range(18, 29)]
    assert store.can_share(0, 15, 17) and not store.can_share(0, 14, 16)
    for hp in (MAMBA, HYBRID):
        store = memory(hp)
        feed(store, *[0] * 6)
        assert store.can_share(0, 0, END) and store.can_share(0, 0, 6)
        assert not store.can_share(0, 0, 5) and not store.can_share(0, 1, END)


def test_a_copy_shares_cells_or_has_a_stream_copied(monkeypatch):
    shared = memory(KV, kv_unified=True)
    feed(shared, *[0] * 5, 1, 1)
    shared.share(0, 1, 0, 3)
    assert shared._regions is None and shared.ends() == [5, 3]
    assert shared.alike(0, 0) and not shared.alike(0, 1)
    store = memory(HYBRID)
    feed(store, 0, 0, 1)
    assert store.states is not None
    shape, dtype = store.plan.layout[0]
    filled = np.broadcast_to(np.arange(shape[1], dtype=dtype)[None, :, None], shape)
    regions = store.regions()
    store.take_back((jax.device_put(filled.copy(), store._device), *regions[1:]))
    store.share(0, 1, 0, END)
    assert store.ends() == [2, 2] and store.states.slot(0) == store.states.slot(1)
    half = shape[1] // 2
    k = np.array(store.regions()[0])
    np.testing.assert_array_equal(k[:, half:], k[:, :half])
    before = store.regions()
    store.share(1, 0, 5, END)  # nothing is there
    assert store.ends() == [0, 2]
    assert before is not None


def test_a_copy_that_fails_leaves_the_books_as_they_are(monkeypatch):
    store = memory(KV)
    feed(store, 0, 0, 1)

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(store, "_copy_stream", fail)
    with pytest.raises(MemoryError):
        store.share(0, 1, 0, END)
    assert store.ends() == [2, 1] and not store.lost


# --- shifts -------------------------------------------------------------------------------------


def by(delta: int):
    return lambda pos: pos + np.int32(delta)


def test_positions_of_an_ordinary_cache_can_all_be_changed():
    store = memory(KV)
    feed(store, *[0] * 6)
    assert store.can_move(0, 2, 4, by(3)) and store.can_move(0, 0, END, by(-2))
    store.move(0, 3, END, by(-2))
    assert sorted(store.caches[0].positions(0).tolist()) == [0, 1, 1, 2, 2, 3]
    assert store.shifted and store.ends() == [4, 0]
    store.move(0, 0, END, by(-1))
    assert sorted(store.caches[0].positions(0).tolist()) == [0, 0, 1, 1, 2]
    assert not memory(KV).shifted


def test_a_window_can_be_moved_unless_that_brings_forgotten_tokens_into_it():
    store = memory(ISWA, n_seq_max=1)
    for _ in range(5):
        feed(store, *[0] * 3)  # the window holds 7 to 14
    assert store.can_move(0, 0, END, by(-5)) and store.can_move(0, 0, END, by(5))
    # The next token sees the last three wherever they are, if they keep together.
    assert store.can_move(0, 12, END, by(-4)) and store.can_move(0, 12, END, by(9))
    assert store.can_move(0, 7, END, by(-3)) and store.can_move(0, 0, 7, by(2))
    assert not store.can_move(0, 7, END, by(-7))  # 5 and 6 would be there twice, and one is gone
    assert not store.can_move(0, 0, 7, by(6))
    assert not store.can_move(0, 0, END, lambda pos: pos // np.int32(4))


def test_states_move_as_a_whole():
    for hp in (MAMBA, HYBRID):
        store = memory(hp, n_snapshots=1)
        feed(store, 0, 0)
        feed(store, 0, 0, 0)
        assert store.can_move(0, 0, END, by(2)) and store.can_move(0, 9, END, by(2))
        assert not store.can_move(0, 1, END, by(2)) and not store.can_move(0, 0, 3, by(2))
        store.move(0, 0, END, by(2))
        assert store.ends() == [7, 0] and not can_remove(store, 2) and can_remove(store, 7)
        store.move(0, 0, END, by(-9))
        assert store.ends() == [0, 0]


def test_no_part_no_shift():
    assert memory(KV).can_shift and memory(MAMBA).can_shift
    gc.collect()
