"""How fast this machine's memory can be read, and how much of it a decode step has to read."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from minfer_jax.bench.workload import Workload
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


def bytes_per_token(workload: Workload, weights: int, hp: HParams, kv_itemsize: int) -> int:
    """Bytes that a step of a generation test has to read: `weights` once, and the keys and values
    that its token sees, on average over the steps."""
    steps = range(
        workload.n_depth + 1, workload.n_ctx + 1
    )  # cells in use, the token's own included
    per_layer = hp.kv_bytes_per_cell(kv_itemsize) / hp.n_layer
    windows = Counter(hp.window(il) or workload.n_ctx for il in range(hp.n_layer))
    cells = 0.0
    for window, layers in windows.items():
        cells += layers * sum(min(n, window) for n in steps) / len(steps)
    return weights + round(cells * per_layer)
