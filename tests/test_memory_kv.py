"""The books of one cache: which cells of which stream, what rows are told, what windows forget."""

from typing import Any

import numpy as np
import pytest

from minfer_jax.batch import Batch, Ubatch, check_batch, split_simple
from minfer_jax.memory.kv import KVCache
from minfer_jax.memory.plan import CacheSpec

END = 1 << 31


def cache(n_seq: int = 3, size: int = 8, *, unified: bool = True, window: int = 0) -> KVCache:
    """Streams of `size` usable cells, 16 apart."""
    spec = CacheSpec(
        layers=(0, 1),
        n_head_kv=2,
        head_dim_k=4,
        head_dim_v=4,
        types=("f32", "f32"),
        window=window,
        n_stream=1 if unified else n_seq,
        stream_cells=16,
        stream_size=size,
        n_seq=n_seq if unified else 1,
    )
    return KVCache(spec)


def rows_of(kv: KVCache, *seqs: Any) -> Ubatch:
    """The next rows of these sequences."""
    n_seq = kv.spec.n_seq * kv.spec.n_stream
    n_past = [kv.pos_max(s) + 1 for s in range(n_seq)]
    batch = Batch(token=[0] * len(seqs), seq_id=seqs)
    alike = kv.alike if kv.unified else None
    checked = check_batch(batch, n_vocab=1, n_embd=1, n_past=n_past, alike=alike)
    return split_simple(checked, len(seqs))[0]


def feed(kv: KVCache, *seqs: Any) -> list[int] | None:
    """Cells of the next rows of these sequences."""
    claim = kv.claim(rows_of(kv, *seqs))
    return None if claim is None else claim.cells.tolist()


def positions(kv: KVCache, seq: int) -> list[int]:
    return sorted(kv.positions(seq).tolist())


# --- claiming -----------------------------------------------------------------------------------


def test_sequences_share_the_cells_of_one_stream():
    kv = cache()
    assert feed(kv, 0, 1, 0, 2, [1]) == [0, 1, 2, 3, 4]
    assert [kv.pos_max(s) for s in range(3)] == [1, 1, 0] and kv.pos_min(2) == 0
    assert feed(kv, 0, 0, 0, 0) is None and [kv.pos_max(s) for s in range(3)] == [1, 1, 0]
    assert feed(kv, 2, 2, 2) == [5, 6, 7]
    assert kv.at(2) == (kv.streams[0], 2) and kv.first_cell(2) == 0


def test_a_row_of_several_sequences_is_one_cell():
    kv = cache()
    assert feed(kv, [0, 1, 2], [0, 2]) is not None
    assert [positions(kv, s) for s in range(3)] == [[0, 1], [0], [0, 1]]
    assert kv.alike(0, 2) and not kv.alike(0, 1)
    assert kv.shared(0, 0, 1) and kv.shared(0, 1, 2) and not kv.shared(1, 1, END)
    kv.remove(2, 1, END)
    assert kv.alike(1, 2) and not kv.shared(0, 1, 2) and kv.shared(0, 0, 2)


def test_streams_hold_their_sequences_apart():
    kv = cache(unified=False)
    assert feed(kv, 2, 0, 2, 1) == [32, 0, 33, 16]
    assert feed(kv, 0, 2) == [1, 34]
    assert [kv.pos_max(s) for s in range(3)] == [1, 0, 2]
    claim = kv.claim(rows_of(kv, 1, *[0] * 7))  # 1 would fit, 0 has six left
    assert claim is None and [kv.pos_max(s) for s in range(3)] == [1, 0, 2]
    assert kv.at(2) == (kv.streams[2], 0) and kv.first_cell(2) == 32
    assert not kv.alike(0, 1) and not kv.alike(0, 0)


@pytest.mark.parametrize("unified", [True, False])
def test_claims_can_be_taken_back_the_last_one_first(unified):
    kv = cache(unified=unified)
    feed(kv, 0, 1)
    claims = [kv.claim(rows_of(kv, 1, 0)), kv.claim(rows_of(kv, 2, 1))]
    for claim in reversed(claims):
        assert claim is not None
        kv.undo(claim)
    assert [kv.pos_max(s) for s in range(3)] == [0, 0, -1]
    assert [cells.used for cells in kv.streams] == ([2] if unified else [1, 1, 0])
    assert feed(kv, 0) == ([2] if unified else [1])


# --- what a graph is fed ------------------------------------------------------------------------


def test_rows_of_runs_see_from_their_first_cell_to_their_own():
    kv = cache()
    feed(kv, 0, 0)
    ubatch = rows_of(kv, 1, 1, 1)
    claim = kv.claim(ubatch)
    assert claim is not None and kv.straight(ubatch)
    rows = kv.rows(ubatch, claim.cells, mapped=False)
    assert rows.tolist() == [[2, 3, 4], [2, 2, 2], [2, 3, 4]] and rows.dtype == np.int32


def test_rows_of_scattered_cells_are_told_where_to_look():
    kv = cache()
    feed(kv, 0, 1)
    ubatch = rows_of(kv, 0, 2)
    claim = kv.claim(ubatch)
    assert claim is not None and not kv.straight(ubatch)
    assert kv.rows(ubatch, claim.cells, mapped=True).tolist() == [[2, 3], [0, 0], [3, 3]]
    kv.remove(0, 0, END)
    kv.remove(1, 0, END)
    ubatch = rows_of(kv, 2)
    claim = kv.claim(ubatch)
    assert claim is not None and kv.rows(ubatch, claim.cells, mapped=True).tolist() == [
        [0],
        [0],
        [3],
    ]
    assert not kv.straight(ubatch)  # position 0 is in cell 3


def test_rows_of_streams_are_told_cells_of_their_stream():
    kv = cache(unified=False)
    feed(kv, 0, 2, 0, 2)
    ubatch = rows_of(kv, 2, 0)
    claim = kv.claim(ubatch)
    assert claim is not None and kv.straight(ubatch)
    assert kv.rows(ubatch, claim.cells, mapped=False).tolist() == [[34, 2], [32, 0], [34, 2]]
    kv.remove(2, 0, 1)
    assert kv.straight(ubatch)  # position 1 on
    kv.remove(2, 1, 2)
    ubatch = rows_of(kv, 2, 0)
    claim = kv.claim(ubatch)
    assert claim is not None and not kv.straight(ubatch)
    assert kv.rows(ubatch, claim.cells, mapped=True).tolist() == [[32, 3], [32, 0], [34, 3]]


def test_only_sequences_of_the_rows_have_to_be_straight():
    kv = cache()
    feed(kv, 0, 1, 0)
    assert kv.straight(rows_of(kv, 1)) and not kv.straight(rows_of(kv, 0))
    kv.remove(0, 1, END)
    assert kv.straight(rows_of(kv, 0))


def test_the_map_of_cells():
    kv = cache(n_seq=34)
    feed(kv, [0, 33], 0, 31, 32)
    cells = kv.map()
    assert cells.shape == (3, 16) and cells.dtype == np.int32
    assert cells[0].tolist() == [0, 1, 0, 0] + [-1] * 12
    assert cells[1].tolist() == [1, 1, -(2**31), 0] + [0] * 12
    assert cells[2].tolist() == [2, 0, 0, 1] + [0] * 12
    assert not np.shares_memory(cells, kv.map())
    kv.remove(0, 0, END)
    assert cells[1, 0] == 1 and kv.map()[1:, 0].tolist() == [0, 2]


def test_the_map_of_streams():
    kv = cache(n_seq=2, unified=False)
    feed(kv, 0, 1, 1)
    cells = kv.map()
    assert cells.shape == (2, 32)
    assert cells[0].tolist() == [0] + [-1] * 15 + [0, 1] + [-1] * 14
    assert cells[1].tolist() == [1] + [0] * 15 + [1, 1] + [0] * 14


# --- windows ------------------------------------------------------------------------------------


def test_a_window_overwrites_what_no_next_token_sees():
    kv = cache(window=3)
    feed(kv, *[0] * 8)
    assert [kv.first_needed(pos) for pos in (0, 1, 2, 3, 8)] == [0, 0, 0, 1, 6]
    # The next token, at 8, sees 6 and 7; six cells are free.
    assert feed(kv, *[0] * 7) is None and positions(kv, 0) == list(range(8))
    assert feed(kv, *[0] * 6) == [0, 1, 2, 3, 4, 5]
    assert positions(kv, 0) == list(range(6, 14))
    assert feed(kv, 0) == [6] and positions(kv, 0) == [7, 8, 9, 10, 11, 12, 13, 14]
    assert not kv.straight(rows_of(kv, 0))


def test_a_window_keeps_what_any_sequence_of_a_cell_sees():
    kv = cache(window=3)
    feed(kv, *[[0, 1]] * 3)  # 1 still sees positions 1 and 2
    feed(kv, *[0] * 5)
    assert feed(kv, 0) == [0]  # position 0
    assert feed(kv, *[0] * 5) is None
    assert feed(kv, *[0] * 4) == [3, 4, 5, 6]
    assert positions(kv, 1) == [1, 2] and positions(kv, 0) == [1, 2, 7, 8, 9, 10, 11, 12]


def test_taking_back_what_a_window_overwrote():
    kv = cache(window=3)
    feed(kv, *[0] * 8)
    before = kv.map()
    claims = [kv.claim(rows_of(kv, *[0] * 6)), kv.claim(rows_of(kv, *[0] * 5))]
    for claim in reversed(claims):
        assert claim is not None
        kv.undo(claim)
    np.testing.assert_array_equal(kv.map(), before)
    assert positions(kv, 0) == list(range(8)) and feed(kv, 0) == [0]


# --- operations ---------------------------------------------------------------------------------


def test_sharing_costs_no_cell():
    kv = cache()
    feed(kv, 0, 0, 0, 1, 1)
    kv.share(0, 1, 0, 2)
    assert positions(kv, 1) == [0, 1] and kv.streams[0].used == 3
    kv.share(0, 2, 1, END)
    assert positions(kv, 2) == [1, 2] and (kv.pos_min(2), kv.pos_max(2)) == (1, 2)
    kv.share(1, 2, 2, END)  # nothing is there
    assert positions(kv, 2) == []


def test_streams_take_what_another_holds():
    kv = cache(unified=False)
    feed(kv, 0, 0, 0, 1, 1, 1, 1)
    kv.share(0, 1, 1, END)
    assert positions(kv, 1) == [1, 2] and positions(kv, 0) == [0, 1, 2]
    assert kv.streams[1].pos.tolist() == [-1, 1, 2, -1, -1, -1, -1, -1]


@pytest.mark.parametrize("unified", [True, False])
def test_moving_adds_up_until_keys_have_been_turned(unified):
    kv = cache(unified=unified)
    feed(kv, *[1] * 4)
    assert not kv.shifted
    kv.move(1, 2, END, lambda pos: pos + np.int32(5))
    kv.move(1, 7, 8, lambda pos: pos - np.int32(7))
    begin = 0 if unified else 16
    shifts = np.zeros(kv.spec.n_cells, np.int32)
    shifts[begin : begin + 4] = [0, 0, -2, 5]
    assert kv.shifted and kv.shifts().tolist() == shifts.tolist() and kv.shifts().dtype == np.int32
    assert positions(kv, 1) == [0, 0, 1, 8]
    kv.forget_shifts()
    assert not kv.shifted and not kv.shifts().any() and positions(kv, 1) == [0, 0, 1, 8]


def test_order_of_streams_and_where_there_is_nothing_to_do():
    kv = cache(unified=False)
    assert kv.order() is None
    feed(kv, 0, 1, 0, 1, 1)
    assert kv.order() is None
    kv.remove(1, 0, 1)
    assert kv.order() is None  # still one run
    kv.remove(1, 1, 2)
    feed(kv, 1, 1)
    order = kv.order()
    assert (
        order is not None and order.dtype == np.int32 and sorted(order.tolist()) == list(range(48))
    )
    assert order[:16].tolist() == list(range(16)) and order[16:19].tolist() == [18, 16, 17]
    kv.permute(order)
    assert positions(kv, 1) == [2, 3, 4] and kv.streams[1].pos[:3].tolist() == [2, 3, 4]
    assert kv.order() is None


def test_what_cannot_be_straighter_is_left_alone():
    kv = cache()
    feed(kv, [0, 1], 0, 1)  # 1 shares its beginning
    assert kv.order() is None
    feed(kv, 0)
    order = kv.order()
    assert order is not None and order[:4].tolist() == [0, 1, 3, 2]
    kv.permute(order)
    assert kv.order() is None and positions(kv, 0) == [0, 1, 2] and positions(kv, 1) == [0, 1]


def test_clearing():
    kv = cache(unified=False)
    feed(kv, 0, 1)
    kv.move(0, 0, END, lambda pos: pos + np.int32(1))
    kv.clear()
    assert [kv.pos_max(s) for s in range(3)] == [-1] * 3 and not kv.shifted
    assert feed(kv, 0, 1) == [0, 16]
