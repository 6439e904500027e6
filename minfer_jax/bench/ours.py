"""Our side of a measurement: a context that is filled, rewound and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from minfer_jax.batch import Batch
from minfer_jax.context import Context
from minfer_jax.sampling import Sampler, SamplingParams

T = TypeVar("T")


def timed(context: Context, calls: Iterable[T], evaluate: Callable[[T], None]) -> int:
    """Nanoseconds of `evaluate` for all calls, without the building of graphs."""
    counters, perf = context.graphs.counters, context.perf()
    built, build_seconds = counters.built, perf.build_seconds
    started = time.perf_counter_ns()
    for call in calls:
        evaluate(call)
    elapsed = time.perf_counter_ns() - started
    if counters.built == built:  # to look a graph up that is there belongs to every step
        return elapsed
    return elapsed - round(1e9 * (perf.build_seconds - build_seconds))


class OurSide:
    """`abort` is asked before every call of a graph; `KeyboardInterrupt` is raised if it says yes.

    The clock leaves out the building of graphs, which `Context.perf()` reports apart.
    """

    def __init__(self, context: Context, *, abort: Callable[[], bool] = lambda: False) -> None:
        self.context = context
        self._abort = abort

    def fill(self, tokens: Sequence[int]) -> None:
        """A new sequence that holds `tokens`."""
        self.context.memory.clear()
        n_batch = self.context.n_batch
        for start in range(0, len(tokens), n_batch):
            self._decode(tokens[start : start + n_batch])

    def run(self, keep: int, tokens: Sequence[int], n_batch: int) -> int:
        """Go back to the first `keep` tokens, then evaluate `tokens`, `n_batch` a call.

        Nanoseconds of the evaluation. Every call waits for its logits.
        """
        self.context.memory.seq_rm(0, keep)
        calls = [tokens[i : i + n_batch] for i in range(0, len(tokens), n_batch)]
        return timed(self.context, calls, self._decode)

    def choosing(self, where: str) -> OurSide:
        """The same context, with the tokens of a run chosen: `host` or `loop`; "": as it is."""
        return {"": self, "host": HostSide(self), "loop": LoopSide(self)}[where]

    def _decode(self, tokens: Sequence[int]) -> None:
        code = self.context.decode(Batch(token=tokens), abort=self._abort)
        if code == 2:
            raise KeyboardInterrupt
        assert code == 0, "the context was made for the largest test"


class HostSide(OurSide):
    """Chooses each token on the host, from logits that it fetches, as a default request does."""

    def __init__(self, ours: OurSide) -> None:
        super().__init__(ours.context, abort=ours._abort)

    def run(self, keep: int, tokens: Sequence[int], n_batch: int) -> int:
        """As many tokens as `tokens`, of which only the first is fed as it is."""
        self.context.memory.seq_rm(0, keep)
        sampler = Sampler(SamplingParams())
        return timed(self.context, [len(tokens)], lambda n: self._generate(n, tokens[0], sampler))

    def _generate(self, n: int, token: int, sampler: Sampler) -> None:
        for _ in range(n):
            self._decode([token])
            token = sampler.sample(self.context.logits())


class LoopSide(HostSide):
    """Chooses tokens in the graph, in as many steps a call as there may be."""

    def _generate(self, n: int, token: int, sampler: Sampler) -> None:
        while n:
            if self._abort():
                raise KeyboardInterrupt
            code, chosen = self.context.decode_loop(Batch(token=[token]), [sampler], n)
            assert code == 0 and len(chosen), "the context was made for the largest test"
            n, token = n - len(chosen), int(chosen[-1, 0])
