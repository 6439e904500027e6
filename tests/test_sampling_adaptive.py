"""`sampling.adaptive`: which probabilities are preferred, and how the target moves."""

import numpy as np
import pytest

from minfer_jax.errors import SamplingError
from minfer_jax.sampling.adaptive import AdaptiveP, preference
from minfer_jax.sampling.samplers import Candidates

PROBABILITIES = [0.3, 0.02, 0.2, 0.08, 0.15, 0.05, 0.12, 0.04, 0.03, 0.01]
# llama.cpp 0.3.36 on these: the token drawn, and some of the probabilities it was drawn from.
GOLDENS = {
    (0.1, 0.9): [
        (3, {0: 0.010808, 3: 0.149193, 9: 0.077836}),
        (4, {0: 0.011352, 3: 0.148916, 9: 0.076230}),
        (9, {0: 0.009991, 3: 0.149477, 9: 0.080444}),
        (5, {0: 0.012562, 3: 0.148109, 9: 0.072983}),
    ],
    (0.5, 0.5): [
        (0, {0: 0.872933, 2: 0.084650, 9: 0.000500}),
        (0, {0: 0.905213, 2: 0.065965, 9: 0.000293}),
        (4, {0: 0.914521, 2: 0.060368, 9: 0.000241}),
        (0, {0: 0.926632, 2: 0.052921, 9: 0.000179}),
    ],
    (0.0, 0.0): [
        (3, {0: 0.001191, 1: 0.169499, 9: 0.174821}),
        (5, {0: 0.001191, 1: 0.169499, 9: 0.174821}),
    ],
}


def candidates(probabilities):
    return Candidates.all(np.log(probabilities).astype(np.float32))


@pytest.mark.parametrize(("target", "decay"), GOLDENS)
def test_golden(target, decay):
    adaptive, c = AdaptiveP(target, decay), candidates(PROBABILITIES)
    for token, expected in GOLDENS[target, decay]:
        weights = np.exp(preference(c.probabilities(), adaptive.adapted_target))
        drawn = np.cumsum(weights) / weights.sum()
        got = {i: weights[i] / weights.sum() for i in expected}
        assert got == pytest.approx(expected, abs=2e-6)
        below = drawn[token - 1] if token else 0.0
        assert adaptive.choose(c, (below + drawn[token]) / 2) == token


def test_the_preference_is_highest_at_the_target():
    # 5 - 10 d^2 / (1 + d) with d the distance in units of 0.3.
    got = preference(np.array([0.4, 0.7, 0.1, 1.0], np.float32), 0.4)
    assert got == pytest.approx([5, 0, 0, 5 - 40 / 3], abs=1e-5)


def test_the_mean_begins_at_the_target_and_forgets():
    adaptive = AdaptiveP(0.5, 0.75)
    assert adaptive.learned == [2.0, 4.0]
    assert adaptive.adapted_target == 0.5
    adaptive.choose(candidates([0.25, 0.75]), 0.999999)
    assert adaptive.learned == pytest.approx([0.75 + 0.75 * 2.0, 1 + 0.75 * 4.0])
    # A mean of 0.5625 above the target moves it as far below.
    assert adaptive.adapted_target == pytest.approx(0.4375)


@pytest.mark.parametrize(("target", "mean", "adapted"), [(0.9, 0.2, 1.0), (0.1, 0.9, 0.0)])
def test_the_adapted_target_is_a_probability(target, mean, adapted):
    adaptive = AdaptiveP(target, 0.5)
    adaptive.learned = [mean, 1.0]
    assert adaptive.adapted_target == adapted


def test_a_token_ruled_out_is_never_drawn():
    # At a target of 0 it would be the most preferred.
    c = Candidates.all(np.array([-np.inf, 0, -np.inf, 0], np.float32))
    adaptive = AdaptiveP(0.0, 0.9)
    assert {adaptive.choose(c, u) for u in (0.0, 0.3, 0.7, 1 - 1e-9)} == {1, 3}


def test_candidates_may_be_few_and_in_any_order():
    c = Candidates(np.array([7, 3], np.int32), np.log([0.6, 0.4]).astype(np.float32), ordered=True)
    assert AdaptiveP(0.5, 0.0).choose(c, 0.0) == 7
    assert AdaptiveP(0.5, 0.0).choose(c, 1 - 1e-9) == 3


def test_nothing_possible_is_an_error_and_teaches_nothing():
    adaptive = AdaptiveP(0.5, 0.5)
    with pytest.raises(SamplingError, match="no token is possible"):
        adaptive.choose(Candidates.all(np.full(3, -np.inf, np.float32)), 0.5)
    assert adaptive.learned == [1.0, 2.0]


@pytest.mark.parametrize("target", [0.05, 0.12, 0.2])
def test_the_mean_of_what_is_chosen_comes_near_the_target(target):
    adaptive, c = AdaptiveP(target, 0.9), candidates(PROBABILITIES)
    draws = np.random.default_rng(2).random(2000)
    chosen = [PROBABILITIES[adaptive.choose(c, u)] for u in draws]
    # Without it the mean is the sum of the squares, 0.181, whatever the target.
    assert np.mean(chosen) == pytest.approx(target, abs=0.03)
