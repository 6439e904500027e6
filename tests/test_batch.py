"""`batch`: what a batch may hold, and how it is cut."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax.batch import Batch, bucket, check_batch, one_row_each, split_simple
from minfer_jax.errors import BatchError

N_VOCAB = 100


@pytest.mark.parametrize(
    "token", [[0, 5, 99], (0, 5, 99), np.array([0, 5, 99]), [np.int32(0), 5, np.uint64(99)]]
)
def test_ids_become_int32_and_the_last_tokens_logits_are_wanted(token):
    checked = check_batch(Batch(token=token), N_VOCAB, [7])
    assert checked.token.dtype == checked.pos.dtype == checked.seq_id.dtype == np.int32
    assert checked.wanted.dtype == bool
    assert checked.token.tolist() == [0, 5, 99]
    assert checked.wanted.tolist() == [False, False, True]
    assert checked.pos.tolist() == [7, 8, 9] and checked.seq_id.tolist() == [0, 0, 0]


@pytest.mark.parametrize("logits", [[True, False, True], np.array([1, 0, 1]), (1, 0, 1)])
def test_flags_say_whose_logits_are_wanted(logits):
    wanted = check_batch(Batch(token=[1, 2, 3], logits=logits), N_VOCAB).wanted
    assert wanted.dtype == bool
    assert wanted.tolist() == [True, False, True]


def test_no_logits_need_be_wanted():
    wanted = check_batch(Batch(token=[1, 2], logits=[False, False]), N_VOCAB).wanted
    assert wanted.tolist() == [False, False]


@pytest.mark.parametrize("token", [[], (), np.array([], np.int32)])
def test_an_empty_batch_is_refused(token):
    with pytest.raises(BatchError, match=r"^the batch has no tokens$"):
        check_batch(Batch(token=token), N_VOCAB)


@pytest.mark.parametrize("bad", [-1, -(2**31), 100, 2**31, 2**32 + 5, 2**64, np.int64(-1)])
def test_an_id_out_of_range_is_refused(bad):
    with pytest.raises(BatchError, match=rf"^token 2 of the batch is {bad}; allowed: 0 to 99$"):
        check_batch(Batch(token=[1, 2, bad, 3]), N_VOCAB)


@pytest.mark.parametrize("bad", [True, False, 1.0, 1.5, "1", None, np.float32(1), np.True_, [1]])
def test_an_id_that_is_no_integer_is_refused(bad):
    with pytest.raises(BatchError, match=r"^token 1 of the batch is .*, not an integer$"):
        check_batch(Batch(token=[1, bad]), N_VOCAB)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_there_must_be_a_flag_for_each_token(n):
    with pytest.raises(BatchError, match=rf"^the batch has 2 tokens but {n} logits flags$"):
        check_batch(Batch(token=[1, 2], logits=[True] * n), N_VOCAB)


def test_k09_33_tokens_are_cut_into_ubatches():
    flags = [i in (0, 7, 13, 32) for i in range(33)]
    batch = check_batch(Batch(token=range(33), logits=flags), N_VOCAB, [5])
    ubatches = split_simple(batch, 7)
    assert [u.pos[0] for u in ubatches] == [5, 12, 19, 26, 33]
    assert [u.start for u in ubatches] == [0, 7, 14, 21, 28]
    assert [len(u.token) for u in ubatches] == [7, 7, 7, 7, 5]
    assert [u.out.tolist() for u in ubatches] == [[0], [0, 6], [], [], [4]]
    assert {u.out.dtype for u in ubatches} == {np.dtype(np.int32)}
    assert [len(split_simple(batch, n)) for n in (1, 2, 32, 33, 512)] == [33, 17, 2, 1, 1]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1), st.integers(1, 120))
def test_every_token_and_flag_is_in_one_ubatch(rows, n_ubatch):
    batch = check_batch(Batch(token=[t for t, _ in rows], logits=[w for _, w in rows]), N_VOCAB)
    ubatches = split_simple(batch, n_ubatch)
    assert [t for u in ubatches for t in u.token.tolist()] == [t for t, _ in rows]
    assert [p for u in ubatches for p in u.pos.tolist()] == list(range(len(rows)))
    assert [u.start + i for u in ubatches for i in u.out.tolist()] == [
        i for i, (_, w) in enumerate(rows) if w
    ]
    assert [u.start for u in ubatches] == list(range(0, len(rows), n_ubatch))
    assert all(1 <= len(u.token) <= n_ubatch for u in ubatches)


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
    sizes = set()
    for n in range(1, 601):
        ubatches = split_simple(check_batch(Batch(token=[0] * n), N_VOCAB), n_ubatch)
        sizes |= {bucket(len(u.token), n_ubatch, decode=False) for u in ubatches}
    assert max(sizes) == n_ubatch
    assert len(sizes) == {1: 1, 7: 2, 32: 2, 512: 4}[n_ubatch]


def test_every_sequence_goes_on_where_it_ends():
    batch = Batch(token=[1, 2, 3, 4, 5], seq_id=[2, 0, 2, 1, 2])
    checked = check_batch(batch, N_VOCAB, [4, 0, 9])
    assert checked.pos.tolist() == [9, 4, 10, 0, 11]
    assert checked.seq_id.tolist() == [2, 0, 2, 1, 2]
    same = Batch(token=batch.token, seq_id=batch.seq_id, pos=[9, 4, 10, 0, 11])
    assert check_batch(same, N_VOCAB, [4, 0, 9]).pos.tolist() == [9, 4, 10, 0, 11]


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
        ({"seq_id": [0, [0, 1]]}, "sequence id 1 of the batch is [0, 1], not an integer"),
        ({"seq_id": [0, 1, 1]}, "the batch has 2 tokens but 3 sequence ids"),
    ],
)
def test_a_batch_that_does_not_continue_its_sequences_is_refused(fields, reason):
    with pytest.raises(BatchError) as error:
        check_batch(Batch(token=[1, 2], **fields), N_VOCAB, [4, 0])
    assert str(error.value).startswith(reason)


def test_decode_steps_have_small_buckets():
    sizes = {n: bucket(n, 512, decode=True) for n in (1, 2, 4, 5, 9, 16, 17, 32, 33, 200)}
    assert sizes == {1: 1, 2: 4, 4: 4, 5: 8, 9: 16, 16: 16, 17: 32, 32: 32, 33: 128, 200: 512}
    assert [bucket(n, 8, decode=True) for n in (1, 3, 5, 8)] == [1, 4, 8, 8]
    assert one_row_each(np.array([3])) and one_row_each(np.array([2, 0, 1]))
    assert not one_row_each(np.array([2, 0, 2]))
