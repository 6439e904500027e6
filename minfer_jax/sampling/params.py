"""What a request may ask of the sampler, checked once."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from minfer_jax.errors import UsageError

RANDOM_SEED = -1
_SEEDS = 1 << 64


def draw_seed() -> int:
    """A fresh seed of 64 random bits."""
    return secrets.randbits(64)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, with llama.cpp's meanings. All are data.

    Numbers of any library are taken and kept as Python's. Raises `UsageError` for a value out of
    range, `nan` and other types included.
    """

    seed: int = 42
    """0 to 2**64 - 1, or -1 for one drawn at random, which `Sampler.seed` then tells."""
    temp: float = 0.8
    """0 or less takes the highest logit, the lowest id among equals."""
    top_k: int = 40
    """Keep the k highest; 0 or less keeps all."""
    top_p: float = 0.95
    """Keep the most likely whose probabilities reach p together; 1 or more keeps all."""
    min_p: float = 0.05
    """Keep those at least p times as likely as the most likely; 0 keeps all."""
    repeat_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the window; 1 is off."""
    repeat_last_n: int = 64
    """Window of the three penalties in tokens, the prompt's tail included; -1: all, 0: off."""
    frequency_penalty: float = 0.0
    """Subtracted for each occurrence in the window."""
    presence_penalty: float = 0.0
    """Subtracted once if the token occurs in the window."""

    def __post_init__(self) -> None:
        self._integer("seed", -1, _SEEDS - 1)
        self._integer("top_k", -(1 << 31), (1 << 31) - 1)
        self._integer("repeat_last_n", -1, (1 << 31) - 1)
        self._real("temp", -1e6, 1e6)
        self._real("top_p", 0.0, 1e6)
        self._real("min_p", 0.0, 1e6)
        self._real("repeat_penalty", 1e-6, 1e6)
        self._real("frequency_penalty", -1e6, 1e6)
        self._real("presence_penalty", -1e6, 1e6)

    @property
    def penalizes(self) -> bool:
        """Whether any penalty does anything."""
        off = (1.0, 0.0, 0.0)
        penalties = (self.repeat_penalty, self.frequency_penalty, self.presence_penalty)
        return self.repeat_last_n != 0 and penalties != off

    def _integer(self, name: str, low: int, high: int) -> None:
        value: Any = getattr(self, name)
        if not _is_a(value, Integral) or not low <= value <= high:
            raise UsageError(f"{name} is {value!r}; allowed: integers from {low} to {high}")
        object.__setattr__(self, name, int(value))

    def _real(self, name: str, low: float, high: float) -> None:
        value: Any = getattr(self, name)
        if not _is_a(value, Real) or not low <= value <= high:
            raise UsageError(f"{name} is {value!r}; allowed: numbers from {low:g} to {high:g}")
        object.__setattr__(self, name, float(value))


def _is_a(value: Any, kind: type) -> bool:
    """Whether `value` is a number of `kind`; a bool is none."""
    return isinstance(value, kind) and not isinstance(value, bool)
