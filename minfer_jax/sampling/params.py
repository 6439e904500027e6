"""What a request may ask of the sampler, checked once."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from minfer_jax.errors import UsageError
from minfer_jax.sampling.order import DEFAULT_SAMPLERS, checked_order

RANDOM_SEED = -1
_SEEDS = 1 << 64
_INT32 = 1 << 31
_MAX_BIAS = 1e30
_LEAVING = ("top_n_sigma", "top_k", "top_p", "min_p")
"""Samplers that never remove the likeliest token."""


def draw_seed() -> int:
    """A fresh seed of 64 random bits."""
    return secrets.randbits(64)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, with llama.cpp's meanings and defaults. All are data.

    Numbers of any library are taken and kept as Python's. Raises `UsageError` for a value out of
    range, `nan` and other types included.
    """

    seed: int = 42
    """0 to 2**64 - 1, or -1 for one drawn at random, which `Sampler.seed` then tells."""
    temp: float = 0.8
    """0 or less takes the highest logit, the lowest id among equals."""
    dynatemp_range: float = 0.0
    """The temperature moves by up to so much up and down with the distribution's entropy; 0 is
    off."""
    dynatemp_exponent: float = 1.0
    """The power of the relative entropy that decides where in that range."""
    top_k: int = 40
    """Keep the k highest; 0 or less keeps all."""
    top_p: float = 0.95
    """Keep the most likely whose probabilities reach p together; 1 or more keeps all."""
    min_p: float = 0.05
    """Keep those at least p times as likely as the most likely; 0 keeps all."""
    typical_p: float = 1.0
    """Keep the most typical whose probabilities exceed p together; 1 or more keeps all."""
    top_n_sigma: float = -1.0
    """Keep logits within so many standard deviations of the highest; 0 or less keeps all."""
    xtc_probability: float = 0.0
    """How often all but the least likely of the tokens above the threshold are removed."""
    xtc_threshold: float = 0.1
    """A probability; above 0.5 is off."""
    mirostat: int = 0
    """1 or 2: keep a text's surprise near `mirostat_tau`. Logit biases and the temperature are all
    that runs beside it."""
    mirostat_tau: float = 5.0
    """Bits a token."""
    mirostat_eta: float = 0.1
    """How fast it learns."""
    adaptive_target: float = -1.0
    """Prefer tokens near this probability, if `adaptive_p` is among the samplers; below 0 is
    off."""
    adaptive_decay: float = 0.9
    """Weight of the past in the mean of the probabilities chosen, 0 to 0.99."""
    repeat_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the window; 1 is off."""
    repeat_last_n: int = 64
    """Window of the three penalties in tokens, the prompt's tail included; -1: all, 0: off."""
    frequency_penalty: float = 0.0
    """Subtracted for each occurrence in the window."""
    presence_penalty: float = 0.0
    """Subtracted once if the token occurs in the window."""
    dry_multiplier: float = 0.0
    """Times base ** (n - allowed length): what is subtracted from a token that would make a
    repetition of n tokens longer. 0 is off."""
    dry_base: float = 1.75
    """Below 1 is off."""
    dry_allowed_length: int = 2
    """Shorter repetitions are free."""
    dry_penalty_last_n: int = 64
    """Tokens, the prompt's tail included, in which repetitions are sought; -1: all, 0: off."""
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    """No repetition goes across these texts; of each the first 40 bytes count."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs (or a mapping) of token ids and what is added to their logits; -inf rules one out."""
    ignore_eos: bool = False
    """Rule out every token that ends a text."""
    min_keep: int = 0
    """`top_p`, `min_p`, `typical_p` and `xtc` leave at least so many."""
    samplers: tuple[str, ...] = DEFAULT_SAMPLERS
    """Those that run, in this order; one that is not listed has no effect. `adaptive_p` runs last
    wherever it stands, because it chooses."""

    def __post_init__(self) -> None:
        self._integer("seed", -1, _SEEDS - 1)
        self._integer("top_k", -_INT32, _INT32 - 1)
        self._integer("mirostat", 0, 2)
        self._integer("repeat_last_n", -1, _INT32 - 1)
        self._integer("dry_allowed_length", 0, _INT32 - 1)
        self._integer("dry_penalty_last_n", -1, _INT32 - 1)
        self._integer("min_keep", 0, _INT32 - 1)
        self._real("temp", -1e6, 1e6)
        self._real("top_n_sigma", -1e6, 1e6)
        for name in ("dynatemp_range", "dynatemp_exponent", "top_p", "min_p", "typical_p"):
            self._real(name, 0.0, 1e6)
        self._real("xtc_probability", 0.0, 1.0)
        self._real("xtc_threshold", 0.0, 1.0)
        self._real("mirostat_tau", 0.0, 1e6)
        self._real("mirostat_eta", 0.0, 1e6)
        self._real("adaptive_target", -1e6, 1.0)
        self._real("adaptive_decay", 0.0, 0.99)
        self._real("repeat_penalty", 1e-6, 1e6)
        self._real("frequency_penalty", -1e6, 1e6)
        self._real("presence_penalty", -1e6, 1e6)
        self._real("dry_multiplier", 0.0, 1e6)
        self._real("dry_base", 0.0, 1e6)
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore_eos is {self.ignore_eos!r}; allowed: true, false")
        self._set("logit_bias", _biases(self.logit_bias))
        self._set("dry_sequence_breakers", _breakers(self.dry_sequence_breakers))
        self._set("samplers", checked_order(_texts("samplers", self.samplers)))

    @property
    def greedy(self) -> bool:
        """Whether the highest of the logits that `steps` leaves is taken, without a draw."""
        if self.mirostat:
            return self.temp <= 0.0
        return self.temp <= 0.0 and self.dynatemp_range == 0.0 and "temperature" in self.samplers

    @property
    def steps(self) -> tuple[str, ...]:
        """What runs, in its order, without all that is off.

        Beside the names of samplers: `logit_bias` first, `dynamic_temperature` for a temperature
        with a range, `mirostat` last. If `greedy`, only what can change which logit is the highest.
        """
        biased = ("logit_bias",) if self.logit_bias or self.ignore_eos else ()
        if self.mirostat:
            heated = ("temperature",) if self.temp != 1.0 else ()
            return biased if self.greedy else (*biased, *heated, "mirostat")
        on = [name for name in self.samplers if self._is_on(name)]
        if self.greedy:
            del on[on.index("temperature") :]
            while on and on[-1] in _LEAVING:
                on.pop()
        elif self.dynatemp_range > 0.0:
            on = ["dynamic_temperature" if name == "temperature" else name for name in on]
        on.sort(key=lambda name: name == "adaptive_p")
        return (*biased, *on)

    def _is_on(self, name: str) -> bool:
        match name:
            case "penalties":
                penalties = (self.repeat_penalty, self.frequency_penalty, self.presence_penalty)
                return self.repeat_last_n != 0 and penalties != (1.0, 0.0, 0.0)
            case "dry":
                on = self.dry_multiplier > 0.0 and self.dry_base >= 1.0
                return on and self.dry_penalty_last_n != 0
            case "top_n_sigma":
                return self.top_n_sigma > 0.0
            case "top_k":
                return self.top_k > 0
            case "typ_p":
                return self.typical_p < 1.0
            case "top_p":
                return self.top_p < 1.0
            case "min_p":
                return self.min_p > 0.0
            case "xtc":
                return self.xtc_probability > 0.0 and self.xtc_threshold <= 0.5
            case "temperature":
                return self.temp != 1.0 or self.dynatemp_range > 0.0
            case "adaptive_p":
                return self.adaptive_target >= 0.0
        return True

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _integer(self, name: str, low: int, high: int) -> None:
        value: Any = getattr(self, name)
        if not _is_a(value, Integral) or not low <= value <= high:
            raise UsageError(f"{name} is {value!r}; allowed: integers from {low} to {high}")
        self._set(name, int(value))

    def _real(self, name: str, low: float, high: float) -> None:
        value: Any = getattr(self, name)
        if not _is_a(value, Real) or not low <= value <= high:
            raise UsageError(f"{name} is {value!r}; allowed: numbers from {low:g} to {high:g}")
        self._set(name, float(value))


def _is_a(value: Any, kind: type) -> bool:
    """Whether `value` is a number of `kind`; a bool is none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _texts(name: str, values: Any) -> tuple[str, ...]:
    """A sequence of texts; a single text is none."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise UsageError(f"{name} is {values!r}; allowed: a list of texts")
    texts = tuple(values)
    for text in texts:
        if not isinstance(text, str):
            raise UsageError(f"{name} has {text!r}; allowed: texts")
    return texts


_MAX_BREAKERS = 64


def _breakers(values: Any) -> tuple[str, ...]:
    texts = _texts("dry_sequence_breakers", values)
    if len(texts) > _MAX_BREAKERS:
        raise UsageError(f"dry_sequence_breakers has {len(texts)} texts; allowed: {_MAX_BREAKERS}")
    for text in texts:
        if not text or any("\ud800" <= char <= "\udfff" for char in text):
            raise UsageError(
                f"dry_sequence_breakers has {text!r}; allowed: texts, none of them empty"
            )
    return texts


def _biases(values: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of ids and biases, from pairs or a mapping."""
    pairs = values.items() if isinstance(values, Mapping) else values
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        raise UsageError(f"logit_bias is {values!r}; allowed: pairs of a token id and a number")
    return tuple(_bias(pair) for pair in pairs)


def _bias(pair: Any) -> tuple[int, float]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise UsageError(f"logit_bias has {pair!r}; allowed: pairs of a token id and a number")
    token, bias = pair
    if not _is_a(token, Integral) or not 0 <= token < _INT32:
        raise UsageError(f"logit_bias has token {token!r}; allowed: ids of the vocabulary")
    if not _is_a(bias, Real) or not (abs(bias) <= _MAX_BIAS or bias == -float("inf")):
        raise UsageError(
            f"logit_bias of token {token} is {bias!r};"
            f" allowed: numbers from {-_MAX_BIAS:g} to {_MAX_BIAS:g}, and -inf"
        )
    return int(token), float(bias)
