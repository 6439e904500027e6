"""The run report, of a run with known figures."""

import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from minfer_jax.cli.report import RunReport
from minfer_jax.generate import GenerateStats, Generation
from minfer_jax.graph.cache import GraphCounters

STATS = GenerateStats(
    n_prompt=40,
    n_generated=11,
    prefill_s=0.5,
    decode_s=0.4,
    n_decoded=10,
    ttft_s=2.25,
    build_s=1.75,
)
COUNTERS = GraphCounters(
    reused=9,
    built=2,
    evicted=1,
    trace_seconds=0.5,
    compile_seconds=1.25,
    disk_hits=1,
    disk_misses=1,
    rebuilt_by=Counter({"first": 1, "n_tokens": 1}),
)


def report(stats: GenerateStats = STATS, counters: GraphCounters = COUNTERS) -> RunReport:
    lm: Any = SimpleNamespace(
        path="m.gguf",
        n_ctx=2048,
        counters=counters,
        model=SimpleNamespace(device=SimpleNamespace(platform="cpu")),
    )
    run = Generation(ids=[1, 2], finish_reason="stop", seed=42, stats=stats)
    return RunReport(lm=lm, run=run, text="Füchslein 🦊", load_seconds=0.125)


def test_lines_go_to_stderr(capfd):
    report().print(json=False)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "Prefill: 40 tokens in 0.50 s (80.0 t/s)",
        "Generated: 11 tokens in 0.40 s (25.0 t/s), 10 decode steps",
        "Time to first token: 2.25 s after 0.12 s of loading (1.75 s in all went to graphs)",
        "Graphs: 2 built (1 of them from disk), 9 reused, 1 evicted;"
        " built for: first 1, n_tokens 1",
        "Device: cpu; seed 42; stopped by stop",
    ]


def test_json_is_one_object_on_stdout(capfd):
    report().print(json=True)
    out, err = capfd.readouterr()
    assert err == "" and out.count("\n") == 1
    assert json.loads(out) == {
        "model": "m.gguf",
        "device": "cpu",
        "text": "Füchslein 🦊",
        "ids": [1, 2],
        "finish_reason": "stop",
        "seed": 42,
        "n_ctx": 2048,
        "n_prompt": 40,
        "n_generated": 11,
        "prefill_s": 0.5,
        "prefill_tps": 80.0,
        "decode_s": 0.4,
        "decode_tps": 25.0,
        "ttft_s": 2.25,
        "load_s": 0.125,
        "build_s": 1.75,
        "graphs": {
            "reused": 9,
            "built": 2,
            "evicted": 1,
            "trace_s": 0.5,
            "compile_s": 1.25,
            "disk_hits": 1,
            "disk_misses": 1,
            "rebuilt_by": {"first": 1, "n_tokens": 1},
        },
    }


@pytest.mark.parametrize("n_generated", [0, 1])
def test_a_run_without_decode_steps_divides_by_nothing(n_generated):
    lines = report(GenerateStats(n_generated=n_generated), GraphCounters()).lines()
    assert lines[1] == f"Generated: {n_generated} tokens in 0.00 s (0.0 t/s), 0 decode steps"
    assert lines[3].endswith("built for: nothing")
