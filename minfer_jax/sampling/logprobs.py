"""What the model thought of a token that was chosen, and of the ones it likes best.

Of the raw logits: no sampler, penalty or grammar has touched them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from minfer_jax.errors import UsageError
from minfer_jax.sampling.samplers import Candidates, top_k

MAX_LOGPROBS = 1024


class TopLogprob(NamedTuple):
    """One of the likeliest tokens."""

    id: int
    text: str
    logprob: float


@dataclass(frozen=True)
class TokenLogprobs:
    """A generated token with the logarithm of its probability."""

    id: int
    text: str
    """U+FFFD stands for bytes that are only a part of a character."""
    logprob: float
    """-inf only where another logit was +inf."""
    top: list[TopLogprob]
    """The n likeliest in descending order, lowest id first among equals; then the chosen one, if it
    is none of them."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no -inf: None stands for it."""
        top = [{"id": i, "text": text, "logprob": _json(value)} for i, text, value in self.top]
        return {"id": self.id, "text": self.text, "logprob": _json(self.logprob), "top": top}


def checked_logprobs(n: Any) -> int | None:
    """How many to report with each token, None for no report; `UsageError` if out of range."""
    if n is None:
        return None
    number = int(n) if isinstance(n, Integral) and not isinstance(n, bool) else -1
    if not 0 <= number <= MAX_LOGPROBS:
        raise UsageError(f"logprobs is {n!r}; allowed: integers from 0 to {MAX_LOGPROBS}")
    return number


def token_logprobs(
    logits: np.ndarray, token: int, n: int, text: Callable[[int], str]
) -> TokenLogprobs:
    """The log-softmax of raw `logits`, float32 [n_vocab], at `token` and at the `n` highest.

    Infinite logits share all of the probability, as in `Sampler`. `text` spells an id.
    """
    if np.isposinf(logits.max()):
        logits = np.where(np.isposinf(logits), np.float32(0.0), np.float32(-np.inf))
    likeliest = top_k(Candidates.all(logits), n).ids if n else np.empty(0, np.int32)
    shown = [*likeliest.tolist(), *([] if token in likeliest else [token])]
    values = logits.astype(np.float64) - logits.max()
    found = (values[shown] - np.log(np.exp(values).sum())).tolist()
    top = [TopLogprob(i, text(i), value) for i, value in zip(shown, found, strict=True)]
    chosen = top[shown.index(token)]
    return TokenLogprobs(*chosen, top)


def _json(logprob: float) -> float | None:
    return None if logprob == -np.inf else round(logprob, 6)
