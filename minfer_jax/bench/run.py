"""One test: fill to the depth, warm up, then timed repetitions, in turns with the peer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from minfer_jax.bench.ours import OurSide
from minfer_jax.bench.samples import Samples
from minfer_jax.bench.workload import Workload

REST_SECONDS = 0.05  # idle threads of the side that had its turn spin for a while


class Side(Protocol):
    """Whoever computes. `OurSide` says what is expected."""

    def fill(self, tokens: Sequence[int]) -> None: ...

    def run(self, keep: int, tokens: Sequence[int], n_batch: int) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one test gave."""

    workload: Workload
    test_time: str
    """When it began: RFC 3339, UTC."""
    ours: Samples
    peer: Samples | None
    compile_s: float
    """Seconds that getting graphs took (tracing, compiling, loading); in no other figure."""
    graphs_built: int
    graphs_evicted: int


def measure(
    workload: Workload,
    tokens: Sequence[int],
    *,
    ours: OurSide,
    peer: Side | None = None,
    repetitions: int,
) -> Measurement:
    """Run one test. `tokens` are as many as it needs: depth first, then those under the clock.

    Only one side computes at a time, and each repetition starts from the same tokens.
    """
    began = datetime.now(UTC)
    counters, perf = ours.context.graphs.counters, ours.context.perf()
    built, evicted, seconds = counters.built, counters.evicted, perf.build_seconds
    depth, timed = workload.n_depth, tokens[workload.n_depth :]
    own = ours.choosing(workload.sampling)
    sides: list[Side] = [own] if peer is None else [own, peer]
    times: list[list[int]] = [[] for _ in sides]
    for side in sides:
        side.fill(tokens[:depth])
        side.run(depth, timed[: workload.n_warm], workload.n_batch)
    for _ in range(repetitions):
        for side, ns in zip(sides, times, strict=True):
            if peer is not None:
                time.sleep(REST_SECONDS)
            ns.append(side.run(depth, timed, workload.n_batch))
    samples = [Samples(workload.n_tokens, tuple(ns)) for ns in times]
    return Measurement(
        workload=workload,
        test_time=began.strftime("%Y-%m-%dT%H:%M:%SZ"),
        ours=samples[0],
        peer=None if peer is None else samples[1],
        compile_s=perf.build_seconds - seconds,
        graphs_built=counters.built - built,
        graphs_evicted=counters.evicted - evicted,
    )
