"""`batch`: what a batch may hold, and how it is cut."""

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax.batch import (
    Batch,
    CheckedBatch,
    Ubatch,
    bucket,
    check_batch,
    describe,
    split_equal,
    split_seq,
    split_simple,
)
from minfer_jax.errors import BatchError

N_VOCAB, N_EMBD = 100, 3


def checked(
    batch: Batch, n_past: tuple[int, ...] = (0,), *, n_batch: int | None = None, alike=None
) -> CheckedBatch:
    return check_batch(
        batch, n_vocab=N_VOCAB, n_embd=N_EMBD, n_past=n_past, n_batch=n_batch, alike=alike
    )


def everybody(a: int, b: int) -> bool:
    """For sequences that all hold the same."""
    return True


@pytest.mark.parametrize(
    "token", [[0, 5, 99], (0, 5, 99), np.array([0, 5, 99]), [np.int32(0), 5, np.uint64(99)]]
)
def test_ids_become_int32_and_the_last_tokens_logits_are_wanted(token):
    batch = checked(Batch(token=token), (7,))
    assert batch.token.dtype == batch.pos.dtype == np.int32
    assert batch.wanted.dtype == bool
    assert batch.token.tolist() == [0, 5, 99]
    assert batch.wanted.tolist() == [False, False, True]
    assert batch.pos.tolist() == [7, 8, 9] and batch.seqs == ((0,), (0,), (0,))
    assert batch.embd is None and len(batch) == 3


@pytest.mark.parametrize("logits", [[True, False, True], np.array([1, 0, 1]), (1, 0, 1)])
def test_flags_say_whose_logits_are_wanted(logits):
    wanted = checked(Batch(token=[1, 2, 3], logits=logits)).wanted
    assert wanted.dtype == bool
    assert wanted.tolist() == [True, False, True]


def test_no_logits_need_be_wanted():
    wanted = checked(Batch(token=[1, 2], logits=[False, False])).wanted
    assert wanted.tolist() == [False, False]


@pytest.mark.parametrize(
    "fields",
    [
        {"token": []},
        {"token": ()},
        {"token": np.array([], np.int32)},
        {"embd": np.zeros((0, N_EMBD))},
    ],
)
def test_an_empty_batch_is_refused(fields):
    with pytest.raises(BatchError, match=r"^the batch has no tokens$"):
        checked(Batch(**fields))


@pytest.mark.parametrize("fields", [{}, {"token": [1], "embd": np.zeros((1, N_EMBD))}])
def test_rows_are_tokens_or_embeddings(fields):
    with pytest.raises(BatchError, match="either token ids or embeddings: give one of the two"):
        checked(Batch(**fields))


def test_embeddings_become_float32_of_ones_own():
    given_rows = np.arange(6.0).reshape(2, N_EMBD)
    batch = checked(Batch(embd=given_rows))
    assert batch.embd is not None and batch.embd.dtype == np.float32
    given_rows[:] = 9
    assert batch.embd.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert batch.token.tolist() == [0, 0] and batch.pos.tolist() == [0, 1]
    assert checked(Batch(embd=[[1, 2, 3]])).embd is not None


@pytest.mark.parametrize(
    ("embd", "reason"),
    [
        (np.zeros(N_EMBD), r"have shape \[3\], expected \[n, 3\]"),
        (np.zeros((2, 4)), r"have shape \[2, 4\], expected \[n, 3\]"),
        ([[1.0, 2.0], [3.0]], "are no array of numbers"),
        ([["a", "b", "c"]], "are no array of numbers"),
        ([[1.0, np.nan, 2.0]], "a value that is not a finite number"),
        (np.full((1, N_EMBD), 1e300), "a value that is not a finite number"),
    ],
)
def test_embeddings_that_are_none_are_refused(embd, reason):
    with pytest.raises(BatchError, match=reason):
        checked(Batch(embd=embd))


@pytest.mark.parametrize("n", [1, 2])
def test_a_batch_has_at_most_n_batch_rows(n):
    assert len(checked(Batch(token=[1] * n), n_batch=2)) == n
    with pytest.raises(BatchError, match=r"has 3 tokens; at most n_batch = 2 go into one"):
        checked(Batch(token=[1] * 3), n_batch=2)
    with pytest.raises(BatchError, match=r"has 3 tokens; at most n_batch = 2 go into one"):
        checked(Batch(embd=np.zeros((3, N_EMBD))), n_batch=2)


@pytest.mark.parametrize("bad", [-1, -(2**31), 100, 2**31, 2**32 + 5, 2**64, np.int64(-1)])
def test_an_id_out_of_range_is_refused(bad):
    with pytest.raises(BatchError, match=rf"^token 2 of the batch is {bad}; allowed: 0 to 99$"):
        checked(Batch(token=[1, 2, bad, 3]))


@pytest.mark.parametrize("bad", [True, False, 1.0, 1.5, "1", None, np.float32(1), np.True_, [1]])
def test_an_id_that_is_no_integer_is_refused(bad):
    with pytest.raises(BatchError, match=r"^token 1 of the batch is .*, not an integer$"):
        checked(Batch(token=[1, bad]))


@pytest.mark.parametrize("n", [0, 1, 3])
def test_there_must_be_a_flag_for_each_token(n):
    with pytest.raises(BatchError, match=rf"^the batch has 2 tokens but {n} logits flags$"):
        checked(Batch(token=[1, 2], logits=[True] * n))


def test_every_sequence_goes_on_where_it_ends():
    batch = Batch(token=[1, 2, 3, 4, 5], seq_id=[2, 0, [2], np.int64(1), np.array([2])])
    out = checked(batch, (4, 0, 9))
    assert out.pos.tolist() == [9, 4, 10, 0, 11]
    assert out.seqs == ((2,), (0,), (2,), (1,), (2,))
    same = Batch(token=batch.token, seq_id=batch.seq_id, pos=[9, 4, 10, 0, 11])
    assert checked(same, (4, 0, 9)).pos.tolist() == [9, 4, 10, 0, 11]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"pos": [4, 6]},
            "position 1 of the batch is 6, which leaves a gap: sequence 0 goes on at 5",
        ),
        (
            {"pos": [3, 4]},
            "position 0 of the batch is 3, which is taken already: sequence 0 goes on at 4",
        ),
        (
            {"pos": [4, 4]},
            "position 1 of the batch is 4, which is taken already: sequence 0 goes on at 5",
        ),
        ({"pos": [4, -1]}, "position 1 of the batch is -1, which is taken already"),
        ({"pos": [4, 2**70]}, f"position 1 of the batch is {2**70}, which leaves a gap"),
        ({"pos": [4.0, 5]}, "position 0 of the batch is 4.0, not an integer"),
        ({"pos": [4, True]}, "position 1 of the batch is True, not an integer"),
        ({"pos": [4]}, "the batch has 2 tokens but 1 positions"),
        ({"seq_id": [0, 2]}, "sequence id 1 of the batch is 2; allowed: 0 to 1"),
        ({"seq_id": [-1, 0]}, "sequence id 0 of the batch is -1; allowed: 0 to 1"),
        ({"seq_id": [0, [1, 2]]}, "sequence id 1 of the batch is 2; allowed: 0 to 1"),
        ({"seq_id": [0, [True]]}, "sequence id 1 of the batch is True, not an integer"),
        ({"seq_id": [0, "1"]}, "sequence id 1 of the batch is '1', not an integer"),
        ({"seq_id": [0, {1}]}, "sequence id 1 of the batch is {1}, not an integer"),
        ({"seq_id": [[], 0]}, "token 0 of the batch belongs to no sequence"),
        ({"seq_id": [0, [1, 1]]}, "token 1 of the batch names a sequence twice"),
        ({"seq_id": [0, 1, 1]}, "the batch has 2 tokens but 3 sequence ids"),
    ],
)
def test_a_batch_that_does_not_continue_its_sequences_is_refused(fields, reason):
    with pytest.raises(BatchError) as error:
        checked(Batch(token=[1, 2], **fields), (4, 0), alike=everybody)
    assert str(error.value).startswith(reason)


def test_rows_can_be_shared_and_counted_in_each_of_their_sequences():
    batch = Batch(token=[1, 2, 3, 4], seq_id=[[1, 0], (0, 1), 0, [1]])
    out = checked(batch, (5, 5), alike=everybody)
    assert out.seqs == ((0, 1), (0, 1), (0,), (1,))
    assert out.pos.tolist() == [5, 6, 7, 7]


@pytest.mark.parametrize(
    ("seq_id", "n_past", "reason"),
    [
        ([[0, 1]], (4, 3), "is shared by sequence 0, which goes on at 4, and by sequence 1"),
        ([0, 1, [0, 1]], (4, 4), "token 2 of the batch belongs to sequences 0 and 1, which do not"),
        ([[0, 1], 0, 1, [0, 1]], (4, 4), "token 3 of the batch belongs to sequences 0 and 1"),
        ([[0, 1, 2], [0, 1], 2, [1, 2]], (4,) * 3, "token 3 of the batch belongs to sequences 1"),
        (
            [[0, 3]],
            (4,) * 4,
            "token 0 of the batch belongs to sequences 0 and 3, which do not hold",
        ),
    ],
)
def test_rows_of_sequences_that_diverged_are_refused(seq_id, n_past, reason):
    with pytest.raises(BatchError, match="token") as error:
        batch = Batch(token=[1] * len(seq_id), seq_id=seq_id)
        checked(batch, n_past, alike=lambda a, b: 3 not in (a, b))
    assert reason in str(error.value)


def test_rows_cannot_be_shared_where_cells_are_not():
    batch = Batch(token=[1, 2], seq_id=[0, [0, 1]])
    with pytest.raises(BatchError, match=r"token 1 .* sequences 0 and 1, which keep their cells"):
        checked(batch, (0, 1))


# --- how it is cut ------------------------------------------------------------------------------


def test_k09_33_tokens_are_cut_into_ubatches():
    flags = [i in (0, 7, 13, 32) for i in range(33)]
    batch = checked(Batch(token=range(33), logits=flags), (5,))
    ubatches = split_simple(batch, 7)
    assert [u.pos[0] for u in ubatches] == [5, 12, 19, 26, 33]
    assert [u.index[0] for u in ubatches] == [0, 7, 14, 21, 28]
    assert [len(u) for u in ubatches] == [7, 7, 7, 7, 5]
    assert [u.out.tolist() for u in ubatches] == [[0], [0, 6], [], [], [4]]
    assert {u.out.dtype for u in ubatches} == {np.dtype(np.int32)}
    assert [len(split_simple(batch, n)) for n in (1, 2, 32, 33, 512)] == [33, 17, 2, 1, 1]


SPLITS = (split_simple, split_seq, split_equal)


@st.composite
def batches(draw: st.DrawFn) -> CheckedBatch:
    """Four sequences, of which any may share a row as long as they hold the same."""
    sets = st.sets(st.integers(0, 3), min_size=1, max_size=3)
    rows: list[set[int]] = []
    last: dict[int, int] = {}
    for i in range(draw(st.integers(1, 24))):
        # Such a set of sequences that none has had a row which another has not.
        row = draw(sets.filter(lambda s: len({last.get(seq, -1) for seq in s}) == 1))
        rows.append(row)
        last.update(dict.fromkeys(row, i))
    n = len(rows)
    logits = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    fields: dict = {"token": [i % N_VOCAB for i in range(n)]}
    if draw(st.booleans()):
        fields = {"embd": np.arange(n * N_EMBD).reshape(n, N_EMBD)}
    batch = Batch(**fields, seq_id=[list(row) for row in rows], logits=logits)
    return checked(batch, (3, 3, 3, 3), alike=everybody)


@settings(deadline=None, max_examples=200)
@given(batches(), st.integers(1, 10), st.sampled_from(SPLITS))
def test_every_row_is_in_one_ubatch_and_behind_those_it_follows(batch, n_ubatch, split):
    ubatches = split(batch, n_ubatch)
    order = [i for u in ubatches for i in u.index.tolist()]
    assert sorted(order) == list(range(len(batch)))
    for seq in range(4):
        mine = [i for i in order if seq in batch.seqs[i]]
        assert mine == sorted(mine)
    for u in ubatches:
        rows = u.index.tolist()
        assert rows == sorted(rows) and 1 <= len(u) == len(rows) <= n_ubatch
        assert u.token.tolist() == batch.token[rows].tolist()
        assert u.pos.tolist() == batch.pos[rows].tolist()
        assert u.seqs == tuple(batch.seqs[i] for i in rows)
        assert u.seq_id.tolist() == [min(batch.seqs[i]) for i in rows]
        assert u.out.tolist() == [at for at, i in enumerate(rows) if batch.wanted[i]]
        assert (u.embd is None) == (batch.embd is None)
        if u.embd is not None and batch.embd is not None:
            np.testing.assert_array_equal(u.embd, batch.embd[rows])
        assert u.index.dtype == u.out.dtype == u.seq_id.dtype == np.int32


@settings(deadline=None, max_examples=200)
@given(batches(), st.integers(1, 10))
def test_what_each_split_promises(batch, n_ubatch):
    simple = split_simple(batch, n_ubatch)
    assert [u.index[0] for u in simple] == list(range(0, len(batch), n_ubatch))
    for u in split_seq(batch, n_ubatch):
        assert len(set(u.seqs)) == 1
    for u in split_equal(batch, n_ubatch):
        named = [seq for row in u.seqs for seq in row]
        one_each = len(set(named)) == len(named)
        assert len(set(u.seqs)) == 1 or one_each
        assert u.one_row_each == (one_each or len(u) == 1)


def cut(split, seq_id, n_ubatch=8) -> list[list[int]]:
    n_seq = 1 + max(max(s) if isinstance(s, list) else s for s in seq_id)
    batch = Batch(token=[0] * len(seq_id), seq_id=seq_id)
    batch = checked(batch, (0,) * n_seq, alike=everybody)
    return [u.index.tolist() for u in split(batch, n_ubatch)]


def test_sequences_that_lie_between_each_other():
    seq_id = [0, 1, 0, 2, 1, 0]
    assert cut(split_simple, seq_id, 4) == [[0, 1, 2, 3], [4, 5]]
    assert cut(split_seq, seq_id) == [[0, 2, 5], [1, 4], [3]]
    assert cut(split_seq, seq_id, 2) == [[0, 2], [1, 4], [3], [5]]
    assert cut(split_equal, seq_id) == [[0, 2, 5], [1, 4], [3]]
    assert cut(split_equal, seq_id, 2) == [[0, 2], [1, 4], [3, 5]]


def test_a_step_of_many_sequences_is_one_ubatch_for_states():
    assert cut(split_equal, [3, 1, 0, 2]) == [[0, 1, 2, 3]]
    assert cut(split_equal, [3, 1, 0, 2], 3) == [[0, 1, 2], [3]]
    assert cut(split_seq, [3, 1, 0, 2]) == [[0], [1], [2], [3]]


def test_a_shared_prompt_comes_before_its_branches():
    both: list[int] = [0, 1]
    seq_id = [both, both, 0, 1, 0, 1, [0], [1]]
    assert cut(split_seq, seq_id) == [[0, 1], [2, 4, 6], [3, 5, 7]]
    assert cut(split_equal, seq_id) == [[0, 1], [2, 4, 6], [3, 5, 7]]
    assert cut(split_equal, [both, 0, 1]) == [[0], [1, 2]]
    assert cut(split_equal, [[0, 1, 2], [0, 1], 2, 0, 1]) == [[0], [1, 2], [3, 4]]
    assert cut(split_equal, [both, 2, both, 0, 1]) == [[0, 2], [1, 3, 4]]
    assert cut(split_seq, [2, both, 2, 0, 1]) == [[0, 2], [1], [3], [4]]


def test_one_row_each():
    def of(*seqs: tuple[int, ...]) -> Ubatch:
        n = np.zeros(len(seqs), np.int32)
        return Ubatch(n, n, None, n, seqs, n)

    assert of((3,)).one_row_each and of((2,), (0,), (1,)).one_row_each
    assert (
        of(
            (2, 3),
        ).one_row_each
        and of((0, 1), (2,)).one_row_each
    )
    assert not of((2,), (0,), (2,)).one_row_each and not of((0, 1), (1,)).one_row_each


def test_describe():
    batch = Batch(token=[0] * 5, seq_id=[[0, 1], 0, 1, 0, 1], logits=[0, 0, 1, 1, 1])
    ubatches = split_simple(checked(batch, (7, 7), alike=everybody), 3)
    assert describe(ubatches) == (
        "ubatch 0: 3 rows, 1 outputs, sequence:positions 0+1:7..7 0:8..8 1:8..8\n"
        "ubatch 1: 2 rows, 2 outputs, sequence:positions 0:9..9 1:9..9"
    )


# --- buckets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_ubatch", "sizes"),
    [
        (1, {1}),
        (2, {1, 2}),
        (16, {1, 16}),
        (32, {1, 32}),
        (33, {1, 32, 33}),
        (100, {1, 32, 100}),
        (128, {1, 32, 128}),
        (512, {1, 32, 128, 512}),
        (2048, {1, 32, 128, 512, 2048}),
    ],
)
def test_buckets_hold_their_rows_and_are_few(n_ubatch, sizes):
    chosen = {n: bucket(n, n_ubatch, decode=False) for n in range(1, n_ubatch + 1)}
    assert set(chosen.values()) == sizes
    for n, size in chosen.items():
        # The smallest that holds them; a decode step has a graph of its own.
        assert size == min(s for s in sizes if s >= n and (s > 1 or n == 1))


@pytest.mark.parametrize("n_ubatch", [1, 7, 32, 512])
def test_prompts_of_every_length_need_few_buckets(n_ubatch):
    whole = checked(Batch(token=[0] * 600))
    sizes = set()
    for n in range(1, 601):
        part = CheckedBatch(whole.token[:n], None, whole.pos[:n], whole.seqs[:n], whole.wanted[:n])
        for size, _ in groupby(split_simple(part, n_ubatch), key=len):
            sizes.add(bucket(size, n_ubatch, decode=False))
    assert max(sizes) == n_ubatch
    assert len(sizes) == {1: 1, 7: 2, 32: 2, 512: 4}[n_ubatch]


def test_decode_steps_have_small_buckets():
    sizes = {n: bucket(n, 512, decode=True) for n in (1, 2, 4, 5, 9, 16, 17, 32, 33, 200)}
    assert sizes == {1: 1, 2: 4, 4: 4, 5: 8, 9: 16, 16: 16, 17: 32, 32: 32, 33: 128, 200: 512}
    assert [bucket(n, 8, decode=True) for n in (1, 3, 5, 8)] == [1, 4, 8, 8]
