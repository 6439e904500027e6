"""`sampling.params`: what a request may ask for, and what is refused."""

from dataclasses import FrozenInstanceError, asdict, fields

import numpy as np
import pytest

from minfer_jax.errors import UsageError
from minfer_jax.sampling import DEFAULT_SAMPLERS, SamplingParams, draw_seed

INT32 = 2**31 - 1
INTEGERS = {
    "seed": (-1, 2**64 - 1),
    "top_k": (-INT32 - 1, INT32),
    "mirostat": (0, 2),
    "repeat_last_n": (-1, INT32),
    "dry_allowed_length": (0, INT32),
    "dry_penalty_last_n": (-1, INT32),
    "min_keep": (0, INT32),
}
REALS = {
    "temp": (-1e6, 1e6),
    "dynatemp_range": (0.0, 1e6),
    "dynatemp_exponent": (0.0, 1e6),
    "top_p": (0.0, 1e6),
    "min_p": (0.0, 1e6),
    "typical_p": (0.0, 1e6),
    "top_n_sigma": (-1e6, 1e6),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "mirostat_tau": (0.0, 1e6),
    "mirostat_eta": (0.0, 1e6),
    "adaptive_target": (-1e6, 1.0),
    "adaptive_decay": (0.0, 0.99),
    "repeat_penalty": (1e-6, 1e6),
    "frequency_penalty": (-1e6, 1e6),
    "presence_penalty": (-1e6, 1e6),
    "dry_multiplier": (0.0, 1e6),
    "dry_base": (0.0, 1e6),
}
OTHERS = {"dry_sequence_breakers", "logit_bias", "ignore_eos", "samplers"}


def test_these_are_all_fields():
    names = INTEGERS.keys() | REALS.keys() | OTHERS
    assert {f.name for f in fields(SamplingParams)} == names


def test_defaults_are_llama_cpps():
    # `common_params_sampling` of llama.cpp 0.3.36; the seed is DESIGN's.
    assert asdict(SamplingParams()) == {
        "seed": 42,
        "temp": 0.8,
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "typical_p": 1.0,
        "top_n_sigma": -1.0,
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "mirostat_eta": 0.1,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.9,
        "repeat_penalty": 1.0,
        "repeat_last_n": 64,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "dry_multiplier": 0.0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": 64,
        "dry_sequence_breakers": ("\n", ":", '"', "*"),
        "logit_bias": (),
        "ignore_eos": False,
        "min_keep": 0,
        "samplers": DEFAULT_SAMPLERS,
    }


def test_it_is_frozen_and_takes_names_only():
    with pytest.raises(FrozenInstanceError):
        SamplingParams().temp = 1.0
    with pytest.raises(TypeError):
        SamplingParams(42)


@pytest.mark.parametrize(("name", "bounds"), (INTEGERS | REALS).items())
def test_bounds_are_allowed(name, bounds):
    for value in bounds:
        assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "bounds"), INTEGERS.items())
def test_integers_out_of_bounds_are_refused(name, bounds):
    low, high = bounds
    for value in (low - 1, high + 1, 10**400, -(10**400)):
        with pytest.raises(UsageError, match=rf"^{name} is {value}; allowed: .*{low} to {high}"):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "bounds"), REALS.items())
def test_numbers_out_of_bounds_are_refused(name, bounds):
    low, high = bounds
    for value in (low - 1e-3, high + 1e-3, float("inf"), -float("inf"), float("nan"), 10**400):
        with pytest.raises(UsageError, match=rf"^{name} is {value!r}; allowed: numbers from"):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [1.0, 2.5, float("nan"), float("inf")])
@pytest.mark.parametrize("name", INTEGERS)
def test_an_integer_must_be_one(name, value):
    with pytest.raises(UsageError, match=rf"^{name} is {value!r}; allowed: integers"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [True, False, "1", None, [1], 1j])
@pytest.mark.parametrize("name", [*INTEGERS, *REALS])
def test_wrong_types_are_refused(name, value):
    with pytest.raises(UsageError, match=rf"^{name} is ") as error:
        SamplingParams(**{name: value})
    assert str(error.value).startswith(f"{name} is {value!r}; allowed: ")


@pytest.mark.parametrize("name", REALS)
def test_a_real_may_be_an_integer(name):
    value = getattr(SamplingParams(**{name: int(REALS[name][1])}), name)
    assert value == int(REALS[name][1])
    assert type(value) is float


# Lists


def test_biases_are_pairs_or_a_mapping():
    expected = ((7, -100.0), (3, 2.5), (7, -float("inf")))
    given = [[7, -100], (np.int32(3), np.float32(2.5)), (7, -float("inf"))]
    assert SamplingParams(logit_bias=given).logit_bias == expected
    assert SamplingParams(logit_bias={7: -100, 3: 2.5}).logit_bias == expected[:2]
    assert hash(SamplingParams(logit_bias=given)) == hash(SamplingParams(logit_bias=expected))


@pytest.mark.parametrize("value", [1e30, -1e30, -float("inf"), 0])
def test_biases_that_are_allowed(value):
    assert SamplingParams(logit_bias=[(0, value)]).logit_bias == ((0, value),)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 2e30, True, "1", None, 10**400])
def test_biases_that_are_refused(value):
    with pytest.raises(UsageError, match=r"^logit_bias of token 5 is .*; allowed: numbers from"):
        SamplingParams(logit_bias=[(5, value)])


@pytest.mark.parametrize("token", [-1, 2**31, True, 1.0, "5", None])
def test_biased_tokens_that_are_refused(token):
    with pytest.raises(UsageError, match=r"^logit_bias has token .*; allowed: ids"):
        SamplingParams(logit_bias=[(token, 1.0)])


@pytest.mark.parametrize("value", [None, 5, "5+1", [5], [(5,)], [(5, 1, 2)], ["51"]])
def test_biases_that_are_none_at_all(value):
    with pytest.raises(UsageError, match=r"^logit_bias (is|has) .*; allowed: pairs"):
        SamplingParams(logit_bias=value)


def test_s09_an_empty_breaker_is_refused():
    with pytest.raises(UsageError, match=r"^dry_sequence_breakers has ''; allowed: texts"):
        SamplingParams(dry_sequence_breakers=["\n", ""])
    assert SamplingParams(dry_sequence_breakers=[]).dry_sequence_breakers == ()


@pytest.mark.parametrize("value", ["abc", None, 5, [5], [None], ["\ud800"]])
def test_breakers_that_are_refused(value):
    with pytest.raises(UsageError, match=r"^dry_sequence_breakers (is|has) .*; allowed: "):
        SamplingParams(dry_sequence_breakers=value)


def test_samplers_are_named():
    params = SamplingParams(samplers=["temp", "top-k", "adaptive_p"])
    assert params.samplers == ("temperature", "top_k", "adaptive_p")
    assert SamplingParams(samplers=()).samplers == ()
    for value in ("top_k", None, 3, [3]):
        with pytest.raises(UsageError, match=r"^samplers (is|has) .*; allowed: "):
            SamplingParams(samplers=value)
    with pytest.raises(UsageError, match=r"^unknown sampler 'nope'"):
        SamplingParams(samplers=["nope"])
    with pytest.raises(UsageError, match=r"^sampler 'top_k' is named twice"):
        SamplingParams(samplers=["top_k", "topk"])


@pytest.mark.parametrize("value", [0, 1, None, "yes"])
def test_ignore_eos_is_true_or_false(value):
    with pytest.raises(UsageError, match=r"^ignore_eos is .*; allowed: true, false"):
        SamplingParams(ignore_eos=value)


# What runs

EVERYTHING = {
    "repeat_penalty": 1.1,
    "dry_multiplier": 0.8,
    "top_n_sigma": 1.0,
    "typical_p": 0.9,
    "xtc_probability": 0.5,
    "logit_bias": [(1, 1.0)],
}


def test_the_default_chain():
    assert SamplingParams().steps == ("top_k", "top_p", "min_p", "temperature")
    assert SamplingParams(**EVERYTHING).steps == ("logit_bias", *DEFAULT_SAMPLERS)


@pytest.mark.parametrize(
    ("on", "off", "step"),
    [
        ({"repeat_penalty": 1.1}, {}, "penalties"),
        ({"repeat_penalty": 0.9}, {"repeat_penalty": 1.0}, "penalties"),
        ({"frequency_penalty": 0.1}, {"frequency_penalty": 0.1, "repeat_last_n": 0}, "penalties"),
        ({"presence_penalty": -0.1, "repeat_last_n": -1}, {}, "penalties"),
        ({"dry_multiplier": 0.1}, {"dry_multiplier": 0.1, "dry_base": 0.99}, "dry"),
        ({"dry_multiplier": 1, "dry_base": 1}, {"dry_base": 2.0}, "dry"),
        (
            {"dry_multiplier": 1, "dry_penalty_last_n": -1},
            {"dry_multiplier": 1, "dry_penalty_last_n": 0},
            "dry",
        ),
        ({"top_n_sigma": 0.1}, {"top_n_sigma": 0.0}, "top_n_sigma"),
        ({"top_k": 1}, {"top_k": 0}, "top_k"),
        ({"top_k": 1}, {"top_k": -1}, "top_k"),
        ({"typical_p": 0.99}, {"typical_p": 1.0}, "typ_p"),
        ({"top_p": 0.99}, {"top_p": 1.0}, "top_p"),
        ({"min_p": 0.01}, {"min_p": 0.0}, "min_p"),
        (
            {"xtc_probability": 0.1, "xtc_threshold": 0.5},
            {"xtc_probability": 0.1, "xtc_threshold": 0.51},
            "xtc",
        ),
        ({"xtc_probability": 0.1}, {"xtc_probability": 0.0}, "xtc"),
        ({"temp": 0.9}, {"temp": 1.0}, "temperature"),
        ({"dynatemp_range": 0.1, "temp": 1.0}, {"temp": 1.0}, "dynamic_temperature"),
        ({"logit_bias": {1: 1}}, {}, "logit_bias"),
        ({"ignore_eos": True}, {}, "logit_bias"),
        ({"mirostat": 1}, {}, "mirostat"),
        ({"mirostat": 2}, {}, "mirostat"),
    ],
)
def test_a_sampler_that_is_off_is_no_step(on, off, step):
    assert step in SamplingParams(**on).steps
    assert step not in SamplingParams(**off).steps


def test_s02_a_sampler_that_is_not_listed_is_no_step():
    given = {**EVERYTHING, "logit_bias": [], "adaptive_target": 0.5, "top_k": 5}
    for name in DEFAULT_SAMPLERS:
        assert SamplingParams(**given, samplers=[name]).steps == (name,)
    assert SamplingParams(**given, samplers=[]).steps == ()


def test_steps_are_in_the_order_given_but_for_the_one_that_chooses():
    given = {"samplers": ["adaptive_p", "temp", "infill", "top_k"], "adaptive_target": 0.0}
    assert SamplingParams(**given).steps == ("temperature", "infill", "top_k", "adaptive_p")
    assert SamplingParams(samplers=["adaptive_p", "temp"]).steps == ("temperature",)


def test_a_temperature_with_a_range_is_another_step_in_the_same_place():
    params = SamplingParams(dynatemp_range=0.5, samplers=["temp", "top_k"])
    assert params.steps == ("dynamic_temperature", "top_k")


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_replaces_the_chain(version):
    given = {**EVERYTHING, "mirostat": version, "dynatemp_range": 0.5}
    assert SamplingParams(**given).steps == ("logit_bias", "temperature", "mirostat")
    assert SamplingParams(mirostat=version, temp=1.0).steps == ("mirostat",)
    assert SamplingParams(mirostat=version, samplers=()).steps == ("temperature", "mirostat")


@pytest.mark.parametrize(
    ("given", "greedy"),
    [
        ({}, False),
        ({"temp": 0.0}, True),
        ({"temp": -1.0}, True),
        ({"temp": 1e-9}, False),
        ({"temp": 0.0, "samplers": ["top_k"]}, False),
        ({"temp": 0.0, "samplers": ["xtc", "temperature"]}, True),
        # It moves between 0 and the range.
        ({"temp": 0.0, "dynatemp_range": 0.5}, False),
        ({"temp": 0.0, "mirostat": 2}, True),
        ({"temp": 0.0, "mirostat": 1, "samplers": [], "dynatemp_range": 0.5}, True),
        ({"temp": 0.5, "mirostat": 1}, False),
    ],
)
def test_greedy(given, greedy):
    assert SamplingParams(**given).greedy is greedy


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({}, ()),
        ({"repeat_penalty": 1.1, "logit_bias": {1: 1}}, ("logit_bias", "penalties")),
        ({"xtc_probability": 0.5}, ("top_k", "top_p", "min_p", "xtc")),
        ({"typical_p": 0.5, "top_n_sigma": 1}, ("top_n_sigma", "top_k", "typ_p")),
        # What comes before a penalty may leave the likeliest token alone.
        (
            {"repeat_penalty": 1.1, "samplers": ["top_k", "penalties", "top_p", "temp"]},
            ("top_k", "penalties"),
        ),
        # After the temperature one is left.
        ({"repeat_penalty": 1.1, "samplers": ["temp", "penalties"]}, ()),
        ({"mirostat": 2, "logit_bias": {1: 1}}, ("logit_bias",)),
    ],
)
def test_greedy_leaves_out_what_cannot_change_the_highest(given, steps):
    assert SamplingParams(temp=0.0, **given).steps == steps


def test_a_drawn_seed_uses_all_64_bits_and_is_allowed():
    seeds = [draw_seed() for _ in range(64)]
    assert len(set(seeds)) == 64
    # Each half of a bit string of 64 draws is all zero once in 2**64.
    together = 0
    for seed in seeds:
        assert SamplingParams(seed=seed).seed == seed
        together |= seed
    assert together == 2**64 - 1
