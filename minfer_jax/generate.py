"""The token loop: sample first, three stop gates, forward last.

Takes logits that already exist, chooses a token, and asks whether to stop: an end-of-generation
token (or a grammar that is complete), a stop string, the budget. Only a token that passes all three
costs a forward pass, beside which a grammar computes what may come after it.

Where the graph can choose tokens by itself and nothing has to be looked at in between, it makes
several steps a call: see `looped.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal

from minfer_jax.batch import Batch
from minfer_jax.context import Context
from minfer_jax.errors import ContextFullError, SamplingError, UsageError
from minfer_jax.graph.inputs import LOOP_STEPS
from minfer_jax.looped import LoopedTokens
from minfer_jax.sampling import Sampler
from minfer_jax.sampling.logprobs import TokenLogprobs, checked_logprobs, token_logprobs
from minfer_jax.stopping import StopFilter
from minfer_jax.tokenizer import Tokenizer, Utf8Stream

FinishReason = Literal["stop", "length", "abort"]
"""`stop`: an end token, a stop string or a complete grammar; `length`: the budget or the context;
`abort`: asked to."""


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
    in_graph: bool = False
    """Whether tokens behind the first were chosen in the graph."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One for each of `ids`, if they were asked for."""
    notes: tuple[str, ...] = ()
    """What a grammar or schema asks for and is not enforced, a line each."""
    stats: GenerateStats = field(default_factory=GenerateStats)


def generate(
    context: Context,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    sampler: Sampler,
    *,
    n_predict: int,
    stop: Sequence[str] = (),
    logprobs: int | None = None,
    in_graph: bool = True,
    abort: Callable[[], bool] = lambda: False,
    into: Generation | None = None,
) -> Iterator[str]:
    """Feed `prompt` to an empty or continued context and yield text, in whole characters.

    `n_predict` is the most tokens to generate, -1 for as many as the context holds. With `logprobs`
    that many of the likeliest tokens are recorded with each one generated. Tokens are chosen in the
    graph, several steps a call, if `in_graph` and unless that takes the host: a grammar, a stop
    string, logprobs, or a sampler such as mirostat. `abort` is asked between calls. `into`, a fresh
    `Generation`, is filled in as the loop goes.

    If the caller stops early and closes the iterator, context and sampler are where they would be
    without loops: before the last token yielded. A recurrent memory, which cannot go back, has then
    forgotten the sequence. Until then they may be ahead of what was yielded, so whoever looks at
    them between two pieces asks for `in_graph=False`.

    Raises `ContextFullError` before any compute if the prompt leaves no room for a token, and
    `UsageError` for an empty prompt or stop string. `SamplingError` in the middle, where no token
    is left to choose: what has been yielded is then a valid beginning.
    """
    if not prompt:
        raise UsageError("the prompt is empty and the model adds no token of its own to it")
    if isinstance(n_predict, bool) or not isinstance(n_predict, Integral) or n_predict < -1:
        raise UsageError(
            f"n_predict is {n_predict!r}; allowed: integers from -1 (until the context is full)"
        )
    n_logprobs = checked_logprobs(logprobs)
    _check_room(context, len(prompt))
    out = into if into is not None else Generation()
    out.seed = sampler.seed
    gate = StopFilter(stop)
    looped = None
    unseen = in_graph and n_logprobs is None and not gate.stops
    if unseen and LoopedTokens.can_choose(context, sampler, tokenizer.eog):
        looped = LoopedTokens(context, sampler, tokenizer.eog)
    out.in_graph = looped is not None
    loop = _Loop(context, tokenizer, sampler, n_predict, n_logprobs, looped, abort, out)
    return loop.text(prompt, gate)


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
    n_logprobs: int | None
    looped: LoopedTokens | None
    abort: Callable[[], bool]
    out: Generation

    def text(self, prompt: Sequence[int], gate: StopFilter) -> Iterator[str]:
        """Whole characters, up to a stop string; sets the finish reason."""
        utf8 = Utf8Stream()
        started = time.perf_counter()
        try:
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
        except SamplingError:
            # A dead end: whole characters only, since a grammar allowed no U+FFFD.
            if text := utf8.feed(gate.flush()):
                yield text
            raise
        if text := utf8.feed(gate.flush()) + utf8.flush():
            yield text

    def tokens(self, prompt: Sequence[int]) -> Iterator[int]:
        """Tokens up to an end token, a complete grammar, the budget or the end of the context."""
        seconds = self.evaluate(prompt)
        if seconds is None:
            return
        self.out.stats.n_prompt, self.out.stats.prefill_s = len(prompt), seconds
        n, reason = 0, self.ended(0)
        try:
            while reason is None:
                token = self.choose()
                if token is None:
                    reason = "stop"
                    break
                yield token
                n += 1
                reason = self.ended(n)
                if reason is None and not self.step(token, n):
                    return
        finally:
            if self.looped is not None:
                self.looped.give_back()
        self.out.finish_reason = reason

    def ended(self, n: int) -> FinishReason | None:
        """Why no token follows the first `n`, if none does."""
        if n == self.n_predict and self.sampler.constraint is not None:
            self.sampler.constraint.prepare()  # no step will, and only its mask tells for sure
        if self.complete():
            return "stop"
        full = not self.looped and self.room() <= 0
        return "length" if n == self.n_predict or full else None

    def room(self) -> int:
        """Tokens that can still be evaluated. A recurrent memory itself would never be full."""
        return self.context.n_ctx_seq - self.context.memory.n_past()

    def complete(self) -> bool:
        """Whether a grammar lets nothing follow but an end, for which a model may have no token."""
        constraint = self.sampler.constraint
        return constraint is not None and constraint.finished

    def choose(self) -> int | None:
        """The next token, with an account of it if one is kept; None for an end.

        A grammar is asked once more: the mask that was computed beside the forward pass may show
        it to be complete where its state before did not.
        """
        if self.complete():
            return None
        if self.looped:
            token = self.looped.take()
            return None if token in self.tokenizer.eog else token
        logits = self.context.logits()
        token = self.sampler.sample(logits)
        if token in self.tokenizer.eog:
            return None
        if self.n_logprobs is not None:
            account = token_logprobs(logits, token, self.n_logprobs, self.spelled)
            self.out.logprobs.append(account)
        return token

    def spelled(self, token: int) -> str:
        """A token's text; rows of logits that the vocabulary has no token for have none."""
        if token >= self.tokenizer.n_vocab:
            return ""
        return self.tokenizer.piece(token).decode("utf-8", "replace")

    def step(self, token: int, n: int) -> bool:
        """Run the model on token number n, unless a loop has done so; False if aborted."""
        if self.looped:
            return True
        if self.looped is None:
            done, seconds = 1, self.evaluate([token])
        else:
            done, seconds = self.loop(self.looped, token, n)
        if seconds is None:
            return False
        self.out.stats.n_decoded += done
        self.out.stats.decode_s += seconds
        return True

    def loop(self, looped: LoopedTokens, token: int, n: int) -> tuple[int, float | None]:
        """Let a loop choose what follows token number n: steps done, and seconds as `evaluate`."""
        if self.abort():
            self.out.finish_reason = "abort"
            return 0, None
        left = LOOP_STEPS if self.n_predict < 0 else self.n_predict - n
        most = min(left, self.room())
        with self.clock() as spent:
            done = looped.run(token, most)
        looped.pace(spent.seconds / done)
        return done, spent.seconds

    def evaluate(self, tokens: Sequence[int]) -> float | None:
        """Run the model on `tokens`; seconds without the building of graphs, None if aborted."""
        if self.sampler.constraint is not None:
            self.sampler.constraint.prepare()
        n_batch, n_past = self.context.n_batch, self.context.memory.n_past()
        with self.clock() as spent:
            for begin in range(0, len(tokens), n_batch):
                part = Batch(token=tokens[begin : begin + n_batch])
                status = self.context.decode(part, abort=self.abort)
                if status == 1:
                    raise ContextFullError(f"no room in the context for {len(tokens)} tokens")
                if status == 2:
                    self.context.memory.seq_rm(0, n_past)
                    self.out.finish_reason = "abort"
                    return None
        return spent.seconds

    @contextmanager
    def clock(self) -> Iterator[_Spent]:
        """Time what runs within, without the building of graphs, which is counted apart."""
        spent, built = _Spent(), self.context.perf().build_seconds
        started = time.perf_counter()
        yield spent
        build = self.context.perf().build_seconds - built
        spent.seconds = time.perf_counter() - started - build
        self.out.stats.build_s += build


@dataclass
class _Spent:
    """How long it took."""

    seconds: float = 0.0
