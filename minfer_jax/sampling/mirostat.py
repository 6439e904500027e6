"""Mirostat (Basu et al. 2021): keeps the surprise of a text near a target by what it truncates."""

from __future__ import annotations

import math

import numpy as np

from minfer_jax.sampling.samplers import Candidates, draw, top_k

_SAMPLE = 100  # likeliest tokens from which version 1 estimates the exponent of Zipf's law


class Mirostat:
    """The choice of a request's tokens; `mu`, in bits, is what it has learned."""

    def __init__(self, version: int, *, tau: float, eta: float) -> None:
        self.version = version
        self.tau = tau
        self.eta = eta
        self.mu = 2.0 * tau

    @property
    def learned(self) -> list[float]:
        """What the next choice depends on beside its candidates."""
        return [self.mu]

    @learned.setter
    def learned(self, values: list[float]) -> None:
        (self.mu,) = values

    def choose(self, c: Candidates, n_vocab: int, u: float) -> int:
        """The id drawn at `u`; `SamplingError` if none is possible."""
        if self.version == 1:
            head = top_k(c, _SAMPLE).weights()
            c = top_k(c, tokens_of_surprise(head, len(c.ids), n_vocab, self.mu))
        else:
            c = up_to_surprise(c, self.mu)
        weights = c.weights()
        index = draw(weights, u)
        surprise = -math.log2(weights[index] / weights.sum())
        self.mu -= self.eta * (surprise - self.tau)
        return int(c.ids[index])


def tokens_of_surprise(head: np.ndarray, n: int, n_vocab: int, mu: float) -> int:
    """Version 1: how many of `n` tokens to keep for an average surprise of `mu` bits, if
    probabilities follow Zipf's law. `head`: the weights of the likeliest, float64 in descending
    order."""
    head = head[head > 0]
    if len(head) < 2:
        return 1
    rank = np.arange(1, len(head), dtype=np.float64)
    steps = np.log((rank + 1) / rank)
    exponent = float(np.dot(steps, np.log(head[:-1]) - np.log(head[1:])) / np.dot(steps, steps))
    epsilon = exponent - 1.0
    # epsilon / (1 - n ** -epsilon), which tends to 1 / ln(n).
    scale = math.log(n_vocab)
    factor = epsilon / -math.expm1(-epsilon * scale) if epsilon else 1.0 / scale
    bits = math.log2(factor) + mu
    if exponent <= 0.0:
        return n if bits > 0 else 1
    # Beyond 2 ** 64 it is more than any vocabulary has.
    return max(1, min(int(2.0 ** min(bits / exponent, 64.0)), n))


def up_to_surprise(c: Candidates, mu: float) -> Candidates:
    """Version 2: the tokens with a surprise of at most `mu` bits, the likeliest at least, in
    descending order."""
    weights = c.weights()
    with np.errstate(divide="ignore"):
        kept = c.keep(-np.log2(weights / weights.sum()) <= mu)
    return kept.sort() if len(kept.ids) else top_k(c, 1)
