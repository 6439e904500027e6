"""Bytes that a step reads, worked by hand, and that the measurement reads what it says."""

import numpy as np
import pytest

from minfer_jax.bench import bandwidth as module
from minfer_jax.bench.bandwidth import bytes_per_token, read_bandwidth
from minfer_jax.bench.workload import Workload
from minfer_jax.gguf import open_gguf
from minfer_jax.memory.plan import plan_memory
from minfer_jax.models.registry import architecture

DEEP = Workload(n_gen=4, n_depth=10)
"""Its steps see 11, 12, 13 and 14 cells: 12.5 on average."""


@pytest.fixture
def hp_of(tiny_path):
    """The hyperparameters of a tiny model."""

    def hp_of(name):
        file = open_gguf(tiny_path(name))
        return architecture(file).hparams(file)

    return hp_of


def row(hp):
    """Values of a cell in one layer."""
    return hp.n_head_kv * (hp.head_dim_k + hp.head_dim_v)


def test_weights_once_and_the_cells_in_use(hp_of):
    hp = hp_of("llama-dense")
    f16, f32 = (plan_memory(hp, n_ctx=64, types=(kind, kind)) for kind in ("f16", "f32"))
    kv = 2 * row(hp) * 2 * 12.5
    assert bytes_per_token(DEEP, 1_000_000, hp, f16) == 1_000_000 + kv
    assert bytes_per_token(DEEP, 0, hp, f32) == 2 * kv


@pytest.mark.parametrize(("swa_full", "n_cache"), [(False, 2), (True, 1)])
def test_a_sliding_window_bounds_its_layers(hp_of, swa_full, n_cache):
    """Whether they have a smaller cache of their own or not."""
    hp = hp_of("gemma3-dense")
    windows = [hp.window(il) for il in range(hp.n_layer)]
    n = 3 * max(windows) + 1000
    assert max(windows) > 0
    plan = plan_memory(hp, n_ctx=n, swa_full=swa_full, n_ubatch=1)
    assert len(plan.caches) == n_cache
    workload = Workload(n_gen=1, n_depth=n - 1)
    expected = sum(row(hp) * 2 * (window or n) for window in windows)
    assert bytes_per_token(workload, 0, hp, plan) == expected


def test_of_layers_that_do_not_attend_the_states_are_read_and_written(hp_of):
    hp = hp_of("jamba-dense")  # one layer of either kind
    plan = plan_memory(hp, n_ctx=64)
    states = 4 * (3 * 512 + 128 * 512)
    assert bytes_per_token(DEEP, 100, hp, plan) == 100 + row(hp) * 2 * 12.5 + 2 * states


def test_latent_attention_reads_one_vector_a_cell(hp_of):
    hp = hp_of("deepseek2-moe")
    plan = plan_memory(hp, n_ctx=64)
    assert plan.caches[0].v_in_k
    assert bytes_per_token(DEEP, 0, hp, plan) == hp.n_layer * hp.head_dim_k * 2 * 12.5


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
