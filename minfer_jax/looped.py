"""Tokens that are chosen several at a time, in the graph, and handed out one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any

from minfer_jax.batch import Batch
from minfer_jax.context import Context
from minfer_jax.errors import ContextFullError, SamplingError
from minfer_jax.graph.inputs import LOOP_ENDS, LOOP_STEPS
from minfer_jax.sampling import Sampler
from minfer_jax.sampling.in_graph import SamplerKind, accept, kind_of

_CALL_SECONDS = 0.05
"""What a call may take, so that text keeps flowing and an interrupt is heard."""


class LoopedTokens:
    """A decode loop over sequence 0 of a context, for a caller that takes token after token."""

    def __init__(self, context: Context, sampler: Sampler, ends: Collection[int]) -> None:
        self._context = context
        self._sampler = sampler
        self._kind = _kind(context, sampler)
        self._ends = sorted(ends)
        self._tokens: deque[int] = deque()
        self._taken: list[int] = []
        self._before: dict[str, Any] = {}
        """What the sampler remembered before the last call, since which `_taken` was taken."""
        self._left: object = None
        self._steps = 1  # until it is known how long one takes

    @staticmethod
    def can_choose(context: Context, sampler: Sampler, ends: Collection[int]) -> bool:
        """Whether this chain can run in the graph, and these ends be watched for there."""
        return _kind(context, sampler) is not None and len(ends) <= LOOP_ENDS

    def __bool__(self) -> bool:
        """Whether there are tokens to take."""
        return bool(self._tokens)

    def run(self, token: int, most: int) -> int:
        """Feed a token, choose up to `most` that follow it; how many steps were done.

        Raises `ContextFullError` without room for a step.
        """
        self._before, self._taken = self._sampler.state(), []
        batch, samplers = Batch(token=[token]), [self._sampler]
        steps = min(most, self._steps)
        status, chosen = self._context.decode_loop(batch, samplers, steps, ends=self._ends)
        if status:
            raise ContextFullError("no room in the context for another token")
        self._tokens.extend(chosen[:, 0].tolist())
        self._left = self._held()
        return len(chosen)

    def pace(self, seconds: float) -> None:
        """A step takes so long: as many as a call has time for are done from now on."""
        self._steps = max(1, min(LOOP_STEPS, int(_CALL_SECONDS / max(seconds, 1e-6))))

    def take(self) -> int:
        """The next token, which its sampler has accepted. Raises `SamplingError` for none."""
        token = self._tokens.popleft()
        if token < 0:
            raise SamplingError(
                "no token is possible: logits are not numbers, or all tokens are ruled out; if keys"
                " or values overflow float16, exact mode (--exact) keeps them as float32"
            )
        self._taken.append(token)
        return token

    def give_back(self) -> None:
        """Nobody takes the rest: forget what was chosen and evaluated beyond the last token taken.

        A memory that cannot go back forgets the sequence. It stays as it is if somebody else has
        changed it since.
        """
        n = len(self._tokens)
        self._tokens.clear()
        if not n:
            return
        assert self._kind is not None
        self._sampler.restore(self._before)
        for token in self._taken:
            accept(self._sampler, self._kind, token)
        memory = self._context.memory
        if self._held() == self._left and not memory.seq_rm(0, memory.n_past() - n):
            memory.seq_rm(0)

    def _held(self) -> object:
        """What tells whether the sequence is as the last call left it."""
        return self._context.memory.n_past(), self._context.history.tokens(0)


def _kind(context: Context, sampler: Sampler) -> SamplerKind | None:
    constrained = sampler.constraint is not None
    return kind_of(sampler.params, n_vocab=context.model.hp.n_vocab, constrained=constrained)
