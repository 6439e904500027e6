"""`sampling.sampler`: constraints, tokens chosen elsewhere, and what a request remembers."""

import json
from collections import deque

import numpy as np
import pytest
from test_sampling_sampler import EQUAL, INF, KNOWN_DRAWS, LEAD, NAN, PLAIN, PRESENCE, row
from test_sampling_sampler_chain import MANY

from minfer_jax.errors import SamplingError, UsageError
from minfer_jax.sampling import Sampler, SamplingParams

# A constraint


class Only:
    """Allows what it is told, step by step, and remembers what it was asked."""

    finished = False

    def __init__(self, n_vocab, *steps):
        self.n_vocab, self.steps, self.accepted = n_vocab, deque(map(set, steps)), []

    def prepare(self):
        pass

    def allowed(self):
        return np.isin(np.arange(self.n_vocab), list(self.steps[0]))

    def accept(self, token):
        if token not in self.steps[0]:
            raise SamplingError(f"token {token} is not allowed")
        self.accepted.append(token)
        self.steps.popleft()


@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_a_constraint_comes_before_the_chain(temp):
    only = Only(4, {1}, {0, 3}, {2})
    one = Sampler(SamplingParams(temp=temp, top_k=1), constraint=only)
    assert one.constraint is only
    assert [one.sample(row(9, 1, 8, 2)) for _ in range(3)] == [1, 0, 2]
    assert only.accepted == [1, 0, 2]


def test_a_bias_does_not_bring_back_what_the_constraint_rules_out():
    one = Sampler(SamplingParams(temp=0.0, logit_bias={0: 100.0}), constraint=Only(2, {1}))
    assert one.sample(row(0, 0)) == 1


@pytest.mark.parametrize("logits", [(1, 2, 3), (1, 2, INF), (-INF, 2, 3)])
def test_nothing_allowed_is_an_error_that_says_what_the_text_is(logits):
    only = Only(3, {0} if logits[0] == -INF else ())
    one = Sampler(SamplingParams(), constraint=only)
    with pytest.raises(SamplingError, match=r"under the grammar; the text so far is a valid begin"):
        one.sample(row(*logits))
    assert one.draws == 0
    assert only.accepted == []


def test_infinity_wins_among_what_is_allowed():
    assert Sampler(SamplingParams(), constraint=Only(3, {0, 1})).sample(row(0, INF, INF)) == 1
    assert Sampler(SamplingParams(), constraint=Only(3, {1})).sample(row(0, 1, INF)) == 1


@pytest.mark.parametrize("n_vocab", [2, 3, 5])
def test_rows_of_a_head_that_no_token_belongs_to_are_never_allowed(n_vocab):
    """A padded head: the mask is shorter than its rows, or longer."""
    one = Sampler(SamplingParams(temp=0.0), constraint=Only(n_vocab, {0, 1}))
    assert one.sample(row(0, 1, 9)[: max(n_vocab, 3)]) == 1


def test_nan_is_found_before_the_constraint():
    with pytest.raises(SamplingError, match=r"^1 of 2 logits are not a number"):
        Sampler(SamplingParams(), constraint=Only(2, {1})).sample(row(NAN, 1))


# Tokens that were chosen elsewhere


def test_a_token_accepted_counts_as_one_sampled():
    params = SamplingParams(**PRESENCE, repeat_last_n=3)
    one, other = Sampler(params, [5]), Sampler(params, [5])
    assert one.sample(LEAD) == 0
    other.accept(0)
    assert one.state() == other.state()
    assert one.sample(LEAD) == other.sample(LEAD) == 1
    assert one.window(9) == [5, 0, 1]


def test_a_token_accepted_takes_no_random_number():
    one = Sampler(SamplingParams(**PLAIN))
    one.accept(3)
    assert one.draws == 0
    assert one.sample(EQUAL) == KNOWN_DRAWS[0]


def test_a_token_accepted_must_be_allowed():
    one = Sampler(SamplingParams(), [4], constraint=Only(3, {1}, {2}))
    with pytest.raises(SamplingError, match="token 0 is not allowed"):
        one.accept(0)
    assert one.window(9) == [4]
    one.accept(1)
    assert one.window(9) == [4, 1]


@pytest.mark.parametrize(("last_n", "n", "expected"), [
    (3, 9, [2, 3, 4]), (3, 2, [3, 4]), (3, 0, []), (-1, 9, [0, 1, 2, 3, 4]), (0, 9, []),
])  # fmt: skip
def test_the_window_is_the_penalties(last_n, n, expected):
    dry = {"dry_multiplier": 1.0, "dry_sequence_breakers": ()}
    for more in ({}, {"repeat_penalty": 1.1}, dry):
        one = Sampler(SamplingParams(repeat_last_n=last_n, **more), range(5))
        assert one.window(n) == expected


# What a request remembers

STATES = [
    {},
    {"temp": 0.0, "presence_penalty": 1.0},
    {**MANY, "min_keep": 2},
    {"repeat_penalty": 1.3, "repeat_last_n": -1, "seed": 2**64 - 1},
    {"dry_multiplier": 1.0, "dry_sequence_breakers": (), "dry_penalty_last_n": -1},
    {"dry_multiplier": 1.0, "dry_sequence_breakers": (), "dry_penalty_last_n": 9},
    {"mirostat": 1, "mirostat_tau": 2.0},
    {"mirostat": 2, "mirostat_tau": 2.0},
    {"adaptive_target": 0.2, "samplers": ["top_k", "adaptive_p"]},
]


@pytest.mark.parametrize("params", STATES, ids=lambda p: "-".join([*p][:2]) or "default")
def test_it_goes_on_from_a_state_in_json_as_if_nothing_had_been(params):
    params = SamplingParams(**params)
    rows = np.random.default_rng(3).normal(size=(60, 12)).astype(np.float32) * 2
    one = Sampler(params, [1, 2, 3, 1, 2])
    for logits in rows[:30]:
        one.sample(logits)
    other = Sampler(params)
    other.restore(json.loads(json.dumps(one.state())))
    assert other.state() == one.state()
    assert [one.sample(x) for x in rows[30:]] == [other.sample(x) for x in rows[30:]]
    assert other.state() == one.state()


def test_a_new_sampler_begins_anew():
    params = SamplingParams(**STATES[6])
    one = Sampler(params)
    fresh = one.state()
    one.sample(EQUAL)
    assert one.state() != fresh
    assert Sampler(params).state() == fresh


def test_a_drawn_seed_is_part_of_the_state():
    params = SamplingParams(**PLAIN, seed=-1)
    one, other = Sampler(params), Sampler(params)
    one.sample(EQUAL)
    other.restore(one.state())
    assert other.seed == one.seed
    assert one.sample(EQUAL) == other.sample(EQUAL)


STATE = {"seed": 42, "draws": 0, "recent": [], "learned": []}


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        {},
        *({name: value for name, value in STATE.items() if name != gone} for gone in STATE),
        {**STATE, "seed": -1},
        {**STATE, "seed": 2**64},
        {**STATE, "draws": -1},
        {**STATE, "draws": 1.0},
        {**STATE, "recent": None},
        {**STATE, "recent": [-1]},
        {**STATE, "recent": [2**31]},
        {**STATE, "recent": ["1"]},
        {**STATE, "learned": None},
        {**STATE, "learned": [NAN]},
        {**STATE, "learned": ["1"]},
    ],
)
def test_what_is_no_state_is_refused(state):
    one = Sampler(SamplingParams(), [7])
    before = one.state()
    with pytest.raises(UsageError, match=r"^this is not the state of a sampler, or it is damaged"):
        one.restore(state)
    assert one.state() == before


def test_a_state_of_other_parameters_is_refused():
    one = Sampler(SamplingParams(seed=7))
    with pytest.raises(UsageError, match=r"^the sampler's state is of seed 42, not of 7$"):
        one.restore(STATE)
    message = r"^the sampler's state is of other settings of mirostat or adaptive_p$"
    for params, learned in (({}, [1.0]), ({"mirostat": 1}, []), ({"mirostat": 2}, [1.0, 2.0])):
        one = Sampler(SamplingParams(**params), [7])
        before = one.state()
        with pytest.raises(UsageError, match=message):
            one.restore({**STATE, "learned": learned})
        assert one.state() == before


@pytest.mark.parametrize("params", STATES, ids=lambda p: "-".join([*p][:2]) or "default")
@pytest.mark.parametrize("logits", [[NAN] * 12, [-INF] * 12])
def test_an_error_changes_nothing(params, logits):
    one = Sampler(SamplingParams(**params), [1, 2, 1])
    one.sample(np.zeros(12, np.float32))
    before = one.state()
    with pytest.raises(SamplingError):
        one.sample(row(*logits))
    assert one.state() == before
