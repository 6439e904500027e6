"""`sampling.infill`: ends a text between two others as soon as there is little reason not to."""

import numpy as np
import pytest
from fake_vocab import vocab_of

from minfer_jax.errors import SamplingError, UsageError
from minfer_jax.sampling.infill import end_of, infill
from minfer_jax.sampling.samplers import Candidates

VOCAB = vocab_of(["a", "b", "<end>", "ab", "abc", "x", "<stop>", "xy"], control=["<end>", "<stop>"])
A, B, END, AB, ABC, X, STOP, XY = range(8)


def left(probabilities, vocab=VOCAB):
    """Ids and logits of what is left; the logits of tokens that were there are as before."""
    ids = np.array(list(probabilities), np.int32)
    with np.errstate(divide="ignore"):
        logits = np.log(np.array(list(probabilities.values()))).astype(np.float32)
    order = np.argsort(ids)
    c = infill(Candidates(ids[order], logits[order]), vocab)
    before = dict(zip(ids.tolist(), logits.tolist(), strict=True))
    got = dict(zip(c.ids.tolist(), c.logits.tolist(), strict=True))
    assert got == {i: before.get(i) for i in got} or got == {vocab.end: 1.0}
    return set(got)


@pytest.mark.parametrize(
    ("end", "ends"),
    # With 3 candidates the end is taken from 1 / (1 + 3 * 3) = 0.1 on.
    [(0.11, True), (0.09, False)],
)
def test_the_end_alone_is_left_if_it_is_likely_enough(end, ends):
    rest = (1 - end) / 2
    assert left({B: rest, X: rest, END: end}) == ({END} if ends else {B, X, END})


def test_all_end_tokens_count_together():
    assert left({B: 0.94, END: 0.03, STOP: 0.03}) == {B, END, STOP}
    assert left({B: 0.86, END: 0.07, STOP: 0.07}) == {END, STOP}


def test_what_is_unlikely_goes():
    # 0.2 is the least at first; then 1 / (2 + 1) of what is left.
    assert left({A: 0.6, B: 0.25, X: 0.15}) == {A}
    assert left({A: 0.5, B: 0.35, X: 0.15}) == {A, B}
    assert left({A: 0.4, B: 0.35, X: 0.25}) == {A, B, X}
    # 0.31 / 0.81 is more than a third.
    assert left({A: 0.5, B: 0.31, X: 0.19}) == {A, B}


def test_the_least_is_a_fifth():
    vocab = vocab_of(["<end>", *"abcd"], control=["<end>"])
    assert left({1: 0.28, 2: 0.21, 3: 0.25, 4: 0.26}, vocab) == {1, 2, 3, 4}
    # If 0.195 were enough, 0.201 would be one of four.
    assert left({1: 0.409, 2: 0.201, 3: 0.195, 4: 0.195}, vocab) == {1}


def test_tokens_that_begin_alike_count_as_one():
    # a, ab and abc: none reaches 0.2 by itself, together they have 0.48 and the likeliest stands.
    assert left({A: 0.15, AB: 0.18, ABC: 0.15, X: 0.52}) == {AB, X}
    assert left({A: 0.18, AB: 0.15, ABC: 0.15, X: 0.52}) == {A, X}
    # b begins none of them.
    assert left({B: 0.18, AB: 0.12, ABC: 0.07, X: 0.63}) == {X}


def test_a_token_that_gave_its_probability_away_takes_no_further_part():
    # x goes to xy (0.3 and 0.4), and xy stays although it was the longer one.
    assert left({X: 0.3, XY: 0.4, B: 0.3}) == {XY}
    assert left({A: 0.34, AB: 0.33, ABC: 0.33}) == {A}


def test_tokens_that_are_spelled_alike_count_as_one():
    vocab = vocab_of(["<end>", "a", "a", "x"], control=["<end>"])
    assert left({1: 0.17, 2: 0.18, 3: 0.65}, vocab) == {2, 3}


def test_nothing_likely_enough_is_the_end_whether_or_not_it_was_a_candidate():
    vocab = vocab_of(["<end>", *"abcdefghij"], control=["<end>"])
    assert left({i: 0.1 for i in range(1, 11)}, vocab) == {0}


def test_control_tokens_begin_nothing_and_nothing_begins_them():
    vocab = vocab_of(["", "x", "xy"], control=[""])
    assert left({0: 0.001, 1: 0.6, 2: 0.399}, vocab) == {0, 1}
    vocab = vocab_of(["<", "<end>"], control=["<end>"])
    assert left({0: 0.97, 1: 0.03}, vocab) == {0, 1}


def test_an_end_that_is_ruled_out_is_not_left():
    assert left({A: 1.0, END: 0.0}) == {A}


def test_what_is_left_is_in_descending_order():
    c = Candidates.all(np.log([0.3, 0.3, 0.001, 0.01, 0.01, 0.379]).astype(np.float32))
    kept = infill(c, VOCAB)
    assert kept.ids.tolist() == [X, A, B, END]
    assert kept.ordered


def test_nothing_possible_is_an_error():
    with pytest.raises(SamplingError, match="no token is possible"):
        infill(Candidates.all(np.full(8, -np.inf, np.float32)), VOCAB)


def test_a_vocabulary_must_have_an_end():
    assert end_of(VOCAB) == END
    with pytest.raises(UsageError, match=r"^infill needs a vocabulary with an end token"):
        end_of(vocab_of(["a"]))
