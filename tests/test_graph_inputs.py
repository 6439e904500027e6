"""Rows of a step: what real rows say, and what padding says."""

import numpy as np

from minfer_jax.graph.inputs import Rows, rows_matrix


def make(n: int, n_tokens: int) -> np.ndarray:
    pos = np.arange(3, 3 + n, dtype=np.int32)
    return rows_matrix(
        n_tokens, n_cells=256, token=pos + 100, pos=pos, cell=pos, first=pos * 0, last=pos
    )


def test_rows_and_padding():
    rows = Rows(*make(2, 4))
    np.testing.assert_array_equal(rows.token, [103, 104, 0, 0])
    np.testing.assert_array_equal(rows.pos, [3, 4, 0, 0])
    np.testing.assert_array_equal(rows.cell, [3, 4, 256, 256])  # past the end: dropped
    np.testing.assert_array_equal(rows.first, [0, 0, 0, 0])
    np.testing.assert_array_equal(rows.last, [3, 4, -1, -1])  # attends to nothing


def test_matrix_is_fresh_int32():
    first, second = make(2, 4), make(2, 4)
    assert first.dtype == np.int32 and not np.shares_memory(first, second)


def test_fields_come_back_in_order():
    matrix = make(4, 4)
    for row, field in zip(matrix, Rows.from_matrix(matrix), strict=True):
        np.testing.assert_array_equal(row, field)
