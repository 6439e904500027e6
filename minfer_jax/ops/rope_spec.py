"""How a model rotates queries and keys: frequencies with linear and YaRN scaling, without jax."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """How a model rotates its queries and keys. All fields are topology: fixed for a model."""

    style: Literal["interleaved", "half"]
    """Which components make a pair: neighbours (2i, 2i+1), or (i, i + n_rot/2)."""
    n_rot: int
    """Components that rotate; those of a head beyond them pass through."""
    freq_base: float = 10000.0
    freq_scale: float = 1.0
    """1 / (context extension factor)."""
    yarn: bool = False
    """Blend scaled and unscaled frequencies (YaRN) rather than scale all of them."""
    n_ctx_orig: int = 0
    """The context the model was trained for before the extension (YaRN)."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attn_factor: float = 1.0
    """Extra magnitude of the rotated vectors."""

    def frequencies(self) -> np.ndarray:
        """Radians per position of each pair: float64 [n_rot / 2]."""
        pair = np.arange(self.n_rot // 2, dtype=np.float64)
        freq = self.freq_base ** (-2.0 * pair / self.n_rot)
        if not self.yarn:
            return freq * self.freq_scale
        low, high = self._correction_range()
        ramp = 1.0 - np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0)
        return freq * (self.freq_scale * (1.0 - ramp) + ramp)

    def magnitude(self) -> float:
        """The factor on cosine and sine: YaRN's attention temperature, sqrt(1/t) in the paper."""
        if not self.yarn:
            return self.attn_factor
        return self.attn_factor * (1.0 + 0.1 * math.log(1.0 / self.freq_scale))

    def _correction_range(self) -> tuple[float, float]:
        """The pairs between which YaRN's ramp runs: those that turn beta times in n_ctx_orig."""

        def pair_turning(times: float) -> float:
            turns = self.n_ctx_orig / (times * 2.0 * math.pi)
            return self.n_rot * math.log(turns) / (2.0 * math.log(self.freq_base))

        low = math.floor(pair_turning(self.beta_fast))
        high = math.ceil(pair_turning(self.beta_slow))
        return max(0.0, low), min(self.n_rot - 1.0, high)
