"""`sampling.samplers`: each by itself, against llama.cpp's goldens and hand-worked cases."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from minfer_jax.sampling import samplers
from minfer_jax.sampling.samplers import Candidates

GOLDENS = json.loads((Path(__file__).parent / "data" / "sampling" / "samplers.json").read_text())
INF = float("inf")
# The field reports' `L` has five logits, the first the highest: what they expect is about order.
FIVE = [4.0, 3.0, 2.0, 1.0, 0.0]


def candidates(logits):
    return Candidates.all(np.array(logits, np.float32))


def penalize(c, history, p):
    window = history[-p["last_n"] :] if p["last_n"] else []
    return samplers.penalties(
        c, window, repeat=p["repeat"], frequency=p["freq"], presence=p["present"]
    )


RUN = {
    "top_k": lambda c, history, p: samplers.top_k(c, p["k"]),
    "top_p": lambda c, history, p: samplers.top_p(c, p["p"]),
    "min_p": lambda c, history, p: samplers.min_p(c, p["p"]),
    "temp": lambda c, history, p: samplers.temperature(c, p["t"]),
    "penalties": penalize,
}


def is_here(case):
    """A least number to keep is no parameter here: it is always 1."""
    return case["sampler"] in RUN and case["params"].get("min_keep", 1) == 1


CASES = [case for case in GOLDENS["cases"] if is_here(case)]


def test_every_golden_of_a_sampler_that_exists_is_used():
    assert Counter(case["sampler"] for case in CASES) == dict.fromkeys(RUN, 24)
    assert Counter(case["sampler"] for case in GOLDENS["cases"] if not is_here(case)) == {
        "top_p": 4,  # min_keep 3
        "min_p": 4,  # min_keep 3
        "typical": 24,
        "temp_ext": 12,
        "top_n_sigma": 16,
        "xtc": 16,
        "dry": 80,
        "logit_bias": 4,
        "chain": 4,  # with typical
    }


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c['sampler']}-{c['input']}-{list(c['params'].values())}"
)
def test_golden(case):
    before = GOLDENS["inputs"][case["input"]]
    kept = RUN[case["sampler"]](candidates(before), case["history"], case["params"])
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
    if case["sampler"] in ("top_k", "top_p", "min_p"):
        assert kept.logits.tolist() == [np.float32(before[i]) for i in kept.ids]


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


@pytest.mark.parametrize(
    ("window", "expected"),
    [([0, 1], [1, -4, 0.5]), ([1], [2, -4, 0.5]), ([], [2, -2, 0.5])],
    ids=["last 64", "last 1", "last 0"],
)
def test_s05_repeat_penalty(window, expected):
    c = samplers.penalties(
        candidates([2, -2, 0.5]), window, repeat=2.0, frequency=0.0, presence=0.0
    )
    assert c.logits.tolist() == expected


def test_s05_frequency_and_presence():
    c = samplers.penalties(
        candidates([2, 2, 2]), [0, 0, 0, 1], repeat=1.0, frequency=0.5, presence=0.25
    )
    assert c.logits.tolist() == [0.25, 1.25, 2]


def test_penalties_leave_the_callers_logits_alone_and_ignore_tokens_that_are_not_candidates():
    logits = np.array([2, -2, 0.5], np.float32)
    c = Candidates(np.array([4, 5, 6], np.int32), logits)
    penalized = samplers.penalties(c, [0, 5, 9], repeat=2.0, frequency=0.0, presence=0.0)
    assert penalized.logits.tolist() == [2, -4, 0.5]
    assert penalized.ids.tolist() == [4, 5, 6]
    assert logits.tolist() == [2, -2, 0.5]


def test_penalties_on_a_logit_at_the_end_of_float32():
    c = samplers.penalties(candidates([1, -3.4e38]), [1], repeat=2.0, frequency=0.0, presence=0.0)
    assert c.logits.tolist() == [1, -INF]


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
