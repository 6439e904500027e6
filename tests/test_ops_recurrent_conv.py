"""The short causal convolution: against a loop over its definition, cut and padded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.ops.recurrent.conv import causal_conv

CONV = jax.jit(causal_conv)


def random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def loop(
    x: np.ndarray, state: np.ndarray, weight: np.ndarray, bias: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """One sequence, row by row, in float64: (y [t, c], new state [k-1, c])."""
    k = weight.shape[1]
    past = [row.astype(np.float64) for row in state]
    out = []
    for row in x:
        past.append(row.astype(np.float64))
        y = sum(past[j - k] * weight[:, j] for j in range(k))
        out.append(y if bias is None else y + bias)
    return np.stack(out), np.stack(past[len(past) - (k - 1) :])


def all_real(x: np.ndarray) -> np.ndarray:
    return np.ones(x.shape[:2], bool)


def test_by_hand():
    x = np.array([[[1.0], [10.0], [100.0]]], np.float32)
    state = np.array([[[7.0], [5.0]]], np.float32)
    weight = np.array([[2.0, 3.0, 4.0]], np.float32)
    y, new = CONV(x, state, weight, np.array([0.5], np.float32), all_real(x))
    np.testing.assert_array_equal(y[0, :, 0], [14 + 15 + 4.5, 10 + 3 + 40.5, 2 + 30 + 400.5])
    np.testing.assert_array_equal(new[0, :, 0], [10, 100])


@pytest.mark.parametrize("t", [1, 2, 31, 33, 64, 100])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_two_sequences_without_bias(t, k):
    rng = np.random.default_rng(t)
    x, state, weight = random(rng, 2, t, 5), random(rng, 2, k - 1, 5), random(rng, 5, k)
    y, new = CONV(x, state, weight, None, all_real(x))
    for i in range(2):
        want, want_new = loop(x[i], state[i], weight, None)
        np.testing.assert_allclose(y[i], want, atol=1e-5)
        np.testing.assert_array_equal(new[i], want_new.astype(np.float32))


@pytest.mark.parametrize("n_real", [0, 1, 2, 3, 7, 8])
def test_the_state_is_the_last_inputs_before_the_padding(n_real):
    rng = np.random.default_rng(n_real)
    x, state, weight = random(rng, 1, 8, 5), random(rng, 1, 3, 5), random(rng, 5, 4)
    x[:, n_real:] = np.nan
    real = np.arange(8)[None, :] < n_real
    y, new = CONV(x, state, weight, None, real)
    np.testing.assert_array_equal(
        new[0], np.concatenate([state[0], x[0, :n_real]])[n_real : n_real + 3]
    )
    if n_real:
        np.testing.assert_allclose(
            y[0, :n_real], loop(x[0, :n_real], state[0], weight, None)[0], atol=1e-5
        )


def test_sequences_of_one_row_keep_their_state_where_it_is_padding():
    rng = np.random.default_rng(0)
    x, state, weight = random(rng, 3, 1, 5), random(rng, 3, 3, 5), random(rng, 5, 4)
    _, new = CONV(x, state, weight, None, np.array([[True], [False], [True]]))
    np.testing.assert_array_equal(new[1], state[1])
    np.testing.assert_array_equal(new[2], np.concatenate([state[2, 1:], x[2]]))


@pytest.mark.parametrize("cut", range(1, 8))
def test_cut_in_two_calls(cut):
    rng = np.random.default_rng(cut)
    x, state, weight, bias = random(rng, 2, 8, 5), random(rng, 2, 3, 5), random(rng, 5, 4), None
    whole, end = CONV(x, state, weight, bias, all_real(x))
    first, middle = CONV(x[:, :cut], state, weight, bias, all_real(x[:, :cut]))
    second, last = CONV(x[:, cut:], middle, weight, bias, all_real(x[:, cut:]))
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), whole, atol=1e-6)
    np.testing.assert_array_equal(last, end)
