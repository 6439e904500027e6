"""The matrices within a chunk, each against its definition in float64."""

import jax
import numpy as np
import pytest

from minfer_jax.ops.recurrent.chunks import (
    decayed_scores,
    dot,
    join,
    leaf_size,
    lower,
    split,
    unit_lower_inverse,
    with_diagonal,
)

INVERSE = jax.jit(unit_lower_inverse)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("t", [1, 4, 5, 8])
def test_split_fills_up_with_zeros_and_join_undoes_it(t):
    x = normal(2, t, 3, 5)
    chunks = np.asarray(split(x, 4))
    assert chunks.shape == (-(-t // 4), 2, 3, 4, 5)
    np.testing.assert_array_equal(chunks[0, 1, 2, 0], x[1, 0, 2])
    np.testing.assert_array_equal(join(chunks, t), x)
    assert not chunks[-1, :, :, t - 4 * (len(chunks) - 1) :].any()


def test_split_of_one_value_a_head():
    x = normal(2, 6, 3)
    np.testing.assert_array_equal(np.asarray(split(x, 4))[1, :, :, :2], x[:, 4:].swapaxes(1, 2))


def test_triangles():
    x = np.arange(1.0, 10.0, dtype=np.float32).reshape(1, 3, 3)
    np.testing.assert_array_equal(lower(x)[0], [[1, 0, 0], [4, 5, 0], [7, 8, 9]])
    np.testing.assert_array_equal(lower(x, -1)[0], [[0, 0, 0], [4, 0, 0], [7, 8, 0]])
    diagonal = np.array([[[-1.0], [-2.0], [-3.0]]], np.float32)
    np.testing.assert_array_equal(
        with_diagonal(x, diagonal)[0], [[-1, 2, 3], [4, -2, 6], [7, 8, -3]]
    )


def test_dot_is_a_sum_over_the_last_axis():
    x, y = np.float32([[1, 2, 3], [4, 5, 6]]), np.float32([[1, 0, -1], [2, 2, 2]])
    np.testing.assert_array_equal(dot(x, y), [[-2], [30]])


@pytest.mark.parametrize(
    "log_decay_min, rows", [(-np.inf, 1), (-31.0, 1), (-30.0, 2), (-4.0, 8), (-0.6, 32), (0.0, 32)]
)
def test_leaf_size_keeps_a_product_of_decays_above_exp_of_minus_60(log_decay_min, rows):
    assert leaf_size(log_decay_min, 32) == rows


def scores_by_definition(p, q, log_decay):
    c = log_decay.shape[0]
    scores = np.zeros((p.shape[0], q.shape[0], c, c))
    for t in range(c):
        for r in range(t):
            decay = np.exp(log_decay[r + 1 : t].astype(np.float64).sum(axis=0))
            scores[:, :, t, r] = (p[:, None, t] * q[None, :, r] * decay).sum(axis=-1)
    return scores


@pytest.mark.parametrize(
    ("leaf", "strength"),
    [(1, 0.0), (2, 0.0), (16, 0.0), (1, 0.5), (2, 0.5), (8, 0.5), (16, 0.5), (1, 200.0)],
)
def test_decayed_scores(leaf, strength):
    p, q = normal(2, 16, 6), normal(3, 16, 6, seed=1)
    log_decay = -strength * np.abs(normal(16, 6, seed=2))
    decayed = jax.jit(decayed_scores, static_argnums=3)(p, q, log_decay, leaf)
    expected = scores_by_definition(p, q, log_decay)
    np.testing.assert_allclose(decayed.scores, expected, rtol=1e-4, atol=1e-5)
    inclusive = np.cumsum(log_decay.astype(np.float64), axis=0)
    np.testing.assert_allclose(decayed.before, inclusive - log_decay, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(decayed.behind, inclusive[-1] - inclusive, rtol=1e-5, atol=1e-5)


def test_an_infinite_decay_is_a_decay_to_nothing():
    ones = np.ones((1, 4, 1), np.float32)
    log_decay = np.array([[0.0], [-np.inf], [0.0], [-np.inf]], np.float32)
    scores = decayed_scores(ones, ones, log_decay).scores
    np.testing.assert_array_equal(
        scores[0, 0], [[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0]]
    )


@pytest.mark.parametrize("c", [1, 8, 16, 64])
def test_unit_lower_inverse(c):
    x = np.tril(normal(3, 2, c, c) * 0.3, -1)
    expected = np.linalg.inv(np.eye(c) - x.astype(np.float64))
    np.testing.assert_allclose(INVERSE(x), expected, rtol=0, atol=2e-5)


def test_unit_lower_inverse_where_powers_are_huge_and_their_sum_is_not():
    # Equal keys: (I + L)^-1 with ones below the diagonal is 1 there and -1 just below it, while
    # the powers of L reach 10**18.
    x = -np.tril(np.ones((64, 64), np.float32), -1)
    np.testing.assert_array_equal(INVERSE(x), np.eye(64) - np.eye(64, k=-1))
