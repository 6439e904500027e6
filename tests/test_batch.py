"""`batch`: what a batch may hold, and how it is cut."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax.batch import Batch, bucket, check_batch, split_simple
from minfer_jax.errors import BatchError

N_VOCAB = 100


@pytest.mark.parametrize(
    "token", [[0, 5, 99], (0, 5, 99), np.array([0, 5, 99]), [np.int32(0), 5, np.uint64(99)]]
)
def test_ids_become_int32_and_the_last_tokens_logits_are_wanted(token):
    ids, wanted = check_batch(Batch(token=token), N_VOCAB)
    assert ids.dtype == np.int32
    assert wanted.dtype == bool
    assert ids.tolist() == [0, 5, 99]
    assert wanted.tolist() == [False, False, True]


@pytest.mark.parametrize("logits", [[True, False, True], np.array([1, 0, 1]), (1, 0, 1)])
def test_flags_say_whose_logits_are_wanted(logits):
    _, wanted = check_batch(Batch(token=[1, 2, 3], logits=logits), N_VOCAB)
    assert wanted.dtype == bool
    assert wanted.tolist() == [True, False, True]


def test_no_logits_need_be_wanted():
    _, wanted = check_batch(Batch(token=[1, 2], logits=[False, False]), N_VOCAB)
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
    token = np.arange(33, dtype=np.int32)
    wanted = np.zeros(33, bool)
    wanted[[0, 7, 13, 32]] = True
    ubatches = split_simple(token, wanted, 7)
    assert [u.start for u in ubatches] == [0, 7, 14, 21, 28]
    assert [len(u.token) for u in ubatches] == [7, 7, 7, 7, 5]
    assert [u.out.tolist() for u in ubatches] == [[0], [0, 6], [], [], [4]]
    assert {u.out.dtype for u in ubatches} == {np.dtype(np.int32)}
    assert [len(split_simple(token, wanted, n)) for n in (1, 2, 32, 33, 512)] == [33, 17, 2, 1, 1]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1), st.integers(1, 120))
def test_every_token_and_flag_is_in_one_ubatch(rows, n_ubatch):
    token, wanted = check_batch(
        Batch(token=[t for t, _ in rows], logits=[w for _, w in rows]), N_VOCAB
    )
    ubatches = split_simple(token, wanted, n_ubatch)
    assert [t for u in ubatches for t in u.token.tolist()] == token.tolist()
    assert [u.start + i for u in ubatches for i in u.out.tolist()] == np.flatnonzero(
        wanted
    ).tolist()
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
    chosen = {n: bucket(n, n_ubatch) for n in range(1, n_ubatch + 1)}
    assert set(chosen.values()) == sizes
    for n, size in chosen.items():
        # The smallest that holds them; a decode step has a graph of its own.
        assert size == min(s for s in sizes if s >= n and (s > 1 or n == 1))


@pytest.mark.parametrize("n_ubatch", [1, 7, 32, 512])
def test_prompts_of_every_length_need_few_buckets(n_ubatch):
    sizes = set()
    for n in range(1, 601):
        rows = np.zeros(n, np.int32)
        ubatches = split_simple(rows, rows.astype(bool), n_ubatch)
        sizes |= {bucket(len(u.token), n_ubatch) for u in ubatches}
    assert max(sizes) == n_ubatch
    assert len(sizes) == {1: 1, 7: 2, 32: 2, 512: 4}[n_ubatch]
