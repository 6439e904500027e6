"""The token loop: sample first, three stop gates, forward last.

Takes logits that already exist, chooses a token, and asks whether to stop: an end-of-generation
token, a stop string, the budget. Only a token that passes all three costs a forward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal

from minfer_jax.batch import Batch
from minfer_jax.context import Context
from minfer_jax.errors import ContextFullError, UsageError
from minfer_jax.sampling import Sampler
from minfer_jax.stopping import StopFilter
from minfer_jax.tokenizer import Tokenizer, Utf8Stream

FinishReason = Literal["stop", "length", "abort"]
"""`stop`: an end token or a stop string; `length`: the budget or the context; `abort`: asked to."""


@dataclass
class GenerateStats:
    """What a generation took. Seconds; evaluation times leave the building of graphs out."""

    n_prompt: int = 0
    n_generated: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    n_decoded: int = 0
    """Forward passes of one token: the last token generated needs none."""
    ttft_s: float = 0.0
    """From the call to the first token, building of graphs included."""
    build_s: float = 0.0

    @property
    def prefill_tps(self) -> float:
        return self.n_prompt / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tps(self) -> float:
        return self.n_decoded / self.decode_s if self.decode_s else 0.0


@dataclass
class Generation:
    """One generation, filled in while it runs."""

    ids: list[int] = field(default_factory=list)
    """Tokens generated, an end token excluded."""
    finish_reason: FinishReason | None = None
    seed: int = 0
    """The sampler's seed, also if it was drawn."""
    stats: GenerateStats = field(default_factory=GenerateStats)


def generate(
    context: Context,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    sampler: Sampler,
    *,
    n_predict: int,
    stop: Sequence[str] = (),
    abort: Callable[[], bool] = lambda: False,
    into: Generation | None = None,
) -> Iterator[str]:
    """Feed `prompt` to an empty or continued context and yield text, in whole characters.

    `n_predict` is the most tokens to generate, -1 for as many as the context holds. `abort` is
    asked between steps. `into`, a fresh `Generation`, is filled in as the loop goes.

    Raises `ContextFullError` before any compute if the prompt leaves no room for a token, and
    `UsageError` for an empty prompt or stop string.
    """
    if not prompt:
        raise UsageError("the prompt is empty and the model adds no token of its own to it")
    if isinstance(n_predict, bool) or not isinstance(n_predict, Integral) or n_predict < -1:
        raise UsageError(
            f"n_predict is {n_predict!r}; allowed: integers from -1 (until the context is full)"
        )
    _check_room(context, len(prompt))
    out = into if into is not None else Generation()
    out.seed = sampler.seed
    loop = _Loop(context, tokenizer, sampler, n_predict, abort, out)
    return loop.text(prompt, StopFilter(stop))


def _check_room(context: Context, n_prompt: int) -> None:
    """Raise `ContextFullError` unless the prompt fits with room for at least one token."""
    n_past = context.memory.n_past()
    n_ctx = context.n_ctx_seq
    if n_past + n_prompt >= n_ctx:
        held = f" after the {n_past} it holds" if n_past else ""
        raise ContextFullError(
            f"the prompt has {n_prompt} tokens and the context has room for"
            f" {n_ctx - n_past - 1}{held} (n_ctx is {n_ctx}, and one place is kept for the answer):"
            " raise -c/--n-ctx or shorten the prompt"
        )


@dataclass
class _Loop:
    """One run of the loop, from ids to tokens to text."""

    context: Context
    tokenizer: Tokenizer
    sampler: Sampler
    n_predict: int
    abort: Callable[[], bool]
    out: Generation

    def text(self, prompt: Sequence[int], gate: StopFilter) -> Iterator[str]:
        """Whole characters, up to a stop string; sets the finish reason."""
        utf8 = Utf8Stream()
        started = time.perf_counter()
        for token in self.tokens(prompt):
            self.out.ids.append(token)
            self.out.stats.n_generated += 1
            if self.out.stats.n_generated == 1:
                self.out.stats.ttft_s = time.perf_counter() - started
            if text := utf8.feed(gate.feed(self.tokenizer.piece(token, special=False))):
                yield text
            if gate.stopped:
                self.out.finish_reason = "stop"
                break
        if text := utf8.feed(gate.flush()) + utf8.flush():
            yield text

    def tokens(self, prompt: Sequence[int]) -> Iterator[int]:
        """Tokens up to an end token, the budget or the end of the context."""
        stats = self.out.stats
        seconds = self.evaluate(prompt)
        if seconds is None:
            return
        stats.n_prompt, stats.prefill_s = len(prompt), seconds
        n = 0
        while n != self.n_predict:
            token = self.sampler.sample(self.context.logits())
            if token in self.tokenizer.eog:
                self.out.finish_reason = "stop"
                return
            yield token
            n += 1
            if n == self.n_predict or self.context.memory.n_past() == self.context.n_ctx_seq:
                break
            seconds = self.evaluate([token])
            if seconds is None:
                return
            stats.n_decoded += 1
            stats.decode_s += seconds
        self.out.finish_reason = "length"

    def evaluate(self, tokens: Sequence[int]) -> float | None:
        """Run the model on `tokens`; seconds without the building of graphs, None if aborted."""
        built = self.context.perf().build_seconds
        started = time.perf_counter()
        n_batch, n_past = self.context.n_batch, self.context.memory.n_past()
        for begin in range(0, len(tokens), n_batch):
            part = Batch(token=tokens[begin : begin + n_batch])
            status = self.context.decode(part, abort=self.abort)
            if status == 1:
                raise ContextFullError(f"no room in the context for {len(tokens)} tokens")
            if status == 2:
                self.context.memory.seq_rm(0, n_past)
                self.out.finish_reason = "abort"
                return None
        seconds = time.perf_counter() - started
        build = self.context.perf().build_seconds - built
        self.out.stats.build_s += build
        return seconds - build
