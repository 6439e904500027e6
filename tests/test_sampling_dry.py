"""`sampling.dry`: repetitions, and the sequences that end them."""

from itertools import product

import numpy as np
import pytest
from fake_vocab import vocab_of
from hypothesis import given
from hypothesis import strategies as st

from minfer_jax.errors import UsageError
from minfer_jax.sampling import SamplingParams
from minfer_jax.sampling.dry import dry, extended_repeats, restart_sequences
from minfer_jax.sampling.samplers import Candidates


def repeats(tokens, restarts=None, allowed=1):
    return extended_repeats(np.array(tokens, np.int32), restarts or {}, allowed)


def penalized(n_vocab, tokens, restarts=None, *, multiplier=1.0, base=2.0, allowed=1):
    c = Candidates.all(np.zeros(n_vocab, np.float32))
    array = np.array(tokens, np.int32)
    c = dry(c, array, restarts or {}, multiplier=multiplier, base=base, allowed=allowed)
    return c.logits.tolist()


# Repetitions


def test_a_token_that_would_go_on_with_a_repetition():
    # Of 0 1 2 0 1 the end 0 1 occurs at the start too, where 2 follows.
    assert repeats([0, 1, 2, 0, 1]) == {2: 2}
    assert repeats([0, 1, 2, 0, 1], allowed=2) == {2: 2}
    assert repeats([0, 1, 2, 0, 1], allowed=3) == {}


def test_the_longest_of_several_counts():
    # 3 follows both "2" and "1 2"; 4 follows "2" alone.
    assert repeats([2, 3, 9, 1, 2, 3, 8, 2, 4, 1, 2]) == {3: 2, 4: 1}


def test_an_end_may_overlap_with_its_repetition():
    assert repeats([5, 5, 5, 5]) == {5: 3}
    assert repeats([1, 2, 1, 2, 1, 2, 1]) == {2: 5}


def test_a_repetition_of_nothing_is_one_if_no_length_is_allowed():
    # Whatever followed any token; the first token of all has followed none.
    assert repeats([3, 4, 5], allowed=0) == {4: 0, 5: 0}


@pytest.mark.parametrize("tokens", [[], [1], [1, 1]])
def test_a_text_no_longer_than_what_is_allowed_repeats_nothing(tokens):
    assert repeats(tokens, allowed=2) == {}


def brute(tokens, allowed):
    found = {}
    for j in range(1, len(tokens)):
        n = 0
        while n < j and tokens[j - 1 - n] == tokens[-1 - n]:
            n += 1
        if n >= allowed:
            found[tokens[j]] = max(found.get(tokens[j], 0), n)
    return found if len(tokens) > allowed else {}


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(0, 4))
def test_as_by_comparing_everything(tokens, allowed):
    assert repeats(tokens, allowed=allowed) == brute(tokens, allowed)


def test_every_text_of_two_tokens():
    for n in range(13):
        for tokens in map(list, product((0, 1), repeat=n)):
            assert repeats(tokens) == brute(tokens, 1)


def test_the_work_is_linear():
    class Counting(list):
        reads = 0

        def __getitem__(self, i):
            Counting.reads += 1
            return list.__getitem__(self, i)

    from minfer_jax.sampling.dry import _repeats

    for tokens in ([7] * 2000, [1, 2] * 1000, [1] * 1000 + [2] + [1] * 999):
        Counting.reads = 0
        _repeats(Counting(tokens), np.array(tokens))
        assert 0 < Counting.reads < 6 * len(tokens)


# Penalties. multiplier * base ** (length - allowed)


def test_the_penalty_grows_with_the_length():
    assert penalized(4, [0, 1, 2, 0, 1]) == [0, 0, -2, 0]
    assert penalized(4, [0, 1, 2, 0, 1], base=3.0, multiplier=0.5, allowed=0) == [
        -0.5,
        -0.5,
        -4.5,
        0,
    ]
    assert penalized(4, [1, 2, 1, 2, 1, 2, 1], allowed=2) == [0, 0, -8, 0]


def test_a_power_beyond_float32_stays_finite():
    # 2 ** 128 is the first power of two that float32 cannot hold; 88.72 / ln 2 is 127.9.
    logits = penalized(2, [1] * 500)
    assert logits == [0, -(2.0**127)]


@pytest.mark.parametrize("base", [1.0, 1.000001])
def test_a_base_of_1_does_not_grow(base):
    assert penalized(2, [1] * 500, base=base)[1] == pytest.approx(-1.0, abs=1e-3)


def test_a_penalty_beyond_float32_rules_out():
    assert penalized(2, [1] * 500, multiplier=1e6) == [0, -float("inf")]


def test_the_callers_logits_stay_and_others_than_candidates_are_ignored():
    logits = np.zeros(2, np.float32)
    c = Candidates(np.array([2, 9], np.int32), logits)
    tokens = np.array([0, 1, 2, 0, 1, 7, 0, 1])
    c = dry(c, tokens, {}, multiplier=1.0, base=2.0, allowed=1)
    assert c.ids.tolist() == [2, 9]
    assert c.logits.tolist() == [-2, 0]
    assert logits.tolist() == [0, 0]


def test_candidates_in_order_are_put_in_order_of_ids_first():
    c = Candidates(np.array([3, 2, 1, 0], np.int32), np.array([3, 2, 1, 0], np.float32), True)
    c = dry(c, np.array([0, 1, 2, 0, 1]), {}, multiplier=9.0, base=2.0, allowed=2)
    assert c.ids.tolist() == [0, 1, 2, 3]
    assert c.logits.tolist() == [0, 1, -7, 3]
    assert not c.ordered


# Restart sequences


def test_no_repetition_goes_across_a_restart():
    # 0 1 0 1 0 1 with restart 9: only what comes after it counts.
    assert repeats([0, 1, 9, 0, 1, 0, 1]) == {0: 2, 9: 2}
    assert repeats([0, 9, 1, 0, 9, 1, 0]) == {9: 4}
    assert repeats([0, 9, 1, 0, 9, 1, 0], {9: frozenset({()})}) == {9: 2}
    assert repeats([0, 9, 1, 0, 9, 1, 0], {9: frozenset({()})}, allowed=3) == {}


def test_a_restart_of_several_tokens_counts_if_it_is_complete():
    tokens = [0, 8, 7, 1, 0, 8, 7, 1, 0]
    assert repeats(tokens) == {8: 5}
    assert repeats(tokens, {8: frozenset({(7,)})}) == {8: 2}
    assert repeats(tokens, {8: frozenset({(7, 1)})}) == {8: 1}
    assert repeats(tokens, {8: frozenset({(7,), (7, 1)})}) == {8: 1}
    assert repeats(tokens, {8: frozenset({(6,)})}) == {8: 5}
    # At the end only its beginning is there.
    assert repeats([0, 8, 0, 8], {8: frozenset({(7,)})}) == {0: 2}


def test_a_single_token_that_breaks_is_not_penalized():
    single, several = {9: frozenset({()})}, {9: frozenset({(5,)})}
    assert penalized(10, [0, 9, 1, 0, 9, 1, 0], single) == [0] * 10
    assert penalized(10, [0, 9, 1, 0, 9, 1, 0], several)[9] == -8


def test_sequences_of_a_breaker():
    vocab = vocab_of(["a", "b", "c", "ab", "xa", "bc", "abc", "xabcx", "ca", "aab"])
    assert restart_sequences(vocab, ("b",)) == {i: frozenset({()}) for i in (1, 3, 5, 6, 7, 9)}
    # Whole in 6 and 7; 0, 4 and 8 end with "a", 3 and 9 with "ab".
    assert restart_sequences(vocab, ("abc",)) == {
        6: frozenset({()}),
        7: frozenset({()}),
        0: frozenset({(5,)}),
        4: frozenset({(5,)}),
        8: frozenset({(5,)}),
        3: frozenset({(2,)}),
        9: frozenset({(2,)}),
    }


def test_a_token_may_begin_several_sequences():
    vocab = vocab_of(["aa", "a", "b", "ab"])
    # "aab": token 0 ends with "aa" and with "a".
    assert restart_sequences(vocab, ("aab",)) == {
        0: frozenset({(2,), (3,)}),
        1: frozenset({(3,)}),
    }
    assert restart_sequences(vocab, ("aab", "b"))[3] == frozenset({()})


def test_a_breaker_is_not_cut_within_a_character():
    vocab = vocab_of(["é", "è", "é!", "!"])
    # Both begin with the byte c3.
    assert restart_sequences(vocab, ("é!",)) == {0: frozenset({(3,)}), 2: frozenset({()})}


def test_control_tokens_break_as_they_are_spelled():
    vocab = vocab_of(["a", "<end>", "b"], control=["<end>"])
    assert restart_sequences(vocab, ("<end>",)) == {1: frozenset({()})}


def test_forty_bytes_of_a_breaker_and_twenty_tokens_of_its_rest_count():
    vocab = vocab_of(["a", "b", "a" * 40])
    found = restart_sequences(vocab, ("a" * 41 + "b",))
    assert found[2] == frozenset({()})
    assert max(map(len, found[0])) == 20
    assert 1 not in found
    # A character of which the fortieth byte is a part does not count.
    assert restart_sequences(vocab_of(["x" * 39]), ("x" * 39 + "é",)) == {0: frozenset({()})}


def test_a_vocabulary_is_searched_once_for_the_same_breakers():
    vocab = vocab_of(["a", "b"])
    found = restart_sequences(vocab, ("a",))
    assert restart_sequences(vocab, ("a",)) is found
    assert restart_sequences(vocab, ("b",)) is not found
    assert restart_sequences(vocab_of(["b", "a"]), ("a",)) == {1: frozenset({()})}


def test_a_vocabulary_keeps_the_last_sets_of_breakers_only():
    vocab = vocab_of([chr(97 + i) for i in range(9)])
    for i in range(9):
        restart_sequences(vocab, (chr(97 + i),))
    assert list(vocab.restarts) == [(c,) for c in "fghi"]


def test_too_many_breakers_are_refused():
    with pytest.raises(UsageError, match="65 texts; allowed: 64"):
        SamplingParams(dry_sequence_breakers=["x"] * 65)
