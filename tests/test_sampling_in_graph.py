"""`sampling.in_graph`: the chain in a graph chooses the tokens that the host's chain chooses."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.errors import SamplingError, UsageError
from minfer_jax.sampling import Sampler, SamplingParams
from minfer_jax.sampling.in_graph import (
    SampleInputs,
    SamplerKind,
    accept,
    advance,
    blank_inputs,
    choose,
    inputs_of,
    kind_of,
)
from minfer_jax.sampling.philox import uniform
from minfer_jax.sampling.vocab import SamplerVocab

INF, NAN = float("inf"), float("nan")
EDGE = 1e-5  # cumulative mass this near to an edge may fall on either side of it
DRAWN = ("top_k", "top_p", "min_p", "temperature")
ORDERS = {
    "default": ("penalties", *DRAWN),
    "temperature first": ("temperature", "top_p", "min_p", "top_k", "penalties"),
    "penalties last": ("top_k", "min_p", "penalties", "temperature", "top_p"),
    "penalties between": ("min_p", "top_p", "penalties", "temperature", "top_k"),
    "top_k alone": ("top_k",),
    "nothing": (),
}


def kind(n_vocab=1000, constrained=False, **params):
    return kind_of(SamplingParams(**params), n_vocab=n_vocab, constrained=constrained)


@functools.cache
def jitted(kind):
    return jax.jit(lambda logits, inputs: choose(logits, kind, inputs))


def chosen(samplers, rows):
    """What the graph chooses for each of the samplers, all of one kind."""
    rows = np.asarray(rows, np.float32)
    (one,) = {kind_of(s.params, n_vocab=rows.shape[1], constrained=False) for s in samplers}
    return jitted(one)(rows, inputs_of(samplers, one)).tolist()


def one(row, prompt=(), **params):
    return chosen([Sampler(SamplingParams(**params), prompt)], [row])[0]


class Oracle:
    """The chain in float64, one candidate after the other; `margin`: how near a choice came to
    falling out differently."""

    def __init__(self, row, sampler):
        self.p, self.sampler, self.margin = sampler.params, sampler, INF
        self.c = [(float(x), i) for i, x in enumerate(row)]

    def token(self):
        for token, bias in self.sampler.bias.items():
            self.c[token] = (self.c[token][0] + bias, token)
        for step in self.p.steps:
            if step != "logit_bias":
                getattr(self, step)()
        if self.p.greedy:
            return max(self.c, key=lambda c: (c[0], -c[1]))[1]
        mass = np.cumsum(self.probabilities())
        u = uniform(self.sampler.seed, self.sampler.draws + 1)
        self.near(mass[:-1], u)
        return self.c[int(np.searchsorted(mass, u, side="right"))][1]

    def near(self, values, edge):
        self.margin = min(self.margin, *np.abs(np.asarray(values) - edge).tolist(), INF)

    def probabilities(self):
        top = max(x for x, _ in self.c)
        weights = np.exp([x - top for x, _ in self.c])
        return weights / weights.sum()

    def penalties(self):
        p, window = self.p, self.sampler.window(self.p.repeat_last_n)
        self.c.sort(key=lambda c: c[1])
        for at, (x, token) in enumerate(self.c):
            if times := window.count(token):
                x = x * p.repeat_penalty if x <= 0 else x / p.repeat_penalty
                x -= times * p.frequency_penalty + p.presence_penalty
                self.c[at] = (x, token)

    def top_k(self):
        self.c = sorted(self.c, key=lambda c: -c[0])[: self.p.top_k]

    def top_p(self):
        self.c.sort(key=lambda c: -c[0])
        mass = np.cumsum(self.probabilities())
        self.near(mass, self.p.top_p)
        self.c = self.c[: int(np.searchsorted(mass, self.p.top_p)) + 1]

    def min_p(self):
        edge = max(x for x, _ in self.c) + math.log(self.p.min_p)
        self.near([x for x, _ in self.c], edge)
        self.c = [c for c in self.c if c[0] >= edge]

    def temperature(self):
        self.c = [(x / self.p.temp, token) for x, token in self.c]


def random_params(rng, **fixed):
    return SamplingParams(
        **{
            "seed": int(rng.integers(0, 2**63)),
            "temp": float(rng.uniform(0.3, 2.0)),
            "top_k": int(rng.integers(1, 65)),
            "top_p": float(rng.uniform(0.3, 0.99)),
            "min_p": float(rng.uniform(0.001, 0.3)),
            "repeat_penalty": float(rng.uniform(1.01, 1.5)),
            "repeat_last_n": int(rng.integers(1, 65)),
            "frequency_penalty": float(rng.uniform(-0.2, 0.5)),
            "presence_penalty": float(rng.uniform(-0.2, 0.5)),
            **fixed,
        }
    )


def compare(n_vocab, n, seed, **fixed):
    """Graph, host and oracle choose for n random rows; at an edge they may differ."""
    rng = np.random.default_rng(seed)
    rows = (rng.normal(size=(n, n_vocab)) * rng.uniform(0.5, 4.0, (n, 1))).astype(np.float32)
    samplers = []
    for _ in rows:
        prompt = rng.integers(0, min(n_vocab, 100), int(rng.integers(0, 90))).tolist()
        samplers.append(Sampler(random_params(rng, **fixed), prompt))
        samplers[-1].draws = int(rng.integers(0, 2**31))
    sure = 0
    for row, sampler, token in zip(rows, samplers, chosen(samplers, rows), strict=True):
        oracle = Oracle(row, sampler)
        expected = oracle.token()
        if oracle.margin < EDGE:
            continue
        sure += 1
        assert token == expected
        assert sampler.sample(row) == expected
    assert sure > 0.7 * n


# Kinds


def test_the_default_chain():
    assert kind() == SamplerKind(DRAWN, greedy=False, width=64, window=0, n_bias=0)


def test_greedy_needs_only_what_moves_the_highest():
    assert kind(temp=0.0) == SamplerKind((), True, 0, 0, 0)
    biased = kind(temp=0.0, repeat_penalty=1.1, logit_bias=((3, 1.0),))
    assert biased == SamplerKind(("logit_bias", "penalties"), True, 0, 64, 16)


@pytest.mark.parametrize(
    ("params", "steps"),
    [
        ({"top_k": 0}, ("top_p", "min_p", "temperature")),
        # What is off in a chain of the usual order needs no graph of its own.
        ({"top_p": 1.0}, DRAWN),
        ({"min_p": 0.0, "temp": 1.0}, DRAWN),
        ({"top_k": 0, "top_p": 1.0}, ("min_p", "temperature")),
        ({"samplers": ()}, ("min_p", "temperature")),
        ({"samplers": ("temperature", "top_k")}, ("temperature", "top_k")),
        ({"presence_penalty": 0.1}, ("penalties", *DRAWN)),
        ({"presence_penalty": 0.1, "repeat_last_n": 0}, DRAWN),
        ({"ignore_eos": True}, ("logit_bias", *DRAWN)),
        # Listed nowhere: without any effect.
        ({"xtc_probability": 0.5, "samplers": ("top_k",)}, DRAWN),
    ],
)
def test_a_kind_holds_what_does_something(params, steps):
    assert kind(**params).steps == steps


@pytest.mark.parametrize(
    ("params", "rooms"),
    [
        ({"top_k": 64}, (64, 0, 0)),
        ({"top_k": 65}, (256, 0, 0)),
        ({"top_k": 1024}, (1024, 0, 0)),
        ({"top_k": 10**9}, (1024, 0, 0)),  # there are 1000 tokens
        ({"top_k": 0}, (0, 0, 0)),
        ({"repeat_penalty": 1.1, "repeat_last_n": 65}, (64, 256, 0)),
        ({"repeat_penalty": 1.1, "repeat_last_n": 1024}, (64, 1024, 0)),
        ({"logit_bias": tuple((i, 1.0) for i in range(17))}, (64, 0, 256)),
        ({"logit_bias": ((1, 1.0),), "ignore_eos": True}, (64, 0, 256)),
    ],
)
def test_a_kind_has_rooms_of_few_sizes(params, rooms):
    found = kind(**params)
    assert (found.width, found.window, found.n_bias) == rooms


@pytest.mark.parametrize(
    "params",
    [
        {"mirostat": 1},
        {"mirostat": 2},
        {"dry_multiplier": 0.8},
        {"xtc_probability": 0.5},
        {"typical_p": 0.9},
        {"top_n_sigma": 1.0},
        {"samplers": ("temperature", "adaptive_p"), "adaptive_target": 0.5},
        {"samplers": ("infill",)},
        {"dynatemp_range": 0.5},
        {"dynatemp_range": 0.5, "temp": 0.0},
        {"min_keep": 2},
        {"top_k": 1025, "n_vocab": 2000},
        {"repeat_penalty": 1.1, "repeat_last_n": 1025},
        {"repeat_penalty": 1.1, "repeat_last_n": -1},
        {"logit_bias": tuple((i, 1.0) for i in range(257))},
        {"logit_bias": ((1000, 1.0),)},
        {"temp": 0.0, "dry_multiplier": 0.8},
        {"constrained": True},
        {"constrained": True, "temp": 0.0},
    ],
)
def test_what_only_the_host_can_do_has_no_kind(params):
    assert kind(**params) is None


# Inputs


def test_inputs_hold_a_row_a_sampler():
    one = SamplingParams(
        seed=(7 << 32) + 0xFFFFFFFE,
        temp=0.5,
        top_k=9,
        top_p=0.75,
        min_p=0.25,
        repeat_penalty=1.5,
        repeat_last_n=3,
        frequency_penalty=0.125,
        presence_penalty=-0.5,
        logit_bias=((8, 1.0), (2, -INF), (8, 0.5)),
    )
    samplers = [Sampler(one, [1, 2, 3, 4]), Sampler(one, [6])]
    samplers[1].draws = 11
    kind = kind_of(one, n_vocab=100, constrained=False)
    inputs = inputs_of(samplers, kind)
    floats = [0.5, 0.75, math.log(0.25), 1.5, 0.125, -0.5]
    np.testing.assert_array_equal(inputs.floats, np.array([floats] * 2, np.float32))
    assert inputs.ints.tolist() == [[9, 3, -2, 7, 1], [9, 3, -2, 7, 12]]
    assert inputs.window[:, -4:].tolist() == [[-1, 2, 3, 4], [-1, -1, -1, 6]]
    assert (inputs.window[:, :-4] == -1).all()
    assert inputs.bias_ids[0].tolist() == [8, 2] + [-1] * 14
    assert inputs.bias[1].tolist() == [1.5, -INF] + [0.0] * 14


def test_blank_inputs_have_the_shapes_and_types_of_inputs():
    params = SamplingParams(repeat_penalty=1.1, logit_bias=((1, 1.0),))
    kind = kind_of(params, n_vocab=100, constrained=False)
    full, blank = inputs_of([Sampler(params)] * 3, kind), blank_inputs(kind, 3)
    for a, b in zip(full, blank, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_a_row_of_blank_inputs_chooses_some_token():
    params = SamplingParams(repeat_penalty=1.1, logit_bias=((1, 1.0),))
    kind = kind_of(params, n_vocab=4, constrained=False)
    row = np.array([[0.0, 2.0, 1.0, 2.0]], np.float32)
    zeros = SampleInputs(*(np.zeros_like(part) for part in blank_inputs(kind, 1)))
    for inputs in (blank_inputs(kind, 1), zeros):
        assert jitted(kind)(row, inputs).tolist() == [1]


def test_more_end_tokens_than_there_is_room_for_are_an_error():
    eog = frozenset(range(300))
    vocab = SamplerVocab(
        n_vocab=1000,
        eog=eog,
        end=None,
        pieces=lambda _: b"",
        plain=lambda _: b"",
        encode=lambda _: [],
    )
    params = SamplingParams(ignore_eos=True)
    kind = kind_of(params, n_vocab=1000, constrained=False)
    with pytest.raises(UsageError, match="300 tokens have a bias; allowed here: 256"):
        inputs_of([Sampler(params, vocab=vocab)], kind)


# Choices


@pytest.mark.parametrize("order", ORDERS)
def test_the_same_tokens_as_the_host_in_any_order(order):
    compare(300, 200, seed=1, samplers=ORDERS[order])


@pytest.mark.slow
@pytest.mark.parametrize("order", ["default", "temperature first"])
def test_the_same_tokens_of_a_large_vocabulary(order):
    compare(9001, 60, seed=1, samplers=ORDERS[order])


@pytest.mark.parametrize(
    "fixed",
    [
        {"top_k": 200},
        {"top_k": 1000},
        {"top_k": 0},
        {"top_k": 0, "top_p": 1.0},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0, "temp": 1.0},
        {"top_p": 1.0},
        {"min_p": 0.0, "temp": 1.0},
        {"temp": 0.0},
        {"temp": 0.0, "samplers": ("top_k", "min_p", "penalties", "temperature")},
        {"temp": 0.0, "samplers": ("top_p", "penalties", "temperature")},
        {"repeat_last_n": 80},
        {"logit_bias": ((3, 4.0), (5, -INF), (9, -1.5), (3, 1.0))},
        {"temp": 0.0, "logit_bias": ((3, 4.0), (5, 6.0), (9, -INF))},
    ],
    ids=str,
)
def test_the_same_tokens_with_a_step_more_or_less(fixed):
    compare(300, 100, seed=2, **fixed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fixed",
    [
        {"top_k": 200},
        {"top_k": 0},
        {"top_k": 0, "top_p": 1.0},
        {"temp": 0.0, "logit_bias": ((3, 4.0), (5, 6.0), (9, -INF))},
    ],
    ids=str,
)
def test_the_same_tokens_of_a_large_vocabulary_with_a_step_less(fixed):
    compare(9001, 40, seed=2, **fixed)


@pytest.mark.slow
def test_thousands_of_draws_of_the_default_chain():
    compare(300, 3000, seed=3)


@pytest.mark.parametrize("temp", [0.0, 1e-45])
@pytest.mark.parametrize("top", [0.0, 3.0])
def test_the_lowest_id_among_equals_when_cold(temp, top):
    rng = np.random.default_rng(4)
    rows = rng.integers(-3, 1, (50, 700)).astype(np.float32) + np.float32(top)
    rows[(rows == 0) & (rng.random(rows.shape) < 0.5)] *= -1.0  # zeros of both signs
    samplers = [Sampler(SamplingParams(temp=temp, top_k=0, seed=i)) for i in range(50)]
    assert chosen(samplers, rows) == rows.argmax(axis=1).tolist()


def test_equal_logits_are_drawn_in_the_order_of_their_ids():
    row = np.zeros(9000, np.float32)
    params = {"temp": 1.0, "top_k": 10, "top_p": 1.0, "min_p": 0.0}
    samplers = [Sampler(SamplingParams(seed=i, **params)) for i in range(200)]
    expected = [int(uniform(i, 1) * 10) for i in range(200)]
    assert chosen(samplers, [row] * 200) == expected


# Distributions


def chi_squared(params, logits, probabilities, n=20_000):
    """Of n draws against exact probabilities, in standard deviations above its mean."""
    sampler = Sampler(SamplingParams(seed=2024, **params))
    kind = kind_of(sampler.params, n_vocab=len(logits), constrained=False)
    counts = np.zeros(len(logits))
    for start in range(0, n, 2000):
        inputs = inputs_of([sampler] * 2000, kind)
        inputs.ints[:, -1] = np.arange(start + 1, start + 2001)
        tokens = jitted(kind)(np.tile(logits, (2000, 1)), inputs)
        counts += np.bincount(tokens, minlength=len(logits))
    assert counts[probabilities == 0].sum() == 0
    seen = probabilities > 0
    expected = n * probabilities[seen]
    statistic = ((counts[seen] - expected) ** 2 / expected).sum()
    freedom = seen.sum() - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("m", "params", "keep"),
    [
        (40, {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temp": 1.5}, 1.0),
        (1300, {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temp": 1.5}, 1.0),
        (40, {"top_k": 12, "top_p": 1.0, "min_p": 0.0, "temp": 0.7}, 12),
        (40, {"top_k": 0, "top_p": 0.8, "min_p": 0.0, "temp": 1.2}, 0.8),
    ],
)
def test_20k_draws_have_the_exact_distribution(m, params, keep):
    logits = np.random.default_rng(m).normal(size=m).astype(np.float32)
    order = np.argsort(-logits.astype(np.float64))
    plain = np.exp(logits.astype(np.float64))
    mass = np.cumsum(plain[order]) / plain.sum()
    kept = keep if isinstance(keep, int) else int(np.searchsorted(mass, keep)) + 1
    heated = np.exp(logits.astype(np.float64) / params["temp"])
    heated[order[kept:]] = 0.0
    assert abs(chi_squared(params, logits, heated / heated.sum())) < 4.0


# What cannot be chosen


@pytest.mark.parametrize("params", [{}, {"temp": 0.0}, {"top_k": 0, "top_p": 1.0}, {"top_k": 0}])
@pytest.mark.parametrize("n_vocab", [5, 3000])
def test_no_silent_id(params, n_vocab):
    nothing = np.full(n_vocab, -INF, np.float32)
    nan = np.zeros(n_vocab, np.float32)
    nan[n_vocab - 2] = NAN
    fine = nan.copy()
    fine[n_vocab - 2] = 50.0
    negative_nan = -nan
    samplers = [Sampler(SamplingParams(**params)) for _ in range(4)]
    rows = [nothing, nan, fine, negative_nan]
    assert chosen(samplers, rows) == [-1, -1, n_vocab - 2, -1]
    for row in (nothing, nan, negative_nan):
        with pytest.raises(SamplingError):
            samplers[0].sample(row)


@pytest.mark.parametrize("params", [{}, {"temp": 0.0}, {"top_k": 0, "top_p": 1.0}])
def test_biases_that_leave_nothing_leave_no_token(params):
    params = {**params, "logit_bias": ((0, -INF), (1, -INF))}
    assert one([1.0, 2.0], **params) == -1
    assert one([1.0, 2.0, -INF], **params) == -1
    assert one([1.0, 2.0, -50.0], **params) == 2


@pytest.mark.parametrize("params", [{}, {"temp": 0.0}, {"top_k": 0, "top_p": 1.0}])
@pytest.mark.parametrize("repeat", [1.0, 2.0])
def test_infinite_logits_are_equals_as_on_the_host(params, repeat):
    row = np.array([5.0, INF, 3.0, INF, INF, -INF], np.float32)
    samplers = [
        Sampler(SamplingParams(seed=i, presence_penalty=repeat - 1.0, **params), [1, 1])
        for i in range(50)
    ]
    expected = [sampler.sample(row) for sampler in samplers]
    again = [
        Sampler(SamplingParams(seed=i, presence_penalty=repeat - 1.0, **params), [1, 1])
        for i in range(50)
    ]
    assert chosen(again, [row] * 50) == expected
    assert set(expected) <= {1, 3, 4}


# Step by step


@pytest.mark.parametrize(
    "params",
    [
        {"repeat_penalty": 1.3, "repeat_last_n": 5, "frequency_penalty": 0.5},
        {"temp": 0.0, "presence_penalty": 1.0, "repeat_last_n": 3},
        {"top_k": 5},
    ],
)
def test_advance_makes_the_inputs_that_the_next_step_would_have(params):
    rng = np.random.default_rng(5)
    samplers = [Sampler(SamplingParams(seed=i, **params), [i, 2]) for i in range(3)]
    kind = kind_of(samplers[0].params, n_vocab=30, constrained=False)
    inputs = inputs_of(samplers, kind)
    for _ in range(8):
        rows = rng.normal(size=(3, 30)).astype(np.float32)
        ids = jitted(kind)(rows, inputs)
        inputs = advance(inputs, kind, ids)
        for row, sampler, token in zip(rows, samplers, ids.tolist(), strict=True):
            alone = Sampler(sampler.params)
            alone.restore(sampler.state())
            assert alone.sample(row) == token
            accept(sampler, kind, token)
            assert sampler.state() == alone.state()
    fresh = inputs_of(samplers, kind)
    used = min(samplers[0].params.repeat_last_n, kind.window)
    np.testing.assert_array_equal(inputs.ints, fresh.ints)
    if used:
        np.testing.assert_array_equal(inputs.window[:, -used:], fresh.window[:, -used:])


def test_rows_do_not_see_each_other():
    rng = np.random.default_rng(6)
    rows = rng.normal(size=(8, 500)).astype(np.float32)
    samplers = [Sampler(SamplingParams(seed=i, temp=1.5, top_k=50)) for i in range(8)]
    together = chosen(samplers, rows)
    assert together == [chosen([s], [row])[0] for s, row in zip(samplers, rows, strict=True)]


# Graphs


@pytest.mark.parametrize("params", [{"temp": 0.0}, {}, {"top_k": 0}, {"top_k": 0, "top_p": 1.0}])
def test_the_trace_is_the_same_with_x64(params):
    params = SamplingParams(repeat_penalty=1.1, logit_bias=((1, 1.0),), **params)
    kind = kind_of(params, n_vocab=9000, constrained=False)
    inputs = jax.tree.map(jnp.asarray, inputs_of([Sampler(params)], kind))

    def trace():
        def step(logits, inputs):
            ids = choose(logits, kind, inputs)
            return ids, advance(inputs, kind, ids)

        return str(jax.make_jaxpr(step)(jnp.zeros((1, 9000), jnp.float32), inputs))

    plain = trace()
    with jax.enable_x64(True):
        assert trace() == plain
    assert "64[" not in plain


def test_parameters_are_data():
    traced = []

    @functools.partial(jax.jit, static_argnums=1)
    def step(logits, kind, inputs):
        traced.append(kind)
        return choose(logits, kind, inputs)

    row = np.zeros((1, 50), np.float32)
    for seed in range(5):
        params = SamplingParams(
            seed=seed, temp=0.5 + seed / 10, top_k=3 + seed, top_p=0.5, min_p=0.1
        )
        kind = kind_of(params, n_vocab=50, constrained=False)
        step(row, kind, inputs_of([Sampler(params, range(seed))], kind))
    assert len(traced) == 1
