"""Rows of a step: what real rows say, and what padding says."""

import numpy as np

from minfer_jax.graph.inputs import CacheRows, Rows, StateRows, rows_matrix


def make(n: int, n_tokens: int) -> np.ndarray:
    pos = np.arange(3, 3 + n, dtype=np.int32)
    cache = np.stack([pos, pos * 0 + 1, pos])
    other = np.stack([pos + 10, pos * 0, pos + 20])
    states = np.stack([pos * 0 + 7, pos * 0 + 2])
    return rows_matrix(n_tokens, pos + 100, pos, pos % 2, [(cache, 256), (other, 512)], (states, 6))


def test_rows_and_padding():
    matrix = make(2, 4)
    assert matrix.shape == (3 + 3 + 3 + 2, 4)
    rows = Rows(*matrix[:3])
    np.testing.assert_array_equal(rows.token, [103, 104, 0, 0])
    np.testing.assert_array_equal(rows.pos, [3, 4, 0, 0])
    np.testing.assert_array_equal(rows.seq, [1, 0, -1, -1])
    cache = CacheRows(*matrix[3:6])
    np.testing.assert_array_equal(cache.cell, [3, 4, 256, 256])  # past the end: dropped
    np.testing.assert_array_equal(cache.first, [1, 1, 0, 0])
    np.testing.assert_array_equal(cache.last, [3, 4, -1, -1])  # attends to nothing
    other = CacheRows(*matrix[6:9])
    np.testing.assert_array_equal(other.cell, [13, 14, 512, 512])
    np.testing.assert_array_equal(other.last, [23, 24, -1, -1])
    states = StateRows(*matrix[9:])
    np.testing.assert_array_equal(states.read, [7, 7, 6, 6])  # zeros
    np.testing.assert_array_equal(states.written, [2, 2, 6, 6])  # dropped


def test_a_memory_may_have_no_parts():
    pos = np.arange(2, dtype=np.int32)
    np.testing.assert_array_equal(
        rows_matrix(3, pos + 5, pos, pos * 0), [[5, 6, 0], [0, 1, 0], [0, 0, -1]]
    )


def test_matrix_is_fresh_int32():
    first, second = make(2, 4), make(2, 4)
    assert first.dtype == np.int32 and not np.shares_memory(first, second)
