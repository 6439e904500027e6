"""The chain of one request, with what it remembers and its stream of random numbers."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from minfer_jax.errors import SamplingError, UsageError
from minfer_jax.sampling import samplers
from minfer_jax.sampling.adaptive import AdaptiveP
from minfer_jax.sampling.constraint import Constraint
from minfer_jax.sampling.dry import dry, restart_sequences
from minfer_jax.sampling.infill import end_of, infill
from minfer_jax.sampling.mirostat import Mirostat
from minfer_jax.sampling.params import RANDOM_SEED, SamplingParams, draw_seed
from minfer_jax.sampling.philox import uniform
from minfer_jax.sampling.recent import RecentTokens
from minfer_jax.sampling.samplers import Candidates
from minfer_jax.sampling.vocab import RestartSequences, SamplerVocab

Step = Callable[[Candidates], Candidates]


class Sampler:
    """Llama.cpp's chain: logit biases, then what `SamplingParams.samplers` lists, then a choice.

    The seed alone decides the draws for given logits: draw i takes block i of a counter-based
    generator (Philox4x32-10) whose key is all 64 bits of the seed. The first word of a block
    chooses the token, the second whether XTC acts. A constraint's mask comes before the chain.

    Raises `UsageError` for a biased token that `vocab` has not, and without a `vocab` for what
    needs one: `ignore_eos`, DRY's sequence breakers, infill.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Iterable[int] = (),
        *,
        vocab: SamplerVocab | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self.params = params
        self.vocab = vocab
        self.constraint = constraint
        self.seed = draw_seed() if params.seed == RANDOM_SEED else params.seed
        self.bias = _bias_of(params, vocab)
        """Token -> what is added to its logit, with the end tokens under `ignore_eos`."""
        self.draws = 0
        """Random blocks consumed so far."""
        self._recent = _recent_of(params, prompt)
        self._ids = np.empty(0, np.int32)
        self._learner: Mirostat | AdaptiveP | None = None
        self._restarts: RestartSequences = {}
        self._choose: Callable[[Candidates], int] = self._draw
        self._steps: list[Step] = []
        for name in params.steps:
            self._set_up(name)
        if params.greedy:
            self._choose = _highest
        self._draws_each = int(not params.greedy or "xtc" in params.steps)

    def sample(self, logits: np.ndarray) -> int:
        """Choose from float32 logits [n_vocab] and remember the choice.

        Raises `SamplingError` for a NaN, for a biased token that is not there, and if every token
        has been ruled out; nothing has changed then.
        """
        c = self._biased(self._possible(logits))
        possible = c.logits
        for step in self._steps:
            c = step(c)
        if len(c.ids) == 1 and possible[c.ids[0]] == -np.inf:
            raise SamplingError(f"only token {c.ids[0]} is left, and it has been ruled out")
        token = self._choose(c)
        self.draws += self._draws_each
        self.accept(token)
        return token

    def accept(self, token: int) -> None:
        """Remember a token that may have been chosen elsewhere; `draws` stays as it is.

        Raises `SamplingError` if the constraint does not allow it; nothing has changed then.
        """
        if self.constraint is not None:
            self.constraint.accept(token)
        self._recent.append(token)

    def window(self, n: int) -> list[int]:
        """The last up to `n` tokens of the penalties' window, oldest first."""
        return self._recent.last(min(n, _size(self.params.repeat_last_n))).tolist()

    def state(self) -> dict[str, Any]:
        """All that a sampler with equal parameters needs to go on, fit for JSON.

        Not the constraint's: a document begins with the answer that it constrains.
        """
        return {
            "seed": self.seed,
            "draws": self.draws,
            "recent": self._recent.last(sys.maxsize).tolist(),
            "learned": [] if self._learner is None else self._learner.learned,
        }

    def restore(self, state: Any) -> None:
        """Go on from what `state` returned.

        Raises `UsageError` for a state of other parameters or none at all; nothing has changed
        then.
        """
        seed, draws, recent, learned = _checked_state(state)
        if self.params.seed not in (RANDOM_SEED, seed):
            raise UsageError(f"the sampler's state is of seed {seed}, not of {self.params.seed}")
        if len(learned) != (0 if self._learner is None else len(self._learner.learned)):
            raise UsageError("the sampler's state is of other settings of mirostat or adaptive_p")
        self.seed, self.draws = seed, draws
        self._recent = _recent_of(self.params, recent)
        if self._learner is not None:
            self._learner.learned = learned

    def _set_up(self, name: str) -> None:
        """Add one of `SamplingParams.steps` to the chain."""
        p = self.params
        match name:
            case "penalties":
                self._steps.append(self._penalties)
            case "dry":
                if p.dry_sequence_breakers:
                    vocab = _needed(self.vocab, "dry_sequence_breakers")
                    self._restarts = restart_sequences(vocab, p.dry_sequence_breakers)
                self._steps.append(self._dry)
            case "top_n_sigma":
                self._steps.append(partial(samplers.top_n_sigma, n=p.top_n_sigma))
            case "top_k":
                self._steps.append(partial(samplers.top_k, k=p.top_k))
            case "typ_p":
                self._steps.append(partial(samplers.typical, p=p.typical_p, min_keep=p.min_keep))
            case "top_p":
                self._steps.append(partial(samplers.top_p, p=p.top_p, min_keep=p.min_keep))
            case "min_p":
                self._steps.append(partial(samplers.min_p, p=p.min_p, min_keep=p.min_keep))
            case "xtc":
                self._steps.append(self._xtc)
            case "temperature":
                self._steps.append(partial(samplers.temperature, temp=p.temp))
            case "dynamic_temperature":
                self._steps.append(self._dynamic_temperature)
            case "infill":
                vocab = _needed(self.vocab, "infill")
                end_of(vocab)
                self._steps.append(partial(infill, vocab=vocab))
            case "adaptive_p":
                self._learner = adaptive = AdaptiveP(p.adaptive_target, p.adaptive_decay)
                self._choose = lambda c: adaptive.choose(c, self._uniform())
            case "mirostat":
                self._learner = mirostat = Mirostat(
                    p.mirostat, tau=p.mirostat_tau, eta=p.mirostat_eta
                )
                self._choose = lambda c: mirostat.choose(c, len(self._ids), self._uniform())

    def _penalties(self, c: Candidates) -> Candidates:
        p = self.params
        return samplers.penalties(
            c,
            self._recent.counts,
            repeat=p.repeat_penalty,
            frequency=p.frequency_penalty,
            presence=p.presence_penalty,
        )

    def _dry(self, c: Candidates) -> Candidates:
        p = self.params
        return dry(
            c,
            np.array(self._recent.last(_size(p.dry_penalty_last_n))),
            self._restarts,
            multiplier=p.dry_multiplier,
            base=p.dry_base,
            allowed=p.dry_allowed_length,
        )

    def _xtc(self, c: Candidates) -> Candidates:
        p = self.params
        if self._uniform(word=1) > p.xtc_probability:
            return c
        return samplers.xtc(c, p.xtc_threshold, p.min_keep)

    def _dynamic_temperature(self, c: Candidates) -> Candidates:
        p = self.params
        return samplers.dynamic_temperature(c, p.temp, p.dynatemp_range, p.dynatemp_exponent)

    def _draw(self, c: Candidates) -> int:
        """Invert the cumulative distribution at the next uniform number."""
        return int(c.ids[samplers.draw(c.weights(), self._uniform())])

    def _uniform(self, word: int = 0) -> float:
        return uniform(self.seed, self.draws + 1, word)

    def _biased(self, logits: np.ndarray) -> Candidates:
        """The whole vocabulary, its logits with biases."""
        if len(self._ids) != len(logits):
            self._ids = np.arange(len(logits), dtype=np.int32)
        c = Candidates(self._ids, logits)
        if not self.bias:
            return c
        if max(self.bias) >= len(logits):
            raise SamplingError(_unknown_token(self.bias, len(logits)))
        return samplers.add(c, self.bias)

    def _possible(self, logits: np.ndarray) -> np.ndarray:
        """Logits that are numbers, those that the constraint rules out at -inf."""
        top = logits.max()
        if np.isnan(top):
            n = int(np.isnan(logits).sum())
            raise SamplingError(
                f"{n} of {len(logits)} logits are not a number; if keys or values overflow float16,"
                " exact mode (--exact) keeps them as float32"
            )
        if top == -np.inf:
            raise SamplingError("no token is possible: every logit is -inf")
        if self.constraint is not None:
            allowed = _as_long(self.constraint.allowed(), len(logits))
            logits = np.where(allowed, logits, np.float32(-np.inf))
            top = logits.max()
            if top == -np.inf:
                raise SamplingError(
                    "no token of the vocabulary can follow under the grammar;"
                    " the text so far is a valid beginning"
                )
        if top == np.inf:
            # Infinitely more likely than anything finite: only those remain, as equals.
            return np.where(logits == np.inf, np.float32(0.0), np.float32(-np.inf))
        return logits


def _as_long(allowed: np.ndarray, n: int) -> np.ndarray:
    """A mask of n tokens: a head may have more rows than the vocabulary has tokens, or fewer."""
    if len(allowed) >= n:
        return allowed[:n]
    return np.concatenate([allowed, np.zeros(n - len(allowed), np.bool_)])


def _highest(c: Candidates) -> int:
    """The likeliest token, the lowest id among equals."""
    best = int(np.argmax(c.logits))
    if not math.isfinite(c.logits[best]):
        raise SamplingError(f"no token is possible: the highest logit is {c.logits[best]}")
    return int(c.ids[best])


def _size(n: int) -> int:
    """A number of tokens of which -1 stands for all."""
    return sys.maxsize if n < 0 else n


def _recent_of(params: SamplingParams, tokens: Iterable[int]) -> RecentTokens:
    """A memory as long as the samplers need it, with `tokens` in it."""
    window, dry_window = _size(params.repeat_last_n), _size(params.dry_penalty_last_n)
    return RecentTokens(
        tokens,
        keep=max(window, dry_window) if "dry" in params.steps else window,
        window=window if "penalties" in params.steps else 0,
    )


def _needed(vocab: SamplerVocab | None, what: str) -> SamplerVocab:
    if vocab is None:
        raise UsageError(f"the sampler has no vocabulary, which {what} needs")
    return vocab


def _bias_of(params: SamplingParams, vocab: SamplerVocab | None) -> dict[int, float]:
    """The biases of a request, those of one token summed."""
    bias: dict[int, float] = {}
    for token, value in params.logit_bias:
        bias[token] = bias.get(token, 0.0) + value
    if bias and vocab is not None and max(bias) >= vocab.n_vocab:
        raise UsageError(_unknown_token(bias, vocab.n_vocab))
    if params.ignore_eos:
        bias.update(dict.fromkeys(sorted(_needed(vocab, "ignore_eos").eog), -math.inf))
    return bias


def _unknown_token(bias: Mapping[int, float], n_vocab: int) -> str:
    return f"logit_bias has token {max(bias)}; allowed: ids from 0 to {n_vocab - 1}"


def _checked_state(state: Any) -> tuple[int, int, list[int], list[float]]:
    """The parts of a sampler's state; `UsageError` if it is none."""
    match state:
        case {
            "seed": int(seed),
            "draws": int(draws),
            "recent": list(recent),
            "learned": list(learned),
        } if (
            0 <= seed < 1 << 64
            and draws >= 0
            and all(isinstance(token, int) and 0 <= token < 1 << 31 for token in recent)
            and all(isinstance(value, float) and math.isfinite(value) for value in learned)
        ):
            return seed, draws, recent, learned
    raise UsageError("this is not the state of a sampler, or it is damaged")
