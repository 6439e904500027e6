"""What the last batch gave: logits or hidden states of the rows that were asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax import Array


class Outputs:
    """Rows of arrays on the device, by the batch's rows that they belong to."""

    def __init__(self, what: str, width: int, dtype: type = np.float32) -> None:
        """`what` a row is, in words, and its width and type."""
        self.width = width
        self._dtype = dtype
        self.n_batch = 0
        """Rows of the batch, asked for or not."""
        self._what = what
        self._rows: dict[int, tuple[Array | np.ndarray, int]] = {}

    @property
    def index(self) -> list[int]:
        """The batch's rows that were asked for, ascending."""
        return sorted(self._rows)

    def add(self, index: Sequence[int], array: Array | np.ndarray, rows: Sequence[int]) -> None:
        """Rows `rows` of `array` belong to the batch's rows `index`."""
        for i, row in zip(index, rows, strict=True):
            self._rows[i] = (array, row)

    def row(self, i: int) -> np.ndarray:
        """That of the batch's row `i` (negative: from its end): [width].

        Raises `IndexError` if it was not asked for.
        """
        if not -self.n_batch <= i < self.n_batch:
            raise IndexError(f"token {i} is not in the last batch of {self.n_batch}")
        found = self._rows.get(i % self.n_batch)
        if found is None:
            raise IndexError(f"the {self._what} of token {i} were not asked for")
        array, row = found
        return np.asarray(array)[row]

    def all(self) -> np.ndarray:
        """All that were asked for, in the batch's order: [n, width]."""
        # A vocabulary of 262k makes a megabyte a row: no copy beside the result.
        out = np.empty((len(self._rows), self.width), self._dtype)
        for at, i in enumerate(self.index):
            array, row = self._rows[i]
            out[at] = np.asarray(array)[row]
        return out

    def forget(self) -> None:
        """None can be asked for any more."""
        self._rows, self.n_batch = {}, 0
