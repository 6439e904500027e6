"""The table and the rows of several sequences at once, worked by hand."""

import csv
import io
import json

import pytest

from minfer_jax.bench.batched import (
    BatchedMeasurement,
    BatchedSamples,
    BatchedTest,
    ForkCost,
)
from minfer_jax.bench.batched_report import (
    batched_foot_lines,
    batched_head_lines,
    batched_row,
    batched_table,
    fork_fields,
    speedup,
)
from minfer_jax.bench.report import as_csv, as_json
from minfer_jax.bench.samples import Samples

SETUP = {
    "backends": "JAX CPU",
    "model_filename": "/m.gguf",
    "n_ctx": 96,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_threads": 2,
    "flash_attn": 1,
    "n_gpu_layers": 0,
}
# llama-batched-bench's own, but for n_kv_max (our n_ctx) and n_threads_batch (our n_threads).
LLAMA_BATCHED_BENCH = {
    *("n_batch", "n_ubatch", "flash_attn", "is_pp_shared", "n_gpu_layers", "n_threads"),
    *("pp", "tg", "pl", "n_kv", "t_pp", "speed_pp", "t_tg", "speed_tg", "t", "speed"),
}
SECOND = 1_000_000_000
PEER = {"name": "llama.cpp", "version": "9.9"}


def row(n_seq=4, n_prompt=100, *, steps=(SECOND, SECOND, 2 * SECOND), shared=False, peer=None):
    test = BatchedTest(n_prompt=n_prompt, n_gen=50, n_seq=n_seq, shared=shared, unified=True)

    def samples(prefill, steps):
        return BatchedSamples(
            Samples(test.n_prompt_tokens, prefill), Samples(test.n_gen_tokens, steps)
        )

    measured = BatchedMeasurement(
        test=test,
        n_ctx=640,
        test_time="2026-01-02T03:04:05Z",
        ours=samples((SECOND // 2, SECOND // 2, SECOND // 4), steps),
        peer=samples((SECOND, SECOND, SECOND), (4 * SECOND,) * 3) if peer else None,
        compile_s=1.25,
        graphs_built=2,
        graphs_evicted=1,
    )
    return batched_row(SETUP, measured, peer)


def test_a_row_has_llama_batched_benchs_keys_and_ours():
    made = row()
    assert made.keys() >= LLAMA_BATCHED_BENCH
    assert (made["pp"], made["tg"], made["pl"], made["n_kv"]) == (100, 50, 4, 600)
    assert (made["is_pp_shared"], made["kv_unified"], made["n_ctx"]) == (0, 1, 640)
    # 400 tokens in 0.5, 0.5, 0.25 s; 200 in 1, 1, 2 s; 600 in 1.5, 1.5, 2.25 s.
    assert (made["t_pp"], made["t_tg"], made["t"]) == (0.5, 1.0, 1.5)
    assert (made["speed_pp"], made["speed_tg"], made["speed"]) == (800.0, 200.0, 400.0)
    # Of 800, 800, 1600; of 200, 200, 100; of 400, 400, 266.67: the spread over the root of 3.
    assert made["stddev_speed_pp"] == pytest.approx(800 / 3**0.5)
    assert made["stddev_speed_tg"] == pytest.approx(100 / 3**0.5)
    assert made["stddev_speed"] == pytest.approx(400 / 3 / 3**0.5)
    assert made["samples_pp_ns"] == [SECOND // 2, SECOND // 2, SECOND // 4]
    assert made["samples_tg_ns"] == [SECOND, SECOND, 2 * SECOND]
    assert (made["compile_s"], made["graphs_built"], made["graphs_evicted"]) == (1.25, 2, 1)
    assert "peer" not in made


def test_a_shared_prompt_is_counted_once():
    made = row(shared=True)
    assert (made["is_pp_shared"], made["n_kv"]) == (1, 100 + 4 * 50)
    assert (made["speed_pp"], made["speed_tg"], made["speed"]) == (200.0, 200.0, 200.0)


def test_the_ratios_are_of_medians():
    peer = row(peer=PEER)["peer"]
    assert (peer["name"], peer["version"]) == ("llama.cpp", "9.9")
    assert (peer["speed_pp"], peer["speed_tg"], peer["t"]) == (400.0, 50.0, 5.0)
    assert (peer["ratio_pp"], peer["ratio_tg"]) == (2.0, 4.0)


def test_the_speedup_is_over_one_sequence_of_the_same_lengths():
    one, other = row(1), row(1, 30, steps=(9 * SECOND,) * 3)
    assert speedup(one, []) == 1.0
    assert speedup(row(4), [other, one]) == 200 / 50
    assert speedup(row(4, 30), [one, other]) == 200 / (50 / 9)
    assert speedup(row(4), [other]) is None


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_has_llama_batched_benchs_columns():
    table = batched_table(peer=None, with_speedup=False)
    head, rule = table.head()
    assert cells(head) == [
        *("PP", "TG", "B", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s", "T s", "S t/s"),
    ]
    lines = [head, rule, table.row(row())]
    assert len({len(line) for line in lines}) == 1
    assert all(cell.endswith("-:") for cell in cells(rule))
    assert cells(lines[2]) == [
        *("100", "50", "4", "600", "0.500", "800.00 ± 461.88"),
        *("1.000", "200.00 ± 57.74", "1.500", "400.00 ± 76.98"),
    ]


def test_the_table_with_a_peer_and_the_speedup():
    table = batched_table(peer="llama.cpp", with_speedup=True)
    assert cells(table.head()[0])[10:] == [
        *("llama.cpp S_PP", "ratio", "llama.cpp S_TG", "ratio", "x B=1"),
    ]
    line = table.row({**row(peer=PEER), "speedup": 3.456})
    assert cells(line)[10:] == ["400.00", "2.00x", "50.00", "4.00x", "3.46x"]


def test_the_head_says_what_all_lines_have_in_common():
    assert batched_head_lines(SETUP, shared=False, unified=False, peer=None) == [
        "batched: a prompt for each sequence, a stream for each sequence; JAX CPU, 2 threads,"
        " n_batch 2048, n_ubatch 512"
    ]
    shared, peer = batched_head_lines(SETUP, shared=True, unified=True, peer=PEER)
    assert shared.startswith("batched: one prompt for all sequences, unified cells; ")
    assert peer == "peer: llama.cpp 9.9"


FORK = ForkCost(n_tokens=1000, n_seq=8, ns=(90_000, 20_000, 50_000), nbytes=4096)


def test_a_forks_cost_is_a_line_and_a_value_of_the_row():
    made = {**row(), "peak_memory_bytes": 300 << 20, "fork": fork_fields(FORK)}
    assert made["fork"] == {
        **{"n_tokens": 1000, "n_seq": 8, "median_ns": 50_000, "bytes": 4096},
        "samples_ns": [90_000, 20_000, 50_000],
    }
    assert batched_foot_lines([made, made]) == [
        "peak memory: 300.00 MiB",
        "graphs: 4 built in 2.50 s (in no other figure), 2 evicted",
        "fork: seq_cp of 1000 tokens to 8 sequences in unified cells: 0.050 ms,"
        " 4096 bytes allocated",
    ]


def test_without_a_fork_there_is_no_such_line():
    assert [line.split(":")[0] for line in batched_foot_lines([row()])] == ["graphs"]


def test_json_and_csv_have_it_all():
    made = {**row(peer=PEER), "speedup": 1.5, "fork": fork_fields(FORK)}
    assert json.loads(as_json([made])) == [made]
    [line] = csv.DictReader(io.StringIO(as_csv([made])))
    assert (line["speed_tg"], line["peer_ratio_tg"], line["fork_bytes"]) == ("200.0", "4.0", "4096")
