"""`sampling.mirostat`: what is kept, and what is learned from what was chosen."""

import math

import numpy as np
import pytest

from minfer_jax.errors import SamplingError
from minfer_jax.sampling import Sampler, SamplingParams
from minfer_jax.sampling.mirostat import Mirostat, tokens_of_surprise, up_to_surprise
from minfer_jax.sampling.samplers import Candidates

PROBABILITIES = [0.3, 0.02, 0.2, 0.08, 0.15, 0.05, 0.12, 0.04, 0.03, 0.01]
ORDER = [0, 2, 4, 6, 3, 5, 7, 8, 1, 9]
# llama.cpp 0.3.36 on these probabilities, eta 0.5: tokens kept and the token drawn, step by step.
GOLDENS = {
    (1, 1.0): [(1, 0), (2, 0), (2, 0), (2, 2), (2, 0), (2, 0)],
    (2, 1.0): [(1, 0), (2, 0), (2, 0), (3, 4), (1, 0), (2, 0)],
    (1, 2.5): [(10, 0), (10, 2), (10, 1), (6, 2), (7, 0), (10, 0)],
    (2, 2.5): [(7, 0), (8, 2), (8, 8), (5, 2), (6, 0), (7, 0)],
}


def candidates(probabilities):
    return Candidates.all(np.log(probabilities).astype(np.float32))


def middle(n, token):
    """Where in [0, 1) the middle of a token lies among the n likeliest."""
    kept = [PROBABILITIES[i] for i in ORDER[:n]]
    at = ORDER.index(token)
    return (sum(kept[:at]) + kept[at] / 2) / sum(kept)


@pytest.mark.parametrize(("version", "tau"), GOLDENS)
def test_golden(version, tau):
    mirostat = Mirostat(version, tau=tau, eta=0.5)
    c = candidates(PROBABILITIES)
    for n, token in GOLDENS[version, tau]:
        before = mirostat.learned
        assert mirostat.choose(c, 10, 1 - 1e-9) == ORDER[n - 1]
        mirostat.learned = before
        assert mirostat.choose(c, 10, middle(n, token)) == token


def test_it_begins_at_twice_the_target():
    assert Mirostat(1, tau=3.0, eta=0.1).mu == Mirostat(2, tau=3.0, eta=0.1).mu == 6.0


@pytest.mark.parametrize("version", [1, 2])
def test_it_learns_from_the_surprise_among_those_that_were_kept(version):
    # 4 bits keep both tokens, of one bit each.
    mirostat = Mirostat(version, tau=2.0, eta=0.25)
    assert mirostat.choose(candidates([0.5, 0.5]), 2, 0.6) == 1
    assert mirostat.learned == [4.0 - 0.25 * (1.0 - 2.0)]
    # One that is left alone is no surprise.
    mirostat.learned = [0.5]
    assert mirostat.choose(candidates([0.9, 0.1]), 2, 0.95) == 0
    assert mirostat.learned == [0.5 - 0.25 * (0.0 - 2.0)]


@pytest.mark.parametrize(
    ("mu", "ids"),
    [
        (-5000, [2]),
        (0, [2]),
        (0.99, [2]),
        (1.01, [2]),
        (1.99, [2]),
        (2.01, [2, 0]),
        (99, [2, 0, 1, 3]),
    ],
)
def test_version_2_keeps_up_to_mu_bits_and_at_least_one(mu, ids):
    unordered = candidates([0.25, 0.125, 0.5, 0.125])
    for c in (unordered, unordered.sort()):
        kept = up_to_surprise(c, mu)
        assert kept.ids.tolist() == ids
        assert kept.ordered


def test_version_2_leaves_out_what_is_ruled_out():
    c = Candidates.all(np.array([0, -np.inf, 0], np.float32))
    assert up_to_surprise(c, 2000.0).ids.tolist() == [0, 2]


def zipf(n, exponent):
    p = np.arange(1, n + 1, dtype=np.float64) ** -exponent
    return p / p.sum()


@pytest.mark.parametrize(("exponent", "mu"), [(1.5, 4.0), (2.0, 6.0), (0.8, 7.0)])
def test_version_1_keeps_by_zipfs_law(exponent, mu):
    # k = (epsilon 2^mu / (1 - n^-epsilon)) ^ (1 / s): formula 9 of the paper.
    n, epsilon = 500, exponent - 1
    k = (epsilon * 2**mu / (1 - n**-epsilon)) ** (1 / exponent)
    assert 2 < k < 400
    assert tokens_of_surprise(zipf(n, exponent)[:100], n, n, mu) == int(k)


def test_version_1_at_an_exponent_of_1():
    # The limit is 2^mu / ln n.
    assert tokens_of_surprise(zipf(1000, 1.0)[:100], 1000, 1000, 7.0) == int(2**7 / math.log(1000))


def test_version_1_at_an_exponent_of_exactly_1():
    # 2^4 / ln 50 is 4.09.
    assert tokens_of_surprise(np.array([1.0, 0.5]), 50, 50, 4.0) == 4


def test_version_1_looks_at_the_hundred_likeliest():
    p = zipf(500, 1.3)
    changed = p.copy()
    changed[100:] = 1e-12
    u = 1 - 1e-9
    ids = []
    for probabilities in (p, changed):
        mirostat = Mirostat(1, tau=3.0, eta=0.1)
        ids.append(mirostat.choose(candidates(probabilities), 500, u))
    assert ids[0] == ids[1] == tokens_of_surprise(p[:100], 500, 500, 6.0) - 1
    assert ids[0] < 100


def test_version_1_at_its_ends():
    flat = np.full(50, 0.02)
    assert tokens_of_surprise(flat, 50, 50, 16.0) == 50
    assert tokens_of_surprise(flat, 50, 50, 1.0) == 1
    assert tokens_of_surprise(flat, 77, 50, 16.0) == 77
    assert tokens_of_surprise(np.array([1.0]), 9, 50, 16.0) == 1
    assert tokens_of_surprise(np.array([1.0, 0.0, 0.0]), 3, 50, 16.0) == 1
    assert tokens_of_surprise(zipf(9, 1.0), 9, 9, 5000.0) == 9
    assert tokens_of_surprise(zipf(9, 1.0), 9, 9, -5000.0) == 1


@pytest.mark.parametrize("version", [1, 2])
def test_nothing_possible_is_an_error_and_teaches_nothing(version):
    mirostat = Mirostat(version, tau=5.0, eta=0.1)
    with pytest.raises(SamplingError, match="no token is possible"):
        mirostat.choose(Candidates.all(np.full(3, -np.inf, np.float32)), 3, 0.5)
    assert mirostat.mu == 10.0


@pytest.mark.parametrize("version", [1, 2])
def test_the_surprise_comes_near_the_target(version):
    mirostat = Mirostat(version, tau=3.0, eta=0.1)
    p = zipf(1000, 1.1)
    c, draws = candidates(p), np.random.default_rng(1).random(1500)
    surprises = [-math.log2(p[mirostat.choose(c, 1000, u)]) for u in draws]
    # Of the truncated distribution it is the target; of the whole one, whose mean is 6.7, higher.
    assert 3.0 < np.mean(surprises[200:]) < 4.5


def test_a_gap_beyond_all_numbers_leaves_the_likeliest():
    """Weights of e^-740 are the smallest that float64 has: their quotients are infinite."""
    logits = np.array([0.0, -740.0, -741.0], np.float32)
    assert Sampler(SamplingParams(temp=1.0, mirostat=1)).sample(logits) == 0
