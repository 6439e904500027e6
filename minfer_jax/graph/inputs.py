"""What a step is fed besides weights and KV: one int32 matrix of rows, and the output rows.

Positions, cells and windows are data. They travel as one array because every argument of an
executable costs call overhead.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jax import Array


class Rows(NamedTuple):
    """The rows of one ubatch, each field int32 [n_tokens]."""

    token: Array
    pos: Array
    cell: Array
    """Where the row's K and V are written; `n_cells` (dropped) for padding."""
    first: Array
    """First cell that the row attends to."""
    last: Array
    """Last cell that the row attends to; -1 for padding, which attends to nothing."""

    @classmethod
    def from_matrix(cls, matrix: Array) -> Rows:
        return cls(*(matrix[i] for i in range(len(cls._fields))))


def rows_matrix(
    n_tokens: int,
    *,
    n_cells: int,
    token: np.ndarray,
    pos: np.ndarray,
    cell: np.ndarray,
    first: np.ndarray,
    last: np.ndarray,
) -> np.ndarray:
    """The int32 matrix [5, n_tokens] of `len(token)` real rows; the rest is padding.

    Always a fresh array: on the CPU a running graph may still see an input that is changed.
    """
    matrix = np.zeros((len(Rows._fields), n_tokens), np.int32)
    matrix[Rows._fields.index("cell")] = n_cells
    matrix[Rows._fields.index("last")] = -1
    matrix[:, : len(token)] = (token, pos, cell, first, last)
    return matrix
