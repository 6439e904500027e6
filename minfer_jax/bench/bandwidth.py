"""How fast this machine's memory can be read, and how much of it a decode step has to read."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from minfer_jax.bench.workload import Workload
from minfer_jax.memory.plan import MemoryPlan
from minfer_jax.models.hparams import HParams

READ_BYTES = 1 << 30

_PARTS = 8  # per thread, so that none waits long for another
_REPETITIONS = 7


def read_bandwidth(threads: int, nbytes: int = READ_BYTES) -> float:
    """Bytes per second that `threads` threads read from memory together, the median of several.

    Of numpy's reductions the maximum of integers is the one that memory alone holds up.
    """
    data = np.ones(nbytes // 8, np.uint64)  # written to, or all of it would be one page of zeros
    parts = np.array_split(data, _PARTS * threads)
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_REPETITIONS):
            started = time.perf_counter()
            list(pool.map(np.max, parts))
            seconds.append(time.perf_counter() - started)
    return data.nbytes / statistics.median(seconds)


def bytes_per_token(workload: Workload, weights: int, hp: HParams, plan: MemoryPlan) -> int:
    """Bytes that a step of a generation test has to move: `weights` once, the keys and values that
    its token sees, on average over the steps, and the sequence's states, read and written."""
    kv = 0.0
    for cache in plan.caches:
        per_layer = cache.bytes_per_cell / len(cache.layers)
        kv += sum(per_layer * _cells_seen(workload, hp.window(il)) for il in cache.layers)
    states = 2 * plan.recurrent.bytes_per_slot if plan.recurrent else 0
    return weights + round(kv) + states


def _cells_seen(workload: Workload, window: int) -> float:
    """Cells that a token sees, its own included, on average over the steps."""
    steps = range(workload.n_depth + 1, workload.n_ctx + 1)
    return sum(min(n, window or n) for n in steps) / len(steps)
