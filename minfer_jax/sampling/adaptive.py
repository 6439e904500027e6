"""Adaptive-p (llama.cpp, pull request 17927): tokens near a target probability are preferred.

The target moves so that the mean of the probabilities chosen comes near the one asked for.
"""

from __future__ import annotations

import numpy as np

from minfer_jax.sampling.samplers import Candidates, draw

_PEAK = 5.0  # logit of a token at the target
_SHARPNESS = 10.0
_WIDTH = 0.3  # distance from the target at which the fall turns from quadratic to linear


class AdaptiveP:
    """The choice of a request's tokens, and the mean of their probabilities so far."""

    def __init__(self, target: float, decay: float) -> None:
        self.target = target
        self.decay = decay
        self.total_weight = 1.0 / (1.0 - decay)
        self.weighted_sum = target * self.total_weight

    @property
    def learned(self) -> list[float]:
        """What the next choice depends on beside its candidates."""
        return [self.weighted_sum, self.total_weight]

    @learned.setter
    def learned(self, values: list[float]) -> None:
        self.weighted_sum, self.total_weight = values

    @property
    def adapted_target(self) -> float:
        """As far on the other side of the target as the mean is on one."""
        return min(max(2.0 * self.target - self.weighted_sum / self.total_weight, 0.0), 1.0)

    def choose(self, c: Candidates, u: float) -> int:
        """The id drawn at `u`; `SamplingError` if none is possible."""
        probabilities = c.probabilities()
        logits = np.where(
            c.logits > -np.inf, preference(probabilities, self.adapted_target), -np.inf
        )
        index = draw(np.exp(logits - logits.max()), u)
        self.weighted_sum = float(probabilities[index]) + self.decay * self.weighted_sum
        self.total_weight = 1.0 + self.decay * self.total_weight
        return int(c.ids[index])


def preference(probabilities: np.ndarray, target: float) -> np.ndarray:
    """Logits [k], the highest at the target."""
    distance = np.abs(probabilities - np.float32(target)) / np.float32(_WIDTH)
    return _PEAK - _SHARPNESS * distance * distance / (1.0 + distance)
