"""`sampling.samplers`: each by itself, against llama.cpp's goldens and hand-worked cases."""

import json
from collections import Counter
from functools import reduce
from pathlib import Path

import numpy as np
import pytest

from minfer_jax.errors import SamplingError
from minfer_jax.sampling import samplers
from minfer_jax.sampling.dry import dry
from minfer_jax.sampling.samplers import Candidates

GOLDENS = json.loads((Path(__file__).parent / "data" / "sampling" / "samplers.json").read_text())
INF = float("inf")
# The field reports' `L` has five logits, the first the highest: what they expect is about order.
FIVE = [4.0, 3.0, 2.0, 1.0, 0.0]


def candidates(logits):
    return Candidates.all(np.array(logits, np.float32))


def penalize(c, history, last_n, repeat, freq, present):
    counts = Counter(history[-last_n:] if last_n else [])
    return samplers.penalties(c, counts, repeat=repeat, frequency=freq, presence=present)


def repeat_not(c, history, p):
    assert p["breakers"] == []
    if p["multiplier"] == 0.0:
        return c  # off
    tokens = np.array(history[-p["last_n"] :])
    settings = {"multiplier": p["multiplier"], "base": p["base"], "allowed": p["allowed_length"]}
    return dry(c, tokens, {}, **settings)


def chain(c, history, p):
    alone = {"top_k": "k", "typical": "p", "top_p": "p", "min_p": "p", "temp": "t"}

    def step(c, name):
        if name == "penalties":
            return penalize(c, history, *p["penalties"])
        return RUN[name](c, history, {alone[name]: p[name], "min_keep": 1})

    return reduce(step, p["order"], c)


RUN = {
    "top_k": lambda c, history, p: samplers.top_k(c, p["k"]),
    "top_p": lambda c, history, p: samplers.top_p(c, p["p"], p["min_keep"]),
    "min_p": lambda c, history, p: samplers.min_p(c, p["p"], p["min_keep"]),
    "typical": lambda c, history, p: samplers.typical(c, p["p"], p["min_keep"]),
    "temp": lambda c, history, p: samplers.temperature(c, p["t"]),
    "temp_ext": lambda c, history, p: samplers.dynamic_temperature(
        c, p["t"], p["delta"], p["exponent"]
    ),
    "top_n_sigma": lambda c, history, p: samplers.top_n_sigma(c, p["n"]),
    "xtc": lambda c, history, p: (
        samplers.xtc(c, p["threshold"], p["min_keep"]) if p["probability"] else c
    ),
    "penalties": lambda c, history, p: penalize(
        c, history, p["last_n"], p["repeat"], p["freq"], p["present"]
    ),
    "dry": repeat_not,
    "logit_bias": lambda c, history, p: samplers.add(c, dict(p["bias"])),
    "chain": chain,
}
# Samplers that leave logits as they are.
SELECT = ("top_k", "top_p", "min_p", "typical", "xtc")


def test_every_golden_is_used():
    assert Counter(case["sampler"] for case in GOLDENS["cases"]) == {
        "top_k": 24,
        "top_p": 28,
        "min_p": 28,
        "typical": 24,
        "temp": 24,
        "temp_ext": 12,
        "top_n_sigma": 16,
        "xtc": 16,
        "penalties": 24,
        "dry": 80,
        "logit_bias": 4,
        "chain": 4,
    }
    assert len(GOLDENS["cases"]) == 284


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    "case", GOLDENS["cases"], ids=lambda c: f"{c['sampler']}-{c['input']}-{[*c['params'].values()]}"
)
def test_golden(case, ordered):
    before = GOLDENS["inputs"][case["input"]]
    c = candidates(before)
    kept = RUN[case["sampler"]](c.sort() if ordered else c, case["history"], case["params"])
    ids = case["out"]["ids"]
    logits = [-INF if x is None else x for x in case["out"]["logits"]]
    # Among equals another choice is as good, so that only the logits have to agree...
    np.testing.assert_allclose(np.sort(kept.logits), np.sort(logits), rtol=1e-6, atol=1e-6)
    # ...and the ids wherever the sampler had no choice.
    values = Counter(before)
    kept_values = Counter(before[i] for i in ids)
    if all(kept_values[x] in (0, values[x]) for x in values):
        got = dict(zip(kept.ids.tolist(), kept.logits.tolist(), strict=True))
        assert got == pytest.approx(dict(zip(ids, logits, strict=True)), rel=1e-6, abs=1e-6)
    assert len(set(kept.ids.tolist())) == len(ids)
    if case["sampler"] in SELECT:
        assert kept.logits.tolist() == [np.float32(before[i]) for i in kept.ids]
    # What the next sampler relies on.
    order = -kept.logits if kept.ordered else kept.ids
    assert np.all(order[:-1] <= order[1:])


@pytest.mark.parametrize(
    ("k", "ids"),
    [(0, [0, 1, 2, 3, 4]), (-1, [0, 1, 2, 3, 4]), (99, [0, 1, 2, 3, 4]), (1, [0]), (3, [0, 1, 2])],
)
def test_s01_top_k(k, ids):
    assert samplers.top_k(candidates(FIVE), k).ids.tolist() == ids


def test_top_k_keeps_the_lowest_ids_among_equals_in_descending_order():
    kept = samplers.top_k(candidates([1, 3, 0, 3, 3, 2]), 3)
    assert kept.ids.tolist() == [1, 3, 4]
    kept = samplers.top_k(candidates([2, 1, 2, 3, 2]), 3)
    assert kept.ids.tolist() == [3, 0, 2]
    assert kept.logits.tolist() == [3, 2, 2]


def many(n):
    """Logits with all that makes an order hard: equals, both zeros, none possible."""
    values = np.random.default_rng(n).normal(size=n).astype(np.float32)
    values[::3] = np.round(values[::3])
    values[::7] = -INF
    values[1::50] = 0.0
    values[2::50] = -0.0
    return values


@pytest.mark.parametrize("n", [1, 1000, 4095, 4096, 20_000])
def test_a_long_order_is_a_stable_one(n):
    for values in (many(n), -many(n), np.abs(many(n)), np.zeros(n, np.float32)):
        expected = np.argsort(values, kind="stable")
        assert samplers.stable_order(values).tolist() == expected.tolist()


@pytest.mark.parametrize("k", [1, 40, 700, 8500, 8600, 9999])
def test_top_k_of_many(k):
    values = many(10_000)
    expected = np.argsort(-values, kind="stable")[:k]
    kept = samplers.top_k(candidates(values), k)
    assert kept.ids.tolist() == expected.tolist()
    assert kept.logits.tolist() == values[expected].tolist()


def test_top_k_of_fewer_that_are_possible():
    kept = samplers.top_k(candidates([-INF, 1, -INF, 2, -INF]), 3)
    assert kept.ids.tolist() == [3, 1, 0]
    assert kept.logits.tolist() == [2, 1, -INF]


@pytest.mark.parametrize("temp", [0.0, -1.0])
@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        (FIVE, [4, -INF, -INF, -INF, -INF]),
        ([1, 3, 3, 0], [-INF, 3, -INF, -INF]),
    ],
)
def test_s02_temperature_of_zero_or_less_leaves_the_first_maximum(temp, logits, expected):
    c = samplers.temperature(candidates(logits), temp)
    assert c.logits.tolist() == expected


@pytest.mark.parametrize("temp", [1e-40, 1e-46, 1e-300])
def test_temperature_too_small_for_float32_leaves_the_first_maximum(temp):
    c = samplers.temperature(candidates([1, 3, 3, -3.4e38]), temp)
    assert c.logits.tolist() == [-INF, 3, -INF, -INF]


def test_temperature_rules_out_what_overflows():
    c = samplers.temperature(candidates([1, -3.4e38]), 0.5)
    assert c.logits.tolist() == [2, -INF]


def test_temperature_keeps_an_order():
    assert samplers.temperature(candidates(FIVE).sort(), 0.0).ordered
    assert samplers.temperature(candidates(FIVE).sort(), 0.5).ordered
    assert not samplers.temperature(candidates(FIVE), 0.5).ordered


def penalized(logits, counts, repeat=1.0, frequency=0.0, presence=0.0):
    c = logits if isinstance(logits, Candidates) else candidates(logits)
    return samplers.penalties(c, counts, repeat=repeat, frequency=frequency, presence=presence)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [({0: 1, 1: 1}, [1, -4, 0.5]), ({1: 1}, [2, -4, 0.5]), ({}, [2, -2, 0.5])],
    ids=["last 64", "last 1", "last 0"],
)
def test_s05_repeat_penalty(counts, expected):
    assert penalized([2, -2, 0.5], counts, repeat=2.0).logits.tolist() == expected


def test_s05_frequency_and_presence():
    c = penalized([2, 2, 2], {0: 3, 1: 1}, frequency=0.5, presence=0.25)
    assert c.logits.tolist() == [0.25, 1.25, 2]


def test_penalties_leave_the_callers_logits_alone_and_ignore_tokens_that_are_not_candidates():
    logits = np.array([2, -2, 0.5], np.float32)
    c = Candidates(np.array([4, 5, 6], np.int32), logits)
    c = penalized(c, {0: 1, 5: 3, 9: 1}, repeat=2.0, frequency=0.5)
    assert c.logits.tolist() == [2, -5.5, 0.5]
    assert c.ids.tolist() == [4, 5, 6]
    assert logits.tolist() == [2, -2, 0.5]


def test_penalties_on_a_logit_at_the_end_of_float32():
    assert penalized([1, -3.4e38], {1: 1}, repeat=2.0).logits.tolist() == [1, -INF]


def test_penalties_on_candidates_in_order_put_them_in_order_of_ids():
    c = penalized(candidates([0, 3, 1, 2]).sort(), {1: 2, 3: 1}, frequency=2.0)
    assert c.ids.tolist() == [0, 1, 2, 3]
    assert c.logits.tolist() == [0, -1, 1, 0]
    assert not c.ordered
    assert samplers.top_k(c, 2).ids.tolist() == [2, 0]


def test_adding():
    logits = np.array([1, 2, 3], np.float32)
    c = samplers.add(Candidates.all(logits), {2: -INF, 7: 1.0, 0: 0.5})
    assert c.logits.tolist() == [1.5, 2, -INF]
    assert logits.tolist() == [1, 2, 3]


def test_by_id_undoes_sort():
    c = candidates([1, 3, 0, 3, 2])
    assert c.sort().by_id().ids.tolist() == [0, 1, 2, 3, 4]
    assert c.sort().by_id().logits.tolist() == [1, 3, 0, 3, 2]
    assert c.by_id() is c


@pytest.mark.parametrize("logits", [FIVE, [4, 3, -INF, -INF, -INF]])
def test_s09_top_p_0_and_min_p_over_1_keep_the_likeliest(logits):
    assert samplers.top_p(candidates(logits), 0.0).ids.tolist() == [0]
    assert samplers.min_p(candidates(logits), 1.5).ids.tolist() == [0]


def test_top_p_stops_at_the_token_that_reaches_p():
    # Probabilities 0.1, 0.4, 0.3, 0.2.
    c = candidates(np.log([0.1, 0.4, 0.3, 0.2]))
    assert samplers.top_p(c, 0.39).ids.tolist() == [1]
    assert samplers.top_p(c, 0.41).ids.tolist() == [1, 2]
    assert samplers.top_p(c, 0.69).ids.tolist() == [1, 2]
    assert samplers.top_p(c, 0.71).ids.tolist() == [1, 2, 3]
    assert samplers.top_p(c, 0.91).ids.tolist() == [1, 2, 3, 0]


@pytest.mark.parametrize("p", [1.0, 1.5])
def test_top_p_of_1_or_more_keeps_even_what_is_too_unlikely_to_count(p):
    assert samplers.top_p(candidates([0, 100, -INF]), p).ids.tolist() == [0, 1, 2]


def test_min_p_is_relative_to_the_likeliest():
    # Ratios to the likeliest: 0.25, 1, 0.75, 0.5.
    c = candidates(np.log([0.1, 0.4, 0.3, 0.2]))
    assert samplers.min_p(c, 0.76).ids.tolist() == [1]
    assert samplers.min_p(c, 0.74).ids.tolist() == [1, 2]
    assert samplers.min_p(c, 0.49).ids.tolist() == [1, 2, 3]
    assert samplers.min_p(c, 0.24).ids.tolist() == [0, 1, 2, 3]


def test_weights_are_probabilities_over_the_highest_and_do_not_overflow():
    logits = np.log([0.1, 0.4, 0.3, 0.2])
    p = candidates(logits).weights()
    assert p == pytest.approx([0.25, 1.0, 0.75, 0.5], rel=1e-6)
    p = candidates([1e38, 1e38, -1e38, -INF]).weights()
    assert p.tolist() == [1, 1, 0, 0]


def test_nothing_possible_has_no_weights():
    for logits in ([-INF, -INF], [INF, 1]):
        with pytest.raises(SamplingError, match=r"^no token is possible: the highest logit is "):
            candidates(logits).weights()


def test_probabilities():
    p = candidates(np.log([0.1, 0.4, 0.3, 0.2])).probabilities()
    assert p.dtype == np.float32
    assert p == pytest.approx([0.1, 0.4, 0.3, 0.2], rel=1e-6)


@pytest.mark.parametrize(
    ("u", "index"), [(0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (1 - 2**-32, 4)]
)
def test_a_draw_inverts_the_cumulative_distribution(u, index):
    assert samplers.draw(np.array([0, 1, 0, 2, 1, 0], np.float64), u) == index


def test_a_draw_from_float32_does_not_fall_off_the_end():
    weights = np.full(3, 0.1, np.float32)
    assert samplers.draw(weights, 1 - 2**-32) == 2


# A least number to keep

FOUR = np.log([0.1, 0.4, 0.3, 0.2])


@pytest.mark.parametrize("ordered", [False, True])
def test_a_least_number_is_kept(ordered):
    c = candidates(FOUR).sort() if ordered else candidates(FOUR)

    def ids(c):
        return sorted(c.ids.tolist())

    assert ids(samplers.top_p(c, 0.1, 3)) == [1, 2, 3]
    assert ids(samplers.top_p(c, 0.85, 2)) == [1, 2, 3]
    assert ids(samplers.top_p(c, 0.1, 9)) == [0, 1, 2, 3]
    assert ids(samplers.min_p(c, 0.9, 3)) == [1, 2, 3]
    assert ids(samplers.min_p(c, 0.4, 2)) == [1, 2, 3]
    assert ids(samplers.min_p(c, 0.9, 9)) == [0, 1, 2, 3]
    # Surprises 2.30, 0.92, 1.20, 1.61 nats; the entropy is 1.28.
    assert ids(samplers.typical(c, 0.1, 0)) == [2]
    assert ids(samplers.typical(c, 0.1, 2)) == [2, 3]
    assert ids(samplers.typical(c, 0.1, 3)) == [1, 2, 3]
    assert ids(samplers.typical(c, 0.1, 9)) == [0, 1, 2, 3]
    # One or two are excluded, or none if that would leave too few.
    assert ids(samplers.xtc(c, 0.25, 3)) == [0, 2, 3]
    assert ids(samplers.xtc(c, 0.25, 4)) == [0, 1, 2, 3]
    assert ids(samplers.xtc(c, 0.15, 3)) == [0, 1, 2, 3]


def test_top_p_keeps_more_than_it_looks_at_first():
    c = candidates(-np.arange(1000) / 1e4)
    assert samplers.top_p(c, 0.0, 700).ids.tolist() == list(range(700))
    assert len(samplers.top_p(c, 0.9).ids) == pytest.approx(900, abs=50)


# Typical


def test_typical_is_llama_cpps_example():
    # From its tests: {0.97, 0.01, 0.01, 0.01} and {0.4, 0.2, 0.2, 0.2} at 0.5.
    c = samplers.typical(candidates(np.log([0.97, 0.01, 0.01, 0.01])), 0.5)
    assert c.ids.tolist() == [0]
    c = samplers.typical(candidates(np.log([0.4, 0.2, 0.2, 0.2])), 0.5)
    assert c.ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_typical_of_1_or_more_keeps_all(p):
    assert samplers.typical(candidates([9, 0, -INF]), p).ids.tolist() == [0, 1, 2]


def test_typical_after_others_were_ruled_out():
    c = candidates([-INF, *np.log([0.97, 0.01, 0.01, 0.01]), -INF])
    assert samplers.typical(c, 0.5).ids.tolist() == [1]
    assert samplers.typical(candidates([-INF, 1.0]), 0.5).ids.tolist() == [1]


# Top-n-sigma


def test_s09_top_n_sigma():
    # Sigma of 4 3 2 1 0 is 1.41, of 4 3 alone 0.5.
    assert samplers.top_n_sigma(candidates(FIVE), 1.0).logits.tolist() == [4, 3, -INF, -INF, -INF]
    assert samplers.top_n_sigma(candidates(FIVE), 1.3).logits.tolist() == [4, 3, -INF, -INF, -INF]
    assert samplers.top_n_sigma(candidates(FIVE), 1.42).logits.tolist() == [4, 3, 2, -INF, -INF]
    c = samplers.top_n_sigma(candidates([4, 3, -INF, -INF, -INF]), 1.0)
    assert c.logits.tolist() == [4, -INF, -INF, -INF, -INF]


@pytest.mark.parametrize("n", [0.0, -1.0])
def test_top_n_sigma_of_0_or_less_keeps_all(n):
    assert samplers.top_n_sigma(candidates(FIVE), n).logits.tolist() == FIVE


@pytest.mark.parametrize("logits", [[-INF, -INF], [-INF, 3, -INF], [2, 2, 2]])
def test_top_n_sigma_where_there_is_no_spread(logits):
    assert samplers.top_n_sigma(candidates(logits), 1.0).logits.tolist() == logits


def test_top_n_sigma_at_the_end_of_float32():
    c = samplers.top_n_sigma(candidates([3.4e38, -3.4e38, 0, 0]), 1.0)
    assert np.isfinite(c.logits).tolist() == [True, False, False, False]


# XTC


@pytest.mark.parametrize(
    ("threshold", "ids"),
    # From llama.cpp's tests.
    [(0.09, [3]), (0.19, [2, 3]), (0.29, [1, 2, 3]), (0.39, [0, 1, 2, 3])],
)
def test_xtc_is_llama_cpps_example(threshold, ids):
    c = candidates(np.log([0.4, 0.3, 0.2, 0.1]))
    assert samplers.xtc(c, threshold).ids.tolist() == ids
    assert samplers.xtc(c.sort(), threshold).ids.tolist() == ids


def test_xtc_leaves_the_same_of_equals_in_order_or_not():
    c = candidates([1, 2, 1, 1, 2])
    assert samplers.xtc(c, 0.1).ids.tolist() == [3]
    assert samplers.xtc(c.sort(), 0.1).ids.tolist() == [3]


def test_xtc_at_a_threshold_of_0_leaves_a_token_that_is_possible():
    c = samplers.xtc(candidates([-INF, 2, 1, -INF]), 0.0)
    assert c.ids.tolist() == [0, 2, 3]


@pytest.mark.parametrize("logits", [[3], [3, -INF], [9, 0, 0]])
def test_xtc_needs_two_above_the_threshold(logits):
    assert samplers.xtc(candidates(logits), 0.1).logits.tolist() == logits


# Dynamic temperature


def test_dynamic_temperature_between_its_ends():
    # The most entropy: the highest temperature; none: the lowest.
    c = samplers.dynamic_temperature(candidates([1, 1, 1, 1]), 1.0, 0.5, 1.0)
    assert c.logits == pytest.approx([1 / 1.5] * 4)
    c = samplers.dynamic_temperature(candidates([500, 0]), 1.0, 0.5, 1.0)
    assert c.logits.tolist() == [1000, 0]
    # 0.5, 0.5, 0, 0: half of the entropy that four can have.
    half = candidates([0, 0, -INF, -INF])
    c = samplers.dynamic_temperature(candidates([1, 1, -999, -999]), 1.0, 0.5, 2.0)
    assert c.logits[0] == pytest.approx(1 / (0.5 + 1.0 * 0.5**2))
    c = samplers.dynamic_temperature(half, 1.0, 0.5, 1.0)
    assert c.logits.tolist() == [0, 0, -INF, -INF]


def test_dynamic_temperature_does_not_go_below_0():
    # From 0 to 1.2, not from -0.4.
    c = samplers.dynamic_temperature(candidates([2, 2, -999, -999]), 0.4, 0.8, 1.0)
    assert c.logits[0] == pytest.approx(2 / 0.6)
    c = samplers.dynamic_temperature(candidates([500, 0]), 0.4, 0.8, 1.0)
    assert c.logits.tolist() == [500, -INF]


def test_dynamic_temperature_of_one_candidate():
    assert samplers.dynamic_temperature(candidates([3]), 0.5, 0.4, 1.0).logits.tolist() == [3]
