"""`sampling.sampler`: the chain as a whole, its random numbers and its window of tokens."""

import gc
import math
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from minfer_jax.errors import SamplingError
from minfer_jax.sampling import Sampler, SamplingParams, sampler
from minfer_jax.sampling.philox import uniform

INF = float("inf")
NAN = float("nan")
# The chain without anything that removes a token.
PLAIN = {"temp": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
EQUAL = np.zeros(1000, np.float32)
KNOWN_DRAWS = [987, 825, 729, 326, 314, 225]


def row(*logits):
    return np.array(logits, np.float32)


def draws(n, logits=EQUAL, prompt=(), **params):
    sampler = Sampler(SamplingParams(**{**PLAIN, **params}), prompt)
    return [sampler.sample(logits) for _ in range(n)]


class Recording(Sampler):
    """Remembers the candidates that were left to draw from."""

    def _draw(self, c):
        self.left = c
        return super()._draw(c)


# Seeds


def test_s04_the_same_seed_gives_the_same_draws():
    assert draws(20, seed=42) == draws(20, seed=42)
    assert draws(20, seed=42) != draws(20, seed=43)
    assert len(set(draws(20, seed=42))) > 10


def test_s04_zero_is_a_normal_seed():
    assert Sampler(SamplingParams(seed=0)).seed == 0
    assert draws(20, seed=0) == draws(20, seed=0)
    assert draws(20, seed=0) != draws(20, seed=42)


def test_s04_minus_one_draws_a_seed_and_tells_it():
    params = SamplingParams(**PLAIN, seed=-1)
    one, other = Sampler(params), Sampler(params)
    assert one.seed != other.seed
    assert 0 <= one.seed < 2**64
    assert [one.sample(EQUAL) for _ in range(20)] == draws(20, seed=one.seed)
    assert [other.sample(EQUAL) for _ in range(20)] == draws(20, seed=other.seed)


def test_all_64_bits_of_the_seed_count():
    seeds = [42, *(42 | 1 << bit for bit in (32, 33, 47, 62, 63)), 2**64 - 1]
    assert len({tuple(draws(20, seed=seed)) for seed in seeds}) == len(seeds)


def test_s04_two_samplers_at_once_do_not_influence_each_other():
    one, other = (Sampler(SamplingParams(**PLAIN, seed=seed)) for seed in (42, 7))
    np.random.seed(0)
    pairs = [(one.sample(EQUAL), other.sample(EQUAL), np.random.rand()) for _ in range(20)]
    assert [a for a, _, _ in pairs] == draws(20, seed=42)
    assert [b for _, b, _ in pairs] == draws(20, seed=7)
    np.random.seed(0)
    assert [c for _, _, c in pairs] == [np.random.rand() for _ in range(20)]


def test_a_draw_does_not_depend_on_the_logits_of_earlier_steps():
    sampler = Sampler(SamplingParams(**PLAIN, seed=42))
    for _ in range(7):
        sampler.sample(row(0, 1, 2))
    assert sampler.sample(EQUAL) == draws(8, seed=42)[-1]


def test_draw_i_takes_block_i_of_the_generator():
    # The generator is judged by its authors' vectors, in its own tests.
    expected = [int(uniform(42, i) * 1000) for i in range(1, 21)]
    assert draws(20, seed=42) == expected
    assert expected[:6] == KNOWN_DRAWS


def test_the_authors_vector():
    # kat_vectors of Random123: the block of this counter and key begins with d16cfe09, which is
    # 0.81807 of 2**32, and 94fdcceb, 0.58199 of it.
    counter, seed = 0x0370734413198A2E85A308D3243F6A88, 0x299F31D0A4093822
    one = Sampler(SamplingParams(**PLAIN, seed=seed))
    one.restore({**one.state(), "draws": counter - 1})
    assert one.sample(EQUAL) == 818
    assert one.draws == counter
    for probability, excludes in ((0.581, False), (0.583, True)):
        params = {"xtc_probability": probability, "xtc_threshold": 0.1}
        one = Recording(SamplingParams(**PLAIN, seed=seed, **params))
        one.restore({**one.state(), "draws": counter - 1})
        one.sample(row(1, 1, 0))
        assert (len(one.left.ids) < 3) is excludes


# Distribution


def chi_squared(counts, probabilities):
    expected = np.asarray(probabilities) * sum(counts)
    return float(((np.asarray(counts) - expected) ** 2 / expected).sum())


# Critical values at a level of 0.001, by degrees of freedom (NIST handbook, 1.3.6.7.4).
CRITICAL = {3: 16.266, 4: 18.467, 7: 24.322}


@pytest.mark.parametrize("temp", [1.0, 0.5, 2.0])
def test_draws_follow_the_softmax(temp):
    logits = row(0.5, -1.0, 2.0, 0.0, 1.0, -0.5, 1.5, 0.25)
    weights = [math.exp(x / temp) for x in logits.tolist()]
    probabilities = [w / sum(weights) for w in weights]
    counts = np.bincount(draws(20_000, logits, temp=temp), minlength=8)
    assert chi_squared(counts, probabilities) < CRITICAL[7]


def test_draws_follow_the_softmax_of_what_the_chain_leaves():
    logits = row(*np.log([0.02, 0.3, 0.05, 0.2, 0.01, 0.15, 0.27]))
    counts = np.bincount(draws(20_000, logits, top_k=6, top_p=0.95, min_p=0.1), minlength=7)
    assert counts[[0, 4]].tolist() == [0, 0]
    left = np.array([0.3, 0.05, 0.2, 0.15, 0.27])
    assert chi_squared(counts[[1, 2, 3, 5, 6]], left / left.sum()) < CRITICAL[4]


def test_draws_that_follow_each_other_are_independent():
    tokens = draws(20_000, row(0, 0))
    pairs = [2 * a + b for a, b in zip(tokens[::2], tokens[1::2], strict=True)]
    assert chi_squared(np.bincount(pairs, minlength=4), [0.25] * 4) < CRITICAL[3]


def test_a_token_ruled_out_is_never_drawn():
    assert set(draws(500, row(-INF, 0, -INF, 0, -INF))) == {1, 3}


@pytest.mark.parametrize(("u", "token"), [(0, 1), (0.5 - 2**-32, 1), (0.5, 3), (1 - 2**-32, 3)])
def test_the_ends_of_the_random_numbers_fall_on_tokens_that_are_possible(monkeypatch, u, token):
    monkeypatch.setattr(sampler, "uniform", lambda *_: u)
    assert draws(1, row(-INF, 0, -INF, 0, -INF)) == [token]


def test_what_is_ordered_is_drawn_in_that_order(monkeypatch):
    monkeypatch.setattr(sampler, "uniform", lambda *_: 0.0)
    logits = row(0, 1, 3, 2, 3)
    assert draws(1, logits) == [0]
    assert draws(1, logits, top_k=5) == draws(1, logits, top_p=0.99) == [2]


# Greedy


@pytest.mark.parametrize("temp", [0.0, -1.0, 1e-40])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_s02_greedy_takes_the_lowest_id_among_equals(temp, seed):
    assert draws(5, row(1, 3, 3, 0), temp=temp, seed=seed) == [1] * 5


def test_greedy_counts_penalties():
    assert draws(4, row(4, 3, 0), temp=0.0, presence_penalty=1.5) == [0, 1, 0, 0]
    assert draws(4, row(4, 3, 0), temp=0.0, frequency_penalty=1.5) == [0, 1, 0, 1]


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.5}])
def test_samplers_that_keep_one_leave_the_likeliest(params):
    assert draws(20, row(0, 1, 3, 2), **params) == [2] * 20


def test_greedy_takes_no_random_number():
    one = Sampler(SamplingParams(temp=0.0))
    one.sample(EQUAL)
    assert one.draws == 0


def test_s02_a_sampler_not_listed_has_no_effect():
    logits = row(1, 3, 3, 0)
    # Without the temperature 0 is no greed, and without the rest nothing is removed.
    assert set(draws(200, logits, temp=0.0, top_k=1, samplers=())) == {0, 1, 2, 3}
    assert set(draws(200, logits, temp=0.0, top_k=1, samplers=["top_p"])) == {0, 1, 2, 3}
    assert set(draws(20, logits, temp=0.0, top_k=3, top_p=0.0, samplers=["top_k"])) == {0, 1, 2}


def test_s02_xtc_acts_at_temperature_0():
    logits = row(*np.log([0.4, 0.3, 0.2, 0.1]))
    params = {"temp": 0.0, "xtc_threshold": 0.15}
    assert draws(5, logits, **params) == [0] * 5
    assert draws(5, logits, **params, xtc_probability=1.0) == [2] * 5
    assert draws(5, logits, **params, xtc_probability=1.0, samplers=["xtc"]) != [2] * 5
    assert draws(5, logits, **params, xtc_probability=1.0, samplers=["temp", "xtc"]) == [0] * 5


def test_at_temperature_0_a_sampler_before_a_penalty_counts():
    params = {"temp": 0.0, "top_k": 1, "presence_penalty": 9.0}
    assert draws(1, row(1, 2, 3), [2], **params) == [1]
    assert draws(1, row(1, 2, 3), [2], **params, samplers=["top_k", "penalties", "temp"]) == [2]
    assert draws(1, row(1, 2, 3), [2], **params, samplers=["temp", "penalties"]) == [2]


def test_at_temperature_0_with_a_range_it_is_drawn():
    params = {"temp": 0.0, "dynatemp_range": 1.0}
    assert set(draws(200, row(0, 0, 0.1, 0), **params)) == {0, 1, 2, 3}


# Logits that are no numbers


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("logits", [(NAN, 1, 2), (0.5, NAN, 2), (INF, NAN, 1), (-INF, NAN)])
def test_s03_nan_is_an_error(logits, temp):
    with pytest.raises(SamplingError, match=f"^1 of {len(logits)} logits are not a number"):
        Sampler(SamplingParams(temp=temp)).sample(row(*logits))


@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_s03_nothing_left_is_an_error(temp):
    with pytest.raises(SamplingError, match="every logit is -inf"):
        Sampler(SamplingParams(temp=temp)).sample(row(-INF, -INF, -INF))


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("penalty", [1.0, 2.0])
def test_s03_infinity_wins(temp, penalty):
    params = {"temp": temp, "repeat_penalty": penalty}
    assert draws(20, row(INF, 1, 2), **params) == [0] * 20
    assert set(draws(50, row(1, INF, 2, INF), **params)) == ({1} if temp == 0 else {1, 3})


def test_an_error_takes_no_random_number():
    sampler = Sampler(SamplingParams(**PLAIN, seed=42))
    with pytest.raises(SamplingError):
        sampler.sample(row(NAN, 1))
    assert [sampler.sample(EQUAL) for _ in range(5)] == draws(5, seed=42)


# The window of the penalties. Token 0 leads by 1; a presence penalty of 2 makes it lose to 1.

LEAD = row(1, 0, -9)
PRESENCE = {"temp": 0.0, "presence_penalty": 2.0}


@pytest.mark.parametrize(
    ("last_n", "prompt", "expected"),
    [
        (64, [0] + [2] * 63, 1),
        (64, [0] + [2] * 64, 0),
        (1, [2, 0], 1),
        (1, [0, 2], 0),
        (0, [0], 0),
        (-1, [0] + [2] * 5000, 1),
    ],
)
def test_the_window_starts_with_the_prompts_tail(last_n, prompt, expected):
    assert draws(1, LEAD, prompt, repeat_last_n=last_n, **PRESENCE) == [expected]


def test_s05_without_a_prompt_the_window_is_empty():
    assert draws(1, LEAD, **PRESENCE) == [0]


@pytest.mark.parametrize(("last_n", "free_at"), [(64, [64]), (40, [40, 81]), (3, [3, 7, 11])])
def test_the_window_slides(last_n, free_at):
    # 0 leads; while it is in the window, a token takes its place that has not been seen.
    sampler = Sampler(SamplingParams(**PRESENCE, repeat_last_n=last_n), [0])
    tokens = []
    for i in range(1, 100):
        logits = np.full(200, -9, np.float32)
        logits[[0, i]] = 5, 4
        tokens.append(sampler.sample(logits))
    assert [i for i, token in enumerate(tokens) if token == 0][: len(free_at)] == free_at


def test_a_window_of_everything_never_lets_go():
    sampler = Sampler(SamplingParams(**PRESENCE, repeat_last_n=-1), [0])
    for i in range(1, 300):
        logits = np.full(300, -9, np.float32)
        logits[[0, i]] = 5, 4
        assert sampler.sample(logits) == i


def test_without_a_window_nothing_is_penalized():
    assert draws(5, LEAD, [0, 0, 0], repeat_last_n=0, **PRESENCE) == [0] * 5


# The chain against a reference that sorts everything


def reference_kept(logits, top_k, top_p, min_p):
    """Ids left after top-k, top-p and min-p, most likely first; None where rounding decides."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1.0:
        weights = [math.exp(logits[i] - logits[order[0]]) for i in order]
        total = 0.0
        for n, weight in enumerate(weights, 1):
            total += weight / sum(weights)
            if abs(total - top_p) < 1e-5:
                return None
            if total > top_p:
                order = order[:n]
                break
    if min_p > 0.0:
        edge = logits[order[0]] + math.log(min_p)
        others = [logits[i] for i in order if logits[i] != logits[order[0]]]
        if any(abs(x - edge) < 1e-5 for x in others):
            return None
        order = [i for i in order if logits[i] == logits[order[0]] or logits[i] > edge]
    return order


LOGITS = st.lists(
    st.one_of(st.integers(-3, 3).map(float), st.floats(-12, 12, width=32)),
    min_size=1,
    max_size=60,
)


@settings(deadline=None, max_examples=300)
@example([1.0, 3.0, 3.0, 0.5, 3.0], 2, 0.6, 0.0, 0.7)
@example([0.0, 1.0, 2.0, 3.0], 0, 0.97, 0.3, 1.0)
@given(
    LOGITS,
    st.sampled_from([-1, 0, 1, 2, 5, 20, 40, 100]),
    st.sampled_from([0.0, 0.1, 0.5, 0.777, 0.9, 0.95, 0.999, 1.0, 2.0]),
    st.sampled_from([0.0, 0.01, 0.05, 0.3, 0.9, 1.0, 1.5]),
    st.sampled_from([0.1, 0.7, 1.0, 1.5]),
)
def test_the_chain_keeps_what_a_full_sort_keeps(logits, top_k, top_p, min_p, temp):
    kept = reference_kept(logits, top_k, top_p, min_p)
    assume(kept is not None)
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temp=temp)
    sampler = Recording(params)
    token = sampler.sample(row(*logits))
    assert sorted(sampler.left.ids.tolist()) == sorted(kept)
    weights = [math.exp((logits[i] - max(logits)) / temp) for i in sampler.left.ids]
    probabilities = [w / sum(weights) for w in weights]
    left = sampler.left.weights() / sampler.left.weights().sum()
    assert left.tolist() == pytest.approx(probabilities, rel=1e-4, abs=1e-9)
    assert token in kept


def test_the_order_of_the_chain():
    # Penalties come before top-k: token 0 is out of the two likeliest once penalized.
    logits = row(3, 2.5, 2, 0)
    sampler = Recording(SamplingParams(**{**PLAIN, "top_k": 2}, presence_penalty=2.0), [0])
    sampler.sample(logits)
    assert sampler.left.ids.tolist() == [1, 2]
    # Temperature comes last: at 100 everything would be likely enough for min-p and top-p.
    sampler = Recording(SamplingParams(temp=100.0, top_k=0, top_p=1.0, min_p=0.5))
    sampler.sample(logits)
    assert sampler.left.ids.tolist() == [0, 1]
    sampler = Recording(SamplingParams(temp=100.0, top_k=0, top_p=0.45, min_p=0.0))
    sampler.sample(logits)
    assert sampler.left.ids.tolist() == [0]


# Size


def peak_bytes(action):
    gc.collect()
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def python_steps(action):
    """Bytecode instructions that `action` runs."""
    steps = 0

    def trace(frame, event, argument):
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return steps


@pytest.mark.parametrize(
    ("params", "bytes_each"),
    [
        ({}, 16),
        ({"repeat_penalty": 1.1, "frequency_penalty": 0.1}, 16),
        ({"temp": 0.0}, 16),
        ({"logit_bias": {7: 1.0, 9: -INF}}, 24),
        # Sorted as a whole, in a handful of arrays of float64.
        ({"top_k": 0}, 64),
    ],
)
def test_p05_a_large_vocabulary_never_becomes_python_objects(params, bytes_each):
    n_vocab = 262_144
    logits = np.random.default_rng(1).normal(size=n_vocab).astype(np.float32)
    sampler = Sampler(SamplingParams(**params), range(64))
    sampler.sample(logits)
    # A list of n numbers takes 8 bytes for each place and 24 or more for each number.
    assert peak_bytes(logits.tolist) > 30 * n_vocab
    assert peak_bytes(lambda: sampler.sample(logits)) < bytes_each * n_vocab
    # Nor is there a loop over it.
    assert python_steps(lambda: [None for _ in logits]) > n_vocab
    assert 100 < python_steps(lambda: sampler.sample(logits)) < n_vocab / 16
