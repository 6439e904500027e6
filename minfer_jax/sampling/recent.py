"""The tokens that a request has seen last, its prompt's tail included."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable

_SLACK = 1024


class RecentTokens:
    """The last `keep` tokens, and how often each occurs among the last `window` of them.

    `window` is no more than `keep`. Appending takes the same time however long they are.
    """

    def __init__(self, tokens: Iterable[int], *, keep: int, window: int) -> None:
        self._keep = keep
        self._window = window
        # A slice of an array becomes a numpy array without a Python int for each token.
        self._tokens = array("i", tokens)
        self._trim(keep)
        self.counts: Counter[int] = Counter(self.last(window))

    def append(self, token: int) -> None:
        """Remember one more."""
        self._tokens.append(token)
        if self._window > 0:
            self.counts[token] += 1
            if len(self._tokens) > self._window:
                self._forget(self._tokens[-1 - self._window])
        if len(self._tokens) > self._keep + _SLACK:
            self._trim(self._keep)

    def last(self, n: int) -> array[int]:
        """Up to `n` and `keep` tokens, the oldest first."""
        return self._tokens[max(0, len(self._tokens) - min(n, self._keep)) :]

    def _forget(self, token: int) -> None:
        self.counts[token] -= 1
        if not self.counts[token]:
            del self.counts[token]

    def _trim(self, n: int) -> None:
        del self._tokens[: max(0, len(self._tokens) - n)]
