"""Bytes that a step reads, worked by hand, and that the measurement reads what it says."""

import numpy as np
import pytest

from minfer_jax.bench import bandwidth as module
from minfer_jax.bench.bandwidth import bytes_per_token, read_bandwidth
from minfer_jax.bench.workload import Workload


@pytest.fixture
def hp(load_tiny):
    """Two layers, each with n_head_kv x (k + v) = `row` values a cell."""
    return load_tiny("llama-dense").model.hp


def row(hp):
    return hp.n_head_kv * (hp.head_dim_k + hp.head_dim_v)


def test_weights_once_and_the_cells_in_use(hp):
    # Steps at depth 10 see 11, 12, 13 and 14 cells: 12.5 on average.
    workload = Workload(n_gen=4, n_depth=10)
    kv = 2 * row(hp) * 2 * 12.5
    assert bytes_per_token(workload, 1_000_000, hp, 2) == 1_000_000 + kv
    assert bytes_per_token(workload, 0, hp, 4) == 2 * kv


def test_a_sliding_window_bounds_its_layers(load_tiny):
    hp = load_tiny("gemma3-dense").model.hp
    windows = [hp.window(il) for il in range(hp.n_layer)]
    n = 3 * max(windows)
    assert max(windows) > 0
    workload = Workload(n_gen=1, n_depth=n - 1)
    expected = sum(row(hp) * 2 * (window or n) for window in windows)
    assert bytes_per_token(workload, 0, hp, 2) == expected


@pytest.mark.parametrize("threads", [1, 3])
def test_every_byte_is_read_in_every_repetition(threads, monkeypatch):
    seen = []
    real = np.max

    def counting(part):
        seen.append(part.nbytes)
        return real(part)

    monkeypatch.setattr(module.np, "max", counting)
    ticks = iter(range(1000))
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(ticks))
    # The clock moves by a second a look, so each repetition takes one.
    assert read_bandwidth(threads, 1 << 20) == 1 << 20
    assert sum(seen) == module._REPETITIONS << 20 and len(seen) == module._REPETITIONS * 8 * threads
