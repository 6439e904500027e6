"""Which tests are run, in which order, and what they are called."""

import pytest

from minfer_jax.bench.workload import Workload, plan, random_tokens


@pytest.mark.parametrize(
    ("workload", "name", "n_ctx", "n_batch", "n_warm"),
    [
        (Workload(n_prompt=512), "pp512", 512, 512, 512),
        (Workload(n_gen=128), "tg128", 128, 1, 8),
        (Workload(n_gen=3), "tg3", 3, 1, 3),
        (Workload(n_gen=3, sampling="loop"), "tg3 loop", 3, 1, 3),
        (Workload(n_prompt=512, n_depth=1024), "pp512 @ d1024", 1536, 512, 512),
        (Workload(n_gen=64, n_depth=1500), "tg64 @ d1500", 1564, 1, 8),
    ],
)
def test_a_workload(workload, name, n_ctx, n_batch, n_warm):
    assert workload.name == name
    assert (workload.n_ctx, workload.n_batch, workload.n_warm) == (n_ctx, n_batch, n_warm)
    assert workload.n_tokens == n_ctx - workload.n_depth


def test_the_order_is_llama_benchs():
    names = [w.name for w in plan((128, 512), (16,), (0, 64))]
    assert names == ["pp128", "pp512", "tg16", "pp128 @ d64", "pp512 @ d64", "tg16 @ d64"]


def test_each_generation_in_every_way_of_choosing():
    names = [w.name for w in plan((128,), (16, 8), (0,), sampling=("", "host"))]
    assert names == ["pp128", "tg16", "tg16 host", "tg8", "tg8 host"]


def test_0_stands_for_no_test():
    assert [w.name for w in plan((0,), (16,), (0,))] == ["tg16"]
    assert plan((0,), (0,), (0, 5)) == []


def test_random_tokens_are_ids_and_the_same_in_every_run():
    tokens = random_tokens(1000, 50)
    assert set(tokens) == set(range(50)) and all(type(t) is int for t in tokens)
    # A shorter test reads the beginning of the same sequence.
    assert random_tokens(10, 50) == tokens[:10]
