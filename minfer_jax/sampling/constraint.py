"""What a sampler asks of a grammar: which tokens may come next.

The interface only; `sampling.grammar` implements it. It knows token ids, not text.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Constraint(Protocol):
    """Follows one sequence of tokens, from its first generated one on."""

    def prepare(self) -> None:
        """Begin to compute what `allowed` will return, beside what the caller does next.

        Calling it is optional, and may be repeated.
        """
        ...

    def allowed(self) -> np.ndarray:
        """The tokens that may come next: bool [n_vocab], not to be written to.

        End tokens are among them only where the document can end. May have no True at all:
        nothing can come then, though what has come so far is a valid beginning. SamplingError if
        that cannot be told within the grammar's limits.
        """
        ...

    def accept(self, token: int) -> None:
        """Go on by one token. SamplingError if it is not allowed; nothing has changed then."""
        ...

    @property
    def finished(self) -> bool:
        """Whether the document is complete: nothing may follow but an end token."""
        ...
