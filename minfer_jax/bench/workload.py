"""What is measured: reading n tokens at once, or generating them one by one, at some depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PROFILE_STEPS = 16
"""Decode steps that a profile is the mean of."""

_SEED = 42
_WARM_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One test. Exactly one of `n_prompt` and `n_gen` is above 0."""

    n_prompt: int = 0
    n_gen: int = 0
    n_depth: int = 0
    """Tokens that the sequence holds before the clock starts."""
    sampling: str = ""
    """Of generation: where each token is chosen, `host` or `loop` (in the graph, several steps a
    call), by the default chain; "": nowhere, and what is fed is known before."""

    @property
    def name(self) -> str:
        """As llama-bench spells it: pp512, tg128, pp512 @ d1024."""
        return self.kind + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def kind(self) -> str:
        """The name without the depth."""
        return f"pp{self.n_prompt}" if self.n_prompt else gen_name(self.n_gen, self.sampling)

    @property
    def n_tokens(self) -> int:
        """Tokens under the clock."""
        return self.n_prompt + self.n_gen

    @property
    def n_ctx(self) -> int:
        """Tokens that the context must hold."""
        return self.n_depth + self.n_tokens

    @property
    def n_batch(self) -> int:
        """Tokens that are handed over at a time."""
        return self.n_prompt or 1

    @property
    def n_warm(self) -> int:
        """Tokens of the run before the timed ones: all of a prompt, since the last of its ubatches
        may have a shape of its own, and a few steps of generation."""
        return self.n_prompt or min(self.n_gen, _WARM_STEPS)


def gen_name(n_gen: int, sampling: str) -> str:
    """A test of generation by name: tg128, tg128 loop."""
    return f"tg{n_gen} {sampling}".strip()


def plan(
    n_prompts: Sequence[int],
    n_gens: Sequence[int],
    n_depths: Sequence[int],
    *,
    sampling: Sequence[str] = ("",),
) -> list[Workload]:
    """The tests of every prompt length, then of every generation length, depth by depth.

    A length of 0 stands for no test. Each generation is measured in every way of `sampling`.
    """
    tests = []
    for depth in n_depths:
        tests += [Workload(n_prompt=n, n_depth=depth) for n in n_prompts if n]
        tests += [
            Workload(n_gen=n, n_depth=depth, sampling=way) for n in n_gens if n for way in sampling
        ]
    return tests


def random_tokens(n: int, n_vocab: int) -> list[int]:
    """Token ids, the same ones in every run: what they are does not matter to the arithmetic."""
    return np.random.default_rng(_SEED).integers(0, n_vocab, n).tolist()
