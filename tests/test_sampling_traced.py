"""`sampling.traced`: each sampler keeps what its namesake of `sampling.samplers` keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.sampling import samplers, traced
from minfer_jax.sampling.philox import uniform

INF = np.float32(np.inf)
SEEDS = range(20)


def logits_of(seed, m, spread=3.0):
    rng = np.random.default_rng(seed)
    row = (rng.normal(size=m) * spread).astype(np.float32)
    row[rng.random(m) < 0.05] = -INF
    return np.round(row, 1) + np.float32(0.0) if seed % 3 == 0 else row  # every third: many equal


def column(value, dtype=np.float32):
    return np.array([[value]], dtype)


def host(row):
    return samplers.Candidates.all(row)


def kept(c, i=0):
    """Ids and logits of what a row keeps, in order."""
    ids = np.arange(c.logits.shape[1]) if c.ids is None else np.asarray(c.ids[i])
    left = np.asarray(c.logits[i]) > -INF
    return ids[left].tolist(), np.asarray(c.logits[i])[left]


def expect_equal(c, expected):
    left = expected.logits > -INF
    ids, logits = kept(c)
    assert ids == expected.ids[left].tolist()
    np.testing.assert_allclose(logits, expected.logits[left], rtol=1e-6, atol=1e-6)


def graph(row):
    return traced.Candidates(jnp.asarray(row)[None])


# Random numbers


def test_uniform_numbers_are_the_hosts():
    rng = np.random.default_rng(0)
    seeds = [0, 1, 42, 2**32, 2**63 + 5, 2**64 - 1, *rng.integers(0, 2**63, 500).tolist()]
    draws = [0, 1, 2, 2**31, 2**32 - 1, 77, *rng.integers(0, 2**32, 500).tolist()]
    words = np.array([[s & 0xFFFFFFFF, s >> 32, d] for s, d in zip(seeds, draws, strict=True)])
    low, high, count = words.astype(np.uint32).T
    got = jax.jit(traced.uniform)(low, high, count)
    expected = [int(uniform(s, d) * 2**24) / 2**24 for s, d in zip(seeds, draws, strict=True)]
    assert got.tolist() == expected


# Checks


def test_checked_finds_rows_that_cannot_be_used():
    rows = np.zeros((4, 70), np.float32)
    rows[1, 66], rows[2], rows[3, :69] = np.nan, -INF, -INF
    _, usable = traced.checked(jnp.asarray(rows))
    assert usable[:, 0].tolist() == [True, False, False, True]


def test_infinite_logits_remain_alone_as_equals():
    c, usable = traced.checked(jnp.asarray([[1.0, INF, 3.0, INF], [1.0, 2.0, -INF, 0.0]]))
    assert c.logits.tolist() == [[-INF, 0.0, -INF, 0.0], [1.0, 2.0, -INF, 0.0]]
    assert usable.all()


def test_zeros_of_both_signs_are_equal():
    c, _ = traced.checked(jnp.asarray([[-0.0, 0.0, -0.0, -1.0]]))
    assert traced.head(c, 3).ids is not None
    assert kept(traced.head(c, 3))[0] == [0, 1, 2]


# Samplers


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("m", [50, 9000])
def test_top_k_keeps_the_hosts(seed, m):
    row = logits_of(seed, m)
    k = [1, 2, 40, 63, 64][seed % 5]
    expect_equal(traced.top_k(graph(row), column(k, np.int32), 64), samplers.top_k(host(row), k))


def test_top_k_of_none_keeps_the_width():
    row = logits_of(1, 500)
    expect_equal(traced.top_k(graph(row), column(0, np.int32), 64), samplers.top_k(host(row), 64))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("p", [0.0, 0.3, 0.9, 0.99])
def test_top_p_keeps_the_hosts(seed, p):
    row = logits_of(seed, 700)
    c = samplers.Candidates.all(row).sort()
    mass = np.cumsum(c.weights()) / c.weights().sum()
    i = int(np.searchsorted(mass, p))
    p = (mass[i] + (mass[i - 1] if i else 0.0)) / 2  # as far from an edge as can be
    got, reached = traced.top_p(traced.in_order(graph(row)), column(p))
    expect_equal(got, samplers.top_p(host(row), p))
    assert reached.all()


def test_top_p_of_a_head_needs_the_sum_of_all():
    row = np.zeros(1000, np.float32)
    total = traced.row_sum(graph(row).weights())
    head = traced.head(graph(row), 64)
    got, reached = traced.top_p(head, column(0.05), total)
    assert kept(got)[0] == list(range(50)) and reached.all()
    got, reached = traced.top_p(head, column(0.065), total)
    assert kept(got)[0] == list(range(64)) and not reached.any()


def test_top_p_of_one_keeps_all():
    row = np.array([100.0, 0.0, -100.0], np.float32)
    got, _ = traced.top_p(traced.in_order(graph(row)), column(1.0))
    assert kept(got)[0] == [0, 1, 2]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("p", [1e-4, 0.05, 0.5, 1.0, 3.0])
def test_min_p_keeps_the_hosts(seed, p):
    row = logits_of(seed, 700)
    expect_equal(traced.min_p(graph(row), column(np.log(p))), samplers.min_p(host(row), p))


def test_min_p_of_none_keeps_all():
    row = np.array([100.0, 0.0, -100.0], np.float32)
    assert kept(traced.min_p(graph(row), column(-INF)))[0] == [0, 1, 2]


@pytest.mark.parametrize("temp", [0.01, 0.8, 2.0, 1e6, 1e-40, 1e-50, 0.0, -1.0])
@pytest.mark.parametrize("ordered", [False, True])
def test_temperature_divides_as_the_host(temp, ordered):
    row = logits_of(3, 700)
    c, expected = graph(row), host(row)
    if ordered:
        c, expected = traced.in_order(c), expected.sort()
    # Without an order, the first of equal maxima has the lowest id; in order, the first place.
    with np.errstate(all="ignore"):
        expect_equal(traced.temperature(c, column(temp)), samplers.temperature(expected, temp))


def test_temperature_of_zero_keeps_the_first_maximum():
    row = np.array([1.0, 5.0, 2.0, 5.0], np.float32)
    assert kept(traced.temperature(graph(row), column(0.0)))[0] == [1]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("narrow", [False, True])
def test_penalties_are_the_hosts(seed, narrow):
    rng = np.random.default_rng(seed)
    row = logits_of(seed, 300)
    window = rng.integers(0, 330, 64)  # some are no tokens of the vocabulary
    window[:10] = -1
    window[20:25] = window[30]
    repeat, frequency, presence = rng.uniform([0.5, -1, -1], [2, 1, 1])
    c, expected = graph(row), host(row)
    if narrow:
        c, expected = traced.head(c, 100), samplers.top_k(expected, 100)
    got = traced.penalties(
        c,
        jnp.asarray(window[None].astype(np.int32)),
        300,
        repeat=column(repeat),
        frequency=column(frequency),
        presence=column(presence),
    )
    tokens, times = np.unique(window[window >= 0], return_counts=True)
    counts = dict(zip(tokens.tolist(), times.tolist(), strict=True))
    expected = samplers.penalties(
        expected, counts, repeat=repeat, frequency=frequency, presence=presence
    )
    expect_equal(got, expected)
    assert not got.ordered


def test_penalties_worked_by_hand():
    c = traced.penalties(
        graph(np.array([4.0, -4.0, 1.0, 2.0], np.float32)),
        jnp.asarray([[-1, 1, 0, 0, -1]], jnp.int32),
        4,
        repeat=column(2.0),
        frequency=column(0.25),
        presence=column(0.5),
    )
    assert c.logits.tolist() == [[2.0 - 0.5 - 0.5, -8.0 - 0.25 - 0.5, 1.0, 2.0]]


def test_biases_are_added_where_there_is_a_token():
    row = np.array([1.0, 2.0, 3.0], np.float32)
    ids, bias = np.array([[2, 0, -1]], np.int32), np.array([[-INF, 0.5, 9.0]], np.float32)
    assert traced.logit_bias(graph(row), ids, bias).logits.tolist() == [[1.5, 2.0, -INF]]


# Choices


def test_a_draw_is_a_place_in_the_candidates_order():
    row = np.log(np.array([1.0, 2.0, 5.0], np.float32))
    ordered = traced.in_order(graph(row))
    u = [0.0, 0.12, 0.13, 0.37, 0.38, 0.99]
    by_id = [int(traced.draw(graph(row), column(x))[0, 0]) for x in u]
    by_order = [int(traced.draw(ordered, column(x))[0, 0]) for x in u]
    assert by_id == [0, 0, 1, 1, 2, 2]
    assert by_order == [2, 2, 2, 2, 2, 0]


def test_nothing_is_drawn_or_best_where_nothing_is_left():
    nothing = graph(np.full(40, -INF, np.float32))
    too_much = graph(np.array([0.0, INF], np.float32))
    for c in (nothing, too_much):
        assert int(traced.draw(c, column(0.5))[0, 0]) == -1
        assert int(traced.best(c)[0, 0]) == -1


def test_the_best_is_the_first_of_the_highest():
    assert int(traced.best(graph(np.array([1.0, 3.0, 3.0], np.float32)))[0, 0]) == 1
