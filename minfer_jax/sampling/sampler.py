"""The chain of one request, with its window of recent tokens and its stream of random numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from minfer_jax.errors import SamplingError
from minfer_jax.sampling import samplers
from minfer_jax.sampling.params import RANDOM_SEED, SamplingParams, draw_seed
from minfer_jax.sampling.samplers import Candidates


class Sampler:
    """Penalties, top-k, top-p, min-p, temperature, draw: llama.cpp's order.

    The seed alone decides the draws for given logits: draw i takes block i of a counter-based
    generator (Philox, Salmon et al. 2011) whose key is all 64 bits of the seed.
    """

    def __init__(self, params: SamplingParams, prompt: Iterable[int] = ()) -> None:
        self.params = params
        self.seed = draw_seed() if params.seed == RANDOM_SEED else params.seed
        last_n = params.repeat_last_n
        self._window: deque[int] = deque(prompt, maxlen=None if last_n < 0 else last_n)
        self._draws = 0

    def sample(self, logits: np.ndarray) -> int:
        """Choose from float32 logits [n_vocab] and remember the choice.

        Raises `SamplingError` for a NaN, or if every token has been ruled out.
        """
        token = self._choose(self._checked(logits))
        self._window.append(token)
        return token

    def _choose(self, logits: np.ndarray) -> int:
        p = self.params
        c = Candidates.all(logits)
        if p.penalizes:
            c = samplers.penalties(
                c,
                self._window,
                repeat=p.repeat_penalty,
                frequency=p.frequency_penalty,
                presence=p.presence_penalty,
            )
        if p.temp <= 0.0:
            # What greedy takes survives every sampler that only removes less likely tokens.
            return int(c.ids[np.argmax(c.logits)])
        c = samplers.top_k(c, p.top_k)
        c = samplers.top_p(c, p.top_p)
        c = samplers.min_p(c, p.min_p)
        c = samplers.temperature(c, p.temp)
        return self._draw(c)

    def _draw(self, c: Candidates) -> int:
        """Invert the cumulative distribution at the next uniform number."""
        self._draws += 1
        bits = np.random.Philox(key=self.seed, counter=self._draws).random_raw()
        cumulative = np.cumsum(c.weights())
        # 53 bits make a double in [0, 1).
        u = (int(bits) >> 11) * 2.0**-53 * cumulative[-1]
        return int(c.ids[min(np.searchsorted(cumulative, u, side="right"), len(c.ids) - 1)])

    @staticmethod
    def _checked(logits: np.ndarray) -> np.ndarray:
        top = logits.max()
        if np.isnan(top):
            n = int(np.isnan(logits).sum())
            raise SamplingError(
                f"{n} of {len(logits)} logits are not a number; if keys or values overflow float16,"
                " exact mode (--exact) keeps them as float32"
            )
        if top == -np.inf:
            raise SamplingError("no token is possible: every logit is -inf")
        if top == np.inf:
            # Infinitely more likely than anything finite: only those remain, as equals.
            return np.where(logits == np.inf, np.float32(0.0), np.float32(-np.inf))
        return logits
