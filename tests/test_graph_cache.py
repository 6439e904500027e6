"""The table of 8: hits, order, eviction, reasons, and that evicted executables are freed."""

import gc

import jax
import jax.numpy as jnp
import pytest

from minfer_jax.graph.cache import CAPACITY, GraphCache, trace_build
from minfer_jax.graph.compile import CompiledGraph, compile_step
from minfer_jax.graph.params import CParams, GraphParams, GType


def params(n_tokens: int = 32, **other) -> GraphParams:
    fields = {"n_out": 1, "gtype": GType.PREFILL, "cparams": CParams(n_ctx=64), **other}
    return GraphParams(n_tokens=n_tokens, **fields)


def fake_build(p: GraphParams) -> CompiledGraph:
    return CompiledGraph(lambda *_: (None, None), 0.25, 0.5, disk_hits=1, disk_misses=0)


def test_a_hit_is_the_same_entry_and_moves_to_the_front():
    cache = GraphCache(fake_build)
    first, second = cache.get(params(1)), cache.get(params(32))
    assert [e.params.n_tokens for e in cache.entries] == [32, 1]
    assert cache.get(params(1)) is first
    assert [e.params.n_tokens for e in cache.entries] == [1, 32]
    assert (cache.counters.built, cache.counters.reused) == (2, 1)
    assert first.uid != second.uid


def test_the_ninth_shape_evicts_the_least_recently_used():
    cache = GraphCache(fake_build)
    uids = {n: cache.get(params(n)).uid for n in range(1, CAPACITY + 1)}
    cache.get(params(1))  # 2 is now the oldest
    cache.get(params(99))
    assert len(cache) == CAPACITY == 8
    assert cache.counters.evicted == 1
    assert cache.get(params(1)).uid == uids[1]
    assert cache.get(params(2)).uid > max(uids.values())  # built again under a new uid


def test_reasons_are_the_fields_that_differ_from_the_nearest_graph():
    told = []
    cache = GraphCache(fake_build, on_build=lambda entry, why: told.append((entry.uid, why)))
    cache.get(params(32))
    cache.get(params(1, gtype=GType.DECODE))
    cache.get(params(128))  # nearest to the first: only n_tokens differs
    cache.get(params(128, weights_version=1))
    assert [why for _, why in told] == ["first", "n_tokens, gtype", "n_tokens", "weights_version"]
    assert cache.counters.rebuilt_by == {
        "first": 1,
        "n_tokens": 2,
        "gtype": 1,
        "weights_version": 1,
    }


def test_counters_add_up():
    cache = GraphCache(fake_build)
    for n in (1, 2, 1):
        cache.get(params(n))
    assert cache.counters.as_dict() == {
        "reused": 1,
        "built": 2,
        "evicted": 0,
        "trace_s": 0.5,
        "compile_s": 1.0,
        "disk_hits": 2,
        "disk_misses": 0,
        "rebuilt_by": {"first": 1, "n_tokens": 1},
    }


def test_without_reuse_every_call_builds():
    cache = GraphCache(fake_build, reuse=False)
    uids = [cache.get(params()).uid for _ in range(3)]
    assert len(set(uids)) == 3
    assert cache.counters.rebuilt_by == {"first": 1, "reuse disabled": 2}


def test_a_failed_build_leaves_the_table_usable():
    def build(p: GraphParams) -> CompiledGraph:
        if p.n_tokens == 13:
            raise RuntimeError("no memory")
        return fake_build(p)

    cache = GraphCache(build)
    cache.get(params(1))
    with pytest.raises(RuntimeError):
        cache.get(params(13))
    assert cache.get(params(1)).params.n_tokens == 1
    assert cache.counters.built == 1


def test_trace_line(capsys):
    cache = GraphCache(fake_build, on_build=trace_build)
    entry = cache.get(params(7))
    line = capsys.readouterr().err
    assert line.startswith(f"graph {entry.uid} built because of first: n_tokens=7 ")
    assert "loaded from disk in 0.50 s" in line


def live_executables() -> int:
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


def test_evicted_executables_are_freed():
    """A jit object that is shared between entries would keep all of them alive."""

    def make_step():
        def step(p, weights, kv, rows, out_rows):
            return jnp.sum(weights) * p.n_tokens, kv + 1.0

        return step

    def build(p: GraphParams) -> CompiledGraph:
        f32, i32 = (
            jax.ShapeDtypeStruct((4,), jnp.float32),
            jax.ShapeDtypeStruct((5, p.n_tokens), jnp.int32),
        )
        return compile_step(make_step, p, (f32, f32, i32, i32))

    cache = GraphCache(build, capacity=2)
    before = live_executables()
    for n in range(1, 7):
        cache.get(params(n))
    assert live_executables() == before + 2
    del cache
    assert live_executables() == before
