"""Single samplers: candidates in, candidates out. Formulas and edge cases are llama.cpp's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from minfer_jax.errors import SamplingError

_HEAD = 256  # candidates that top-p looks at first
_LONG = 4096  # from so many on, sorting integers is faster than a stable argsort


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
        order = stable_order(-self.logits)
        return Candidates(self.ids[order], self.logits[order], ordered=True)

    def by_id(self) -> Candidates:
        """In ascending order of ids."""
        if not self.ordered:
            return self
        order = np.argsort(self.ids)
        return Candidates(self.ids[order], self.logits[order])

    def keep(self, which: np.ndarray | slice) -> Candidates:
        """Those of a mask, a slice or ascending indices, in the same order."""
        return Candidates(self.ids[which], self.logits[which], self.ordered)

    def weights(self) -> np.ndarray:
        """Probabilities up to a common factor, the highest being 1: float64 [k].

        Raises `SamplingError` if no candidate is possible.
        """
        top = self.logits.max()
        if not math.isfinite(top):
            raise SamplingError(f"no token is possible: the highest logit is {top}")
        return np.exp(self.logits.astype(np.float64) - top)

    def probabilities(self) -> np.ndarray:
        """float32 [k]. Raises `SamplingError` if no candidate is possible."""
        weights = self.weights()
        return (weights / weights.sum()).astype(np.float32)


def draw(weights: np.ndarray, u: float) -> int:
    """The index at which the cumulative sum of `weights` [k] exceeds the part `u` of their sum.

    `u` is in [0, 1); the sum is positive.
    """
    cumulative = np.cumsum(weights, dtype=np.float64)
    return int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))


def add(c: Candidates, values: Mapping[int, float]) -> Candidates:
    """Add to the logits of tokens, those that are candidates."""
    c, at, found = _find(c, np.fromiter(values, np.int64, len(values)))
    logits = c.logits.copy()
    with np.errstate(over="ignore"):
        logits[at] += np.fromiter(values.values(), np.float64, len(values))[found].astype(
            np.float32
        )
    return Candidates(c.ids, logits)


def penalties(
    c: Candidates, counts: Mapping[int, int], *, repeat: float, frequency: float, presence: float
) -> Candidates:
    """Make tokens less likely that have occurred: `counts` tells how often (Keskar et al. 2019;
    OpenAI's two penalties)."""
    c, at, found = _find(c, np.fromiter(counts, np.int64, len(counts)))
    times = np.fromiter(counts.values(), np.float32, len(counts))[found]
    old = c.logits[at]
    logits = c.logits.copy()
    with np.errstate(over="ignore"):
        repeated = np.where(old <= 0, old * np.float32(repeat), old / np.float32(repeat))
    logits[at] = repeated - times * np.float32(frequency) - np.float32(presence)
    return Candidates(c.ids, logits)


def _find(c: Candidates, tokens: np.ndarray) -> tuple[Candidates, np.ndarray, np.ndarray]:
    """The candidates by id, where in them those of `tokens` are that are there, and which are."""
    c = c.by_id()
    at = np.minimum(np.searchsorted(c.ids, tokens), len(c.ids) - 1)
    found = c.ids[at] == tokens
    return c, at[found], found


def top_k(c: Candidates, k: int) -> Candidates:
    """The k highest logits, in descending order; k <= 0 keeps all as they are."""
    if k <= 0:
        return c
    if k < len(c.ids) and not c.ordered:
        # Partial selection first: sorting a vocabulary of 262k costs milliseconds.
        c = c.keep(_highest(c.logits, k))
    return c.sort().keep(slice(k))


def _highest(logits: np.ndarray, k: int) -> np.ndarray:
    """Where the k highest of more logits are, the first among equals, in ascending order."""
    if logits.min() == -np.inf:
        # Selection is slow among equals, and a grammar leaves many of these.
        possible = np.flatnonzero(logits > -np.inf)
        if len(possible) > k:
            return possible[_highest(logits[possible], k)]
        ruled_out = np.flatnonzero(logits == -np.inf)
        return np.sort(np.concatenate([possible, ruled_out[: k - len(possible)]]))
    edge = np.partition(logits, -k)[-k]
    at = np.flatnonzero(logits >= edge)
    if len(at) > k:
        at = np.delete(at, np.flatnonzero(logits[at] == edge)[k - len(at) :])
    return at


def stable_order(values: np.ndarray) -> np.ndarray:
    """Indices that sort float32 `values` [k], none of them NaN; the first comes first of equals."""
    if len(values) < _LONG:
        return np.argsort(values, kind="stable")
    # As int32, positive floats are in their own order and negative ones in the reverse; adding 0
    # makes one of the two zeros. The index below makes equals differ.
    bits = (values + np.float32(0.0)).view(np.int32)
    keys = (bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))).astype(np.int64) << 32
    return np.sort(keys | np.arange(len(keys))) & 0xFFFFFFFF


def top_p(c: Candidates, p: float, min_keep: int = 0) -> Candidates:
    """Nucleus sampling (Holtzman et al. 2020): the smallest head of total probability >= p."""
    if p >= 1.0:
        return c
    scale = c.weights().sum()
    n = max(_HEAD, min_keep)
    while True:
        head = top_k(c, n)  # ordering a whole vocabulary costs milliseconds, its head nothing
        mass = np.cumsum((head.weights() / scale).astype(np.float32))
        reached = mass >= np.float32(p)
        if reached.any():
            return head.keep(slice(max(int(np.argmax(reached)) + 1, min_keep)))
        if n >= len(c.ids):
            return head
        n *= 8


def min_p(c: Candidates, p: float, min_keep: int = 0) -> Candidates:
    """Tokens at least p times as likely as the likeliest one, which always stays."""
    if p <= 0.0:
        return c
    top = c.logits.max()
    kept = c.keep((c.logits >= top + np.float32(math.log(p))) | (c.logits >= top))
    return kept if len(kept.ids) >= min_keep else top_k(c, min_keep)


def typical(c: Candidates, p: float, min_keep: int = 0) -> Candidates:
    """Locally typical sampling (Meister et al. 2022): those whose surprise is nearest to the
    entropy, as many as it takes for a total probability > p."""
    if p >= 1.0:
        return c
    probabilities = c.probabilities()
    surprise = _surprise(probabilities)
    distance = np.abs(surprise - _entropy(probabilities, surprise))
    order = stable_order(distance.astype(np.float32))
    reached = np.cumsum(probabilities[order]) > np.float32(p)
    n = int(np.argmax(reached)) + 1 if reached.any() else len(order)
    kept = np.zeros(len(order), bool)
    kept[order[: max(n, min_keep)]] = True
    return c.keep(kept)


def top_n_sigma(c: Candidates, n: float) -> Candidates:
    """Rule out logits more than n standard deviations below the highest (Tang et al. 2024).

    Those ruled out already do not count.
    """
    possible = c.logits if c.logits.min() > -np.inf else c.logits[c.logits > -np.inf]
    if n <= 0.0 or len(possible) < 2:
        return c
    edge = np.float32(float(possible.max()) - n * float(possible.std(dtype=np.float64)))
    return Candidates(c.ids, np.where(c.logits < edge, np.float32(-np.inf), c.logits), c.ordered)


def xtc(c: Candidates, threshold: float, min_keep: int = 0) -> Candidates:
    """Exclude top choices: of those with at least the threshold's probability, only the least
    likely stays (github.com/oobabooga/text-generation-webui, pull request 6335)."""
    probabilities = c.probabilities()
    above = np.flatnonzero((probabilities >= np.float32(threshold)) & (c.logits > -np.inf))
    excluded = len(above) - 1
    if excluded < 1 or len(c.ids) - excluded < min_keep:
        return c
    kept = np.ones(len(c.ids), bool)
    kept[above] = False
    lowest = c.logits[above] == c.logits[above].min()
    kept[above[lowest][-1]] = True
    return c.keep(kept)


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
    return Candidates(c.ids, logits, c.ordered)


def dynamic_temperature(c: Candidates, temp: float, spread: float, exponent: float) -> Candidates:
    """A temperature within `spread` of `temp`: the higher, the nearer the entropy is to the most
    that so many candidates can have (Kalomaze 2023)."""
    if len(c.ids) < 2:
        return c
    probabilities = c.probabilities()
    entropy = _entropy(probabilities, _surprise(probabilities)) / math.log(len(c.ids))
    low, high = max(0.0, temp - spread), temp + spread
    return temperature(c, low + (high - low) * entropy**exponent)


def _surprise(probabilities: np.ndarray) -> np.ndarray:
    """Nats, float64 [k]; infinite where a probability is 0."""
    with np.errstate(divide="ignore"):
        return -np.log(probabilities.astype(np.float64))


def _entropy(probabilities: np.ndarray, surprise: np.ndarray) -> float:
    """Nats."""
    possible = probabilities > 0
    return float(np.dot(probabilities[possible], surprise[possible]))
