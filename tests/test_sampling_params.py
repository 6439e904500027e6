"""`sampling.params`: what a request may ask for, and what is refused."""

from dataclasses import FrozenInstanceError, asdict, fields

import pytest

from minfer_jax.errors import UsageError
from minfer_jax.sampling import SamplingParams, draw_seed

INTEGERS = {
    "seed": (-1, 2**64 - 1),
    "top_k": (-(2**31), 2**31 - 1),
    "repeat_last_n": (-1, 2**31 - 1),
}
REALS = {
    "temp": (-1e6, 1e6),
    "top_p": (0.0, 1e6),
    "min_p": (0.0, 1e6),
    "repeat_penalty": (1e-6, 1e6),
    "frequency_penalty": (-1e6, 1e6),
    "presence_penalty": (-1e6, 1e6),
}


def test_these_are_all_fields():
    assert {f.name for f in fields(SamplingParams)} == INTEGERS.keys() | REALS.keys()


def test_defaults_are_the_designs():
    assert asdict(SamplingParams()) == {
        "seed": 42,
        "temp": 0.8,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "repeat_penalty": 1.0,
        "repeat_last_n": 64,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
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
    assert getattr(SamplingParams(**{name: 1}), name) == 1


@pytest.mark.parametrize(
    ("given", "penalizes"),
    [
        ({}, False),
        ({"repeat_penalty": 1.1}, True),
        ({"repeat_penalty": 0.9}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"repeat_penalty": 1.1, "repeat_last_n": -1}, True),
        ({"repeat_penalty": 1.1, "frequency_penalty": 1, "repeat_last_n": 0}, False),
    ],
)
def test_penalizes(given, penalizes):
    assert SamplingParams(**given).penalizes is penalizes


def test_a_drawn_seed_uses_all_64_bits_and_is_allowed():
    seeds = [draw_seed() for _ in range(64)]
    assert len(set(seeds)) == 64
    # Each half of a bit string of 64 draws is all zero once in 2**64.
    together = 0
    for seed in seeds:
        assert SamplingParams(seed=seed).seed == seed
        together |= seed
    assert together == 2**64 - 1
