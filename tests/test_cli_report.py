"""The run report, of a run with known figures."""

import copy
import json
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from test_cli_request import make_request

from minfer_jax.cli.report import FirstToken, RunReport
from minfer_jax.generate import GenerateStats, Generation
from minfer_jax.graph.cache import GraphCounters
from minfer_jax.lm import LoadSeconds
from minfer_jax.memory.plan import CacheSpec, MemoryPlan
from minfer_jax.sampling import SamplingParams
from minfer_jax.sampling.logprobs import TokenLogprobs, TopLogprob

STATS = GenerateStats(
    n_prompt=40,
    n_generated=11,
    prefill_s=0.5,
    decode_s=0.4,
    n_decoded=10,
    ttft_s=2.5,
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


CACHE = CacheSpec(
    layers=(0, 1),
    n_head_kv=2,
    head_dim_k=64,
    head_dim_v=64,
    types=("q8_0", "f16"),
    window=0,
    n_stream=1,
    stream_cells=2048,
    stream_size=2048,
    n_seq=1,
)
PLAN = MemoryPlan(caches=(CACHE,))
BEFORE = {"start": 0.25, "open": 0.5}


def model(counters: GraphCounters) -> Any:
    return SimpleNamespace(
        path="m.gguf",
        n_ctx=2048,
        counters=counters,
        memory_plan=PLAN,
        load_seconds=LoadSeconds(0.125, 0.25),
        model=SimpleNamespace(device=SimpleNamespace(platform="cpu")),
    )


def report(
    stats: GenerateStats = STATS,
    counters: GraphCounters = COUNTERS,
    before: Mapping[str, float] = BEFORE,
    logprobs: list[TokenLogprobs] | None = None,
    **asked: Any,
) -> RunReport:
    lm = model(counters)
    run = Generation(
        ids=[1, 2], finish_reason="stop", seed=42, stats=stats, logprobs=logprobs or []
    )
    stages = FirstToken(lm, run, before).stages()
    request = make_request(logprobs=None if logprobs is None else 2, **asked)
    return RunReport(lm=lm, request=request, run=run, text="Füchslein 🦊", stages=stages)


LOGPROBS = [
    TokenLogprobs(9, " \n", -0.5, [TopLogprob(9, " \n", -0.5), TopLogprob(7, "a", -1.25)]),
    TokenLogprobs(3, "x", float("-inf"), [TopLogprob(7, "a", -0.125)]),
]


def test_lines_go_to_stderr(capfd):
    report().print(json=False)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "Prefill: 40 tokens in 0.50 s (80.0 t/s)",
        "Generated: 11 tokens in 0.40 s (25.0 t/s), 10 decode steps",
        "Time to first token: 3.25 s = start 0.25 + open 0.50 + trace 0.50 + compile 1.25"
        " + prefill 0.50 + rest 0.25",
        "Graphs: 2 built (1 of them from disk), 9 reused, 1 evicted;"
        " built for: first 1, n_tokens 1",
        # 2 layers x 2 heads x (68 + 128) bytes
        "Memory: 1.5 MiB, K q8_0 and V f16, 0.8 KiB a token",
        "Sampling: top_k, top_p, min_p, temperature",
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
        "samplers": [
            "penalties",
            "dry",
            "top_n_sigma",
            "top_k",
            "typ_p",
            "top_p",
            "min_p",
            "xtc",
            "temperature",
        ],
        "in_graph": False,
        "grammar": None,
        "n_ctx": 2048,
        "memory": {
            "type_k": "q8_0",
            "type_v": "f16",
            "bytes_per_token": 784,
            "bytes_per_sequence": 0,
            "bytes": 784 * 2048,
        },
        "n_prompt": 40,
        "n_generated": 11,
        "prefill_s": 0.5,
        "prefill_tps": 80.0,
        "decode_s": 0.4,
        "decode_tps": 25.0,
        "ttft_s": 2.5,
        "load_s": 0.375,
        "build_s": 1.75,
        "stages": {
            "start": 0.25,
            "open": 0.5,
            "trace": 0.5,
            "compile": 1.25,
            "prefill": 0.5,
            "rest": 0.25,
        },
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
    assert lines[2].startswith("Time to first token: " if n_generated else "Start-up: ")


def test_graphs_of_later_tokens_are_left_out():
    """Asked before each step: the third one comes after the first token."""
    counters, stats = GraphCounters(), copy.copy(STATS)
    first = FirstToken(model(counters), Generation(stats=stats), {})
    stats.n_generated = 0
    first.watch()
    counters.built, counters.disk_hits, counters.compile_seconds = 1, 1, 0.75
    first.watch()
    stats.n_generated = 1
    first.watch()
    counters.built, counters.trace_seconds, counters.compile_seconds = 2, 0.25, 1.0
    first.watch()
    assert first.stages() == {"trace": 0.0, "load": 0.75, "prefill": 0.5, "rest": 1.25}


def test_samplers_that_are_off_are_left_out_and_a_grammar_is_named():
    grammar = SimpleNamespace(kind="gbnf")
    asked = {"samplers": ("penalties", "top_k", "temperature"), "presence_penalty": 1.0}
    made = report(sampling=SamplingParams(temp=0.0, **asked), grammar=grammar)
    assert made.lines()[-2] == "Sampling: penalties, greedy; grammar: gbnf"
    assert made.as_dict()["samplers"] == list(asked["samplers"])
    assert made.as_dict()["grammar"] == "gbnf"
    made = report(sampling=SamplingParams(temp=0.0, logit_bias=((1, 2.0),)))
    assert made.lines()[-2] == "Sampling: logit_bias, greedy"
    made.run.in_graph = True
    assert made.lines()[-2] == "Sampling: logit_bias, greedy; in the graph"
    assert made.as_dict()["in_graph"] is True


def test_logprobs_are_a_line_a_token():
    lines = report(logprobs=LOGPROBS).lines()
    assert lines[:2] == [
        "Logprob: -0.5000 9 ' \\n'; likeliest: ' \\n' -0.5000, 'a' -1.2500",
        "Logprob: -inf 3 'x'; likeliest: 'a' -0.1250",
    ]
    assert lines[2:] == report().lines()


def test_notes_on_the_grammar_in_json():
    made = report()
    assert "notes" not in made.as_dict()
    made.run.notes = ("a note",)
    assert made.as_dict()["notes"] == ["a note"]


def test_logprobs_in_json():
    assert "logprobs" not in report().as_dict()
    assert report(logprobs=[]).as_dict()["logprobs"] == []
    first, second = json.loads(json.dumps(report(logprobs=LOGPROBS).as_dict()))["logprobs"]
    assert first == {
        "id": 9,
        "text": " \n",
        "logprob": -0.5,
        "top": [
            {"id": 9, "text": " \n", "logprob": -0.5},
            {"id": 7, "text": "a", "logprob": -1.25},
        ],
    }
    assert second["logprob"] is None


def test_an_unknown_start_of_the_process_is_said():
    assert report(before={"open": 0.5}).lines()[2].endswith(" (without Python's own start)")
