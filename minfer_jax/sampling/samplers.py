"""Single samplers: candidates in, candidates out. Formulas and edge cases are llama.cpp's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

_HEAD = 256  # candidates that top-p looks at first


@dataclass(frozen=True)
class Candidates:
    """Tokens that may still be chosen. `ids` int32 [k], `logits` float32 [k].

    `ordered` says that the logits descend; until then ids ascend.
    """

    ids: np.ndarray
    logits: np.ndarray
    ordered: bool = False

    @classmethod
    def all(cls, logits: np.ndarray) -> Candidates:
        """The whole vocabulary."""
        return cls(np.arange(len(logits), dtype=np.int32), logits)

    def sort(self) -> Candidates:
        """In descending order of logits, the lowest id first among equals."""
        if self.ordered:
            return self
        order = np.argsort(-self.logits, kind="stable")
        return Candidates(self.ids[order], self.logits[order], ordered=True)

    def keep(self, which: np.ndarray | slice) -> Candidates:
        """Those of a mask or a slice, in the same order."""
        return Candidates(self.ids[which], self.logits[which], self.ordered)

    def weights(self) -> np.ndarray:
        """Probabilities up to a common factor, the highest being 1: float64 [k]."""
        return np.exp(self.logits.astype(np.float64) - self.logits.max())


def penalties(
    c: Candidates, window: Iterable[int], *, repeat: float, frequency: float, presence: float
) -> Candidates:
    """Make tokens of `window` less likely (Keskar et al. 2019; OpenAI's two penalties).

    The candidates are not ordered yet.
    """
    counts = Counter(window)
    tokens = np.fromiter(counts, np.int64, len(counts))
    seen = np.minimum(np.searchsorted(c.ids, tokens), len(c.ids) - 1)
    found = c.ids[seen] == tokens
    seen, times = seen[found], np.fromiter(counts.values(), np.float32, len(counts))[found]
    old = c.logits[seen]
    logits = c.logits.copy()
    with np.errstate(over="ignore"):
        repeated = np.where(old <= 0, old * np.float32(repeat), old / np.float32(repeat))
    logits[seen] = repeated - times * np.float32(frequency) - np.float32(presence)
    return Candidates(c.ids, logits)


def top_k(c: Candidates, k: int) -> Candidates:
    """The k highest logits, in descending order; k <= 0 keeps all as they are."""
    if k <= 0:
        return c
    if k < len(c.ids) and not c.ordered:
        # Partial selection first: sorting a vocabulary of 262k costs 20 ms.
        edge = np.partition(c.logits, -k)[-k]
        c = c.keep(c.logits >= edge)
    return c.sort().keep(slice(k))


def top_p(c: Candidates, p: float) -> Candidates:
    """Nucleus sampling (Holtzman et al. 2020): the smallest head of total probability >= p."""
    if p >= 1.0:
        return c
    scale = c.weights().sum()
    n = _HEAD
    while True:
        head = top_k(c, n)  # ordering a whole vocabulary costs 20 ms, its head almost nothing
        mass = np.cumsum((head.weights() / scale).astype(np.float32))
        reached = mass >= np.float32(p)
        if reached.any():
            return head.keep(slice(int(np.argmax(reached)) + 1))
        if n >= len(c.ids):
            return head
        n *= 8


def min_p(c: Candidates, p: float) -> Candidates:
    """Tokens at least p times as likely as the likeliest one, which always stays."""
    if p <= 0.0:
        return c
    top = c.logits.max()
    return c.keep((c.logits >= top + np.float32(math.log(p))) | (c.logits >= top))


def temperature(c: Candidates, temp: float) -> Candidates:
    """Divide by the temperature; at 0 or below only the first maximum stays possible.

    So it does where float32 has no room for the highest logit divided by the temperature.
    """
    if temp > 0.0:
        with np.errstate(all="ignore"):
            logits = c.logits / np.float32(temp)
        if np.isfinite(logits.max()):
            return Candidates(c.ids, logits, c.ordered)
    logits = np.full_like(c.logits, -np.inf)
    best = int(np.argmax(c.logits))
    logits[best] = c.logits[best]
    return Candidates(c.ids, logits, ordered=False)
