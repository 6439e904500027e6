"""Several sequences at once, as llama-batched-bench measures them: all prompts, then steps of a
token for each sequence. And what it costs to give a prefix to further sequences.

Each test has a context of its own, on either side. Sharing a prompt is under no clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

import jax

from minfer_jax.batch import Batch
from minfer_jax.bench.ours import timed
from minfer_jax.bench.run import REST_SECONDS
from minfer_jax.bench.samples import Samples
from minfer_jax.bench.workload import random_tokens
from minfer_jax.context import Context
from minfer_jax.errors import MinferError
from minfer_jax.limits import N_BATCH
from minfer_jax.lm import LanguageModel

FORK_TOKENS = 1000
FORK_SEQUENCES = 8
"""That get the prefix of another one."""

_WARM_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class BatchedTest:
    """One line of the table. All numbers are above 0."""

    n_prompt: int
    """PP: tokens of a prompt."""
    n_gen: int
    """TG: steps, each of a token for every sequence."""
    n_seq: int
    """B: sequences."""
    shared: bool
    """One prompt, evaluated once, for all sequences."""
    unified: bool
    """One run of cells for all sequences, in which a shared prompt lies once."""

    @property
    def name(self) -> str:
        return f"pp{self.n_prompt} tg{self.n_gen} x{self.n_seq}"

    @property
    def n_ctx_seq(self) -> int:
        """Positions of a sequence."""
        return self.n_prompt + self.n_gen

    @property
    def n_kv(self) -> int:
        """Cells that the test needs."""
        prompts = 1 if self.shared and self.unified else self.n_seq
        return prompts * self.n_prompt + self.n_gen_tokens

    @property
    def n_prompt_tokens(self) -> int:
        """Tokens under the prefill's clock."""
        return self.n_prompt * (1 if self.shared else self.n_seq)

    @property
    def n_gen_tokens(self) -> int:
        """Tokens under the steps' clock."""
        return self.n_gen * self.n_seq


def plan_batched(
    n_prompts: Sequence[int],
    n_gens: Sequence[int],
    n_seqs: Sequence[int],
    *,
    shared: bool,
    unified: bool,
) -> list[BatchedTest]:
    """The tests of every prompt length, of it every generation length, of it every number of
    sequences, ascending and each once: the speed of one sequence is known before the others'."""
    return [
        BatchedTest(n_prompt=pp, n_gen=tg, n_seq=b, shared=shared, unified=unified)
        for pp in n_prompts
        for tg in n_gens
        for b in sorted(set(n_seqs))
    ]


class BatchedSide(Protocol):
    """Whoever computes. `OurBatchedSide` says what is expected."""

    def open(self, *, n_ctx: int, n_seq_max: int, kv_unified: bool) -> None: ...

    def run_batched(
        self, prompts: Sequence[Sequence[int]], steps: Sequence[Sequence[int]]
    ) -> tuple[int, int]: ...


@dataclass(frozen=True, kw_only=True)
class ForkCost:
    """What it takes to give a prefix to further sequences, in unified cells."""

    n_tokens: int
    n_seq: int
    """Sequences that got it."""
    ns: tuple[int, ...]
    """Nanoseconds of each repetition, for all of them."""
    nbytes: int
    """By which the arrays on the device grew, in the repetition in which they grew most."""


class OurBatchedSide:
    """Our side: a context at a time.

    `abort` is asked before every call of a graph; `KeyboardInterrupt` is raised if it says yes. The
    clocks leave out the building of graphs, which `built` counts.
    """

    def __init__(
        self, lm: LanguageModel, *, n_batch: int = N_BATCH, abort: Callable[[], bool]
    ) -> None:
        """`n_batch`: tokens of a prefill that are handed over at a time."""
        self._lm = lm
        self._n_batch = n_batch
        self._abort = abort
        self._context: Context | None = None

    def open(self, *, n_ctx: int, n_seq_max: int, kv_unified: bool) -> None:
        """A new context in place of the last one, of which nothing is kept."""
        self._context = None  # first: its regions are large
        self._context = self._lm.context(
            n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=self._n_batch, kv_unified=kv_unified
        )

    def run_batched(
        self, prompts: Sequence[Sequence[int]], steps: Sequence[Sequence[int]]
    ) -> tuple[int, int]:
        """Nanoseconds of the prompts and of the steps, from empty sequences on.

        `prompts` are of one length: one for each sequence, or one for all of them. `steps` hold a
        token for each. Every call waits for its logits: those of the prompts' last tokens, and of
        every step.
        """
        self.context.memory.clear()
        prefill = self._timed(prefill_batches(prompts, self._n_batch))
        self._share(range(len(prompts), len(steps[0])))
        jax.block_until_ready(jax.live_arrays())  # a copy may still be under way
        return prefill, self._timed([step_batch(step) for step in steps])

    def fork_cost(self, n_tokens: int, *, repetitions: int) -> ForkCost:
        """Give a prefix of `n_tokens` to `FORK_SEQUENCES` others, again and again, in a context
        opened for it."""
        n_seq_max = FORK_SEQUENCES + 1
        self.open(n_ctx=max(n_tokens, n_seq_max), n_seq_max=n_seq_max, kv_unified=True)
        for batch in prefill_batches([random_tokens(n_tokens, self.n_vocab)], self._n_batch):
            self._evaluate(batch)
        times, growth = [], []
        for _ in range(1 + repetitions):
            for target in range(1, n_seq_max):
                self.context.memory.seq_rm(target)
            before = _bytes_on_device()
            started = time.perf_counter_ns()
            self._share(range(1, n_seq_max))
            jax.block_until_ready(jax.live_arrays())
            times.append(time.perf_counter_ns() - started)
            growth.append(_bytes_on_device() - before)
        return ForkCost(
            n_tokens=n_tokens,
            n_seq=FORK_SEQUENCES,
            ns=tuple(times[1:]),  # the first one warms up
            nbytes=max(0, *growth),
        )

    @property
    def n_vocab(self) -> int:
        return self._lm.model.hp.n_vocab

    def built(self) -> tuple[int, int, float]:
        """Graphs built and evicted by this context so far, and the seconds that it took."""
        counters = self.context.graphs.counters
        return counters.built, counters.evicted, self.context.perf().build_seconds

    @property
    def context(self) -> Context:
        """The one that was opened last."""
        assert self._context is not None
        return self._context

    def _share(self, targets: Sequence[int]) -> None:
        """Give what sequence 0 holds to others."""
        for target in targets:
            if not self.context.memory.seq_cp(0, target):
                raise MinferError("this model's memory cannot give a sequence's prompt to another")

    def _timed(self, batches: Sequence[Batch]) -> int:
        return timed(self.context, batches, self._evaluate)

    def _evaluate(self, batch: Batch) -> None:
        context = self.context
        code = context.decode(batch, abort=self._abort)
        if code == 2:
            raise KeyboardInterrupt
        if code:
            raise MinferError(
                f"a context of {context.n_ctx} places has no room for the next batch of"
                f" {context.n_seq_max} sequences: raise -c/--n-ctx"
            )


def prefill_batches(prompts: Sequence[Sequence[int]], n_batch: int) -> list[Batch]:
    """The prompts of sequences 0, 1, ..., one after the other, at most `n_batch` tokens a batch.

    Logits are wanted of each prompt's last token.
    """
    rows = [
        (token, seq, i == len(prompt) - 1)
        for seq, prompt in enumerate(prompts)
        for i, token in enumerate(prompt)
    ]
    batches = []
    for start in range(0, len(rows), n_batch):
        token, seq_id, wanted = zip(*rows[start : start + n_batch], strict=True)
        batches.append(Batch(token=token, seq_id=seq_id, logits=wanted))
    return batches


def step_batch(tokens: Sequence[int]) -> Batch:
    """A token for each of the sequences 0, 1, ..., all with logits."""
    n = len(tokens)
    return Batch(token=tokens, seq_id=range(n), logits=[True] * n)


@dataclass(frozen=True)
class BatchedSamples:
    """What one side's repetitions gave."""

    prefill: Samples
    steps: Samples

    @property
    def total(self) -> Samples:
        """Both, repetition by repetition."""
        sums = zip(self.prefill.ns, self.steps.ns, strict=True)
        return Samples(self.prefill.n_tokens + self.steps.n_tokens, tuple(map(sum, sums)))


@dataclass(frozen=True, kw_only=True)
class BatchedMeasurement:
    """What one test gave."""

    test: BatchedTest
    n_ctx: int
    test_time: str
    """When it began: RFC 3339, UTC."""
    ours: BatchedSamples
    peer: BatchedSamples | None
    compile_s: float
    """Seconds that getting graphs took (tracing, compiling, loading); in no other figure."""
    graphs_built: int
    graphs_evicted: int


def measure_batched(
    test: BatchedTest,
    *,
    n_ctx: int,
    ours: OurBatchedSide,
    peer: BatchedSide | None = None,
    repetitions: int,
) -> BatchedMeasurement:
    """Run one test in contexts of `n_ctx` places: a warm-up, then repetitions in turns."""
    began = datetime.now(UTC)
    prompts, steps = _tokens(test, ours.n_vocab)
    sides: list[BatchedSide] = [ours] if peer is None else [ours, peer]
    times: list[list[tuple[int, int]]] = [[] for _ in sides]
    ours.open(n_ctx=n_ctx, n_seq_max=test.n_seq, kv_unified=test.unified)
    if peer is not None:
        peer.open(n_ctx=n_ctx, n_seq_max=test.n_seq, kv_unified=test.unified)
    built, evicted, seconds = ours.built()
    for side in sides:
        side.run_batched(prompts, steps[:_WARM_STEPS])
    for _ in range(repetitions):
        for side, ns in zip(sides, times, strict=True):
            if peer is not None:
                time.sleep(REST_SECONDS)
            ns.append(side.run_batched(prompts, steps))
    samples = [_samples(test, ns) for ns in times]
    built_now, evicted_now, seconds_now = ours.built()
    return BatchedMeasurement(
        test=test,
        n_ctx=n_ctx,
        test_time=began.strftime("%Y-%m-%dT%H:%M:%SZ"),
        ours=samples[0],
        peer=None if peer is None else samples[1],
        compile_s=seconds_now - seconds,
        graphs_built=built_now - built,
        graphs_evicted=evicted_now - evicted,
    )


def _tokens(test: BatchedTest, n_vocab: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and steps; both sides get the same ones."""
    tokens = random_tokens(test.n_prompt_tokens + test.n_gen_tokens, n_vocab)
    prompts = _cut(tokens[: test.n_prompt_tokens], test.n_prompt)
    return prompts, _cut(tokens[test.n_prompt_tokens :], test.n_seq)


def _cut(tokens: list[int], size: int) -> list[list[int]]:
    return [tokens[i : i + size] for i in range(0, len(tokens), size)]


def _samples(test: BatchedTest, times: Sequence[tuple[int, int]]) -> BatchedSamples:
    prefill, steps = zip(*times, strict=True)
    return BatchedSamples(Samples(test.n_prompt_tokens, prefill), Samples(test.n_gen_tokens, steps))


def _bytes_on_device() -> int:
    return sum(array.nbytes for array in jax.live_arrays())
