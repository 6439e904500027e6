"""`sampling.traced_rows`: blocks change what it costs, not what comes out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax.sampling import traced_rows

INF = np.float32(np.inf)
SIZES = [1, 5, 31, 32, 33, 640, 5003]


def rows(seed, n, m, levels):
    """Logits of which many are equal: [n, m] of `levels` different values, a few of them -inf."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=levels).astype(np.float32)
    values[rng.random(levels) < 0.1] = -INF
    return values[rng.integers(0, levels, (n, m))]


def best_first(values, k):
    return np.argsort(-values, axis=1, kind="stable")[:, :k]


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("levels", [2, 7, 10**6])
def test_the_first_highest_is_numpys_argmax(m, levels):
    values = rows(m, 4, m, levels)
    top, place = jax.jit(traced_rows.first_highest)(values)
    np.testing.assert_array_equal(place[:, 0], values.argmax(axis=1))
    np.testing.assert_array_equal(top[:, 0], values.max(axis=1))


@pytest.mark.parametrize("m", [1, 100, 3000, 4096])
@pytest.mark.parametrize("nan", [np.nan, -np.nan])
def test_a_nan_is_found_wherever_it_stands(m, nan):
    values = rows(m, 8, m, 100)
    has_nan = jax.jit(traced_rows.has_nan)
    assert not has_nan(values).any()
    values[2, m // 2], values[3, 0], values[7, m - 1] = nan, nan, nan
    assert has_nan(values)[:, 0].tolist() == [i in (2, 3, 7) for i in range(8)]


@pytest.mark.parametrize(
    ("m", "k"), [(1, 1), (33, 33), (640, 4), (5003, 5), (5003, 39), (5003, 64)]
)
@pytest.mark.parametrize("levels", [1, 2, 100, 1000, 10**6])
def test_the_highest_come_in_order_the_first_one_first_among_equals(m, k, levels):
    values = rows(m + k + levels, 4, m, levels)
    highest = jax.jit(traced_rows.highest, static_argnums=1)
    got, places = highest(values, k)
    expected = best_first(values, k)
    np.testing.assert_array_equal(places, expected)
    np.testing.assert_array_equal(got, np.take_along_axis(values, expected, 1))


@given(st.lists(st.integers(-2, 2), min_size=200, max_size=200))
@settings(max_examples=100, deadline=None)
def test_equal_maxima_of_many_blocks_go_by_place(levels):
    values = np.repeat(np.array([levels], np.float32), 3, axis=0)
    values = np.concatenate([values, np.roll(values, 7, axis=1)], axis=1)
    _, places = jax.jit(traced_rows.highest, static_argnums=1)(values, 3)
    np.testing.assert_array_equal(places, best_first(values, 3))


@pytest.mark.parametrize("m", [1, 511, 512, 513, 5003])
def test_a_row_sum_rounds_little(m):
    values = np.random.default_rng(m).random((3, m)).astype(np.float32)
    exact = values.sum(axis=1, keepdims=True, dtype=np.float64)
    np.testing.assert_allclose(jax.jit(traced_rows.row_sum)(values), exact, rtol=1e-6)


@pytest.mark.parametrize("m", [1, 7, 1024, 1025, 20000])
def test_inverted_finds_the_place_that_holds_each_part_of_the_mass(m):
    rng = np.random.default_rng(m)
    row = (rng.random(m) * (rng.random(m) < 0.7)).astype(np.float32)
    row[m // 2] = 1.0
    mass = np.cumsum(row, dtype=np.float64) / row.sum(dtype=np.float64)
    wanted = rng.permutation(np.flatnonzero(row))[:200]
    middle = (mass - row / (2 * row.sum(dtype=np.float64)))[wanted]
    sure = row[wanted] / row.sum() > 1e-5
    got = jax.jit(traced_rows.inverted)(
        np.tile(row, (len(wanted), 1)), middle.astype(np.float32)[:, None]
    )
    np.testing.assert_array_equal(got[sure, 0], wanted[sure])
    assert sure.mean() > 0.5
    assert (row[got[:, 0]] > 0).all()


@pytest.mark.parametrize("m", [8, 1500])
@pytest.mark.parametrize("place", [0, 3, -1])
def test_inverted_never_finds_a_place_without_weight(m, place):
    row = np.zeros((2, m), np.float32)
    row[:, place] = 0.3
    u = np.array([[0.0], [1 - 2.0**-24]], np.float32)
    got = jax.jit(traced_rows.inverted)(row, u)
    assert got[:, 0].tolist() == [place % m] * 2


@pytest.mark.parametrize("m", [700, 1500])
def test_inverted_finds_weight_at_any_edge(m):
    rng = np.random.default_rng(m)
    rows = (rng.random((2000, m)) * (rng.random((2000, m)) < 0.1)).astype(np.float32)
    mass = np.cumsum(rows, axis=1, dtype=np.float64)
    mass /= mass[:, -1:]
    u = np.minimum(mass[np.arange(2000), rng.integers(0, m, 2000)], 1 - 2.0**-24)
    got = jax.jit(traced_rows.inverted)(rows, u.astype(np.float32)[:, None])
    assert (rows[np.arange(2000), got[:, 0]] > 0).all()


def test_inverted_at_an_edge_belongs_to_the_next():
    row = np.array([[1, 1, 0, 2]] * 5, np.float32)
    u = np.array([[0.0], [0.24], [0.25], [0.5], [0.75]], np.float32)
    assert traced_rows.inverted(jnp.asarray(row), jnp.asarray(u))[:, 0].tolist() == [0, 0, 1, 3, 3]
