"""Token shift against what it means: the row before, across calls and past padding."""

import numpy as np

from minfer_jax.ops.recurrent.shift import token_shift


def rows(s: int, t: int, c: int = 3) -> np.ndarray:
    return np.arange(1, s * t * c + 1, dtype=np.float32).reshape(s, t, c)


def test_the_row_before_and_the_state_before_the_first():
    x, state = rows(2, 4), -rows(2, 1)[:, 0]
    previous, new = token_shift(x, state, np.ones((2, 4), bool))
    np.testing.assert_array_equal(previous[:, 0], state)
    np.testing.assert_array_equal(previous[:, 1:], x[:, :-1])
    np.testing.assert_array_equal(new, x[:, -1])


def test_the_new_state_is_the_last_real_row():
    x, state = rows(3, 4), -rows(3, 1)[:, 0]
    real = np.arange(4)[None, :] < np.array([[4], [1], [0]])
    _, new = token_shift(x, state, real)
    np.testing.assert_array_equal(new, [x[0, 3], x[1, 0], state[2]])


def test_one_row_a_sequence():
    x, state = rows(2, 1), -rows(2, 1)[:, 0]
    previous, new = token_shift(x, state, np.array([[True], [False]]))
    np.testing.assert_array_equal(previous[:, 0], state)
    np.testing.assert_array_equal(new, [x[0, 0], state[1]])


def test_two_calls_are_as_one():
    x, state = rows(1, 7), -rows(1, 1)[:, 0]
    whole, last = token_shift(x, state, np.ones((1, 7), bool))
    # The first call is padded with rows of the second.
    first, carried = token_shift(x[:, :5], state, np.arange(5)[None, :] < 3)
    second, new = token_shift(x[:, 3:], carried, np.ones((1, 4), bool))
    np.testing.assert_array_equal(np.concatenate([first[:, :3], second], axis=1), whole)
    np.testing.assert_array_equal(new, last)
