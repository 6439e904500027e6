"""What a step is fed besides weights and regions. Positions, cells and windows are data.

Most of it is one int32 matrix of rows, because every argument of an executable costs call overhead:
what a row is, and behind that what each part of the memory says of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import Array

Input = Any
"""An array: traced within a graph, numpy's when it is called, a shape and type to trace with."""


LOOP_STEPS = 16
"""Steps of a decode loop, at most."""
LOOP_ENDS = 16


class StepInputs(NamedTuple):
    """The arguments of one step."""

    rows: Input
    """int32 [fields, n_tokens]: `Rows`, then the fields of each cache and of the states."""
    out_rows: Input
    """Rows that reach the head: int32 [n_out]."""
    maps: tuple[Input, ...] = ()
    """Of each cache with mapped rows, positions and masks of its cells: int32 [1 + words, cells]"""
    embd: Input | None = None
    """The rows themselves where they are no tokens: float32 [n_tokens, n_embd]."""
    sample: Any = None
    """`SampleInputs` of the `n_out` rows where their tokens are chosen in the graph."""
    loop: LoopInputs | None = None
    """Of a decode loop, whose `rows` and `maps` have an axis of steps in front."""


class LoopInputs(NamedTuple):
    """When a decode loop ends."""

    limit: Input
    """Steps at most: int32 []."""
    ends: Input
    """Tokens that end it: int32 [LOOP_ENDS], filled up with -1."""


class Rows(NamedTuple):
    """What the rows of one ubatch are, each field int32 [n_tokens]."""

    token: Array
    pos: Array
    seq: Array
    """The sequence, as the memory numbers it; -1 for padding."""


class CacheRows(NamedTuple):
    """What a cache of keys and values says of the rows, each field int32 [n_tokens]."""

    cell: Array
    """Where the row's K and V are written; past the last cell (dropped) for padding."""
    first: Array
    """First cell that the row sees, or of mapped rows, that it may see."""
    last: Array
    """Last such cell; -1 for padding, which sees nothing."""


class StateRows(NamedTuple):
    """Where the rows' sequences have their states, each field int32 [n_tokens]."""

    read: Array
    """Past the last slot for a sequence that begins, whose state is zero."""
    written: Array
    """Past the last slot (dropped) for padding."""


def rows_matrix(
    n_tokens: int,
    token: np.ndarray,
    pos: np.ndarray,
    seq: np.ndarray,
    caches: Sequence[tuple[np.ndarray, int]] = (),
    states: tuple[np.ndarray, int] | None = None,
) -> np.ndarray:
    """The matrix of `len(token)` real rows; the rest is padding.

    With each cache's or the states' fields goes its number of cells or slots. Always a fresh array:
    on the CPU a running graph may still see an input that is changed.
    """
    n = len(token)
    n_fields = len(Rows._fields) + sum(len(fields) for fields, _ in caches)
    n_fields += len(states[0]) if states else 0
    matrix = np.zeros((n_fields, n_tokens), np.int32)
    matrix[:2, :n] = token, pos
    matrix[2, :n] = seq
    matrix[2, n:] = -1
    at = len(Rows._fields)
    for fields, n_cells in caches:
        matrix[at : at + 3, :n] = fields
        matrix[at, n:] = n_cells
        matrix[at + 2, n:] = -1
        at += 3
    if states:
        matrix[at : at + 2, :n] = states[0]
        matrix[at : at + 2, n:] = states[1]
    return matrix
