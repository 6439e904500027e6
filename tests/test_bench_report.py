"""The three formats, from rows that are worked by hand."""

import csv
import io
import json

import pytest

from minfer_jax.bench.profile import Node, Profile
from minfer_jax.bench.report import (
    as_csv,
    as_json,
    as_row,
    bench_table,
    foot_lines,
    head_lines,
    profile_lines,
)
from minfer_jax.bench.run import Measurement
from minfer_jax.bench.samples import Samples
from minfer_jax.bench.workload import Workload

SETUP = {
    "build_commit": "0.1.0",
    "cpu_info": "Some CPU",
    "cpu_flags": "avx2",
    "load_average": 0.25,
    "gpu_info": "",
    "backends": "JAX CPU",
    "jax_version": "0.10.2",
    "jaxlib_version": "0.10.3",
    "flags": "-p 100",
    "model_filename": "/m.gguf",
    "model_type": "llama 135M Q4_1",
    "model_size": 96576768,
    "model_n_params": 134515008,
    "n_ctx": 164,
    "n_ubatch": 512,
    "n_threads": 2,
    "type_k": "f16",
    "type_v": "f16",
    "n_gpu_layers": 0,
    "flash_attn": 1,
    "exact": False,
}
# llama-bench's own, as far as they have a meaning here.
LLAMA_BENCH = {
    *("build_commit", "cpu_info", "gpu_info", "backends", "model_filename", "model_type"),
    *("model_size", "model_n_params", "n_ubatch", "n_threads", "type_k", "type_v"),
    *("n_gpu_layers", "flash_attn"),
    *("n_prompt", "n_gen", "n_depth", "test_time"),
    *("avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "samples_ns", "samples_ts"),
}


def row(workload=None, *, peer=None, **totals):
    workload = workload or Workload(n_gen=64, n_depth=100)
    second = 1_000_000_000
    measured = Measurement(
        workload=workload,
        test_time="2026-01-02T03:04:05Z",
        ours=Samples(workload.n_tokens, (second, second, 2 * second)),
        peer=Samples(workload.n_tokens, (4 * second, 2 * second, 2 * second)) if peer else None,
        compile_s=1.25,
        graphs_built=2,
        graphs_evicted=1,
    )
    return {**as_row(SETUP, measured, peer), **totals}


PEER = {"name": "llama.cpp", "version": "9.9"}


def test_a_row_has_llama_benchs_keys_and_ours():
    made = row()
    assert made.keys() >= LLAMA_BENCH
    assert (made["n_prompt"], made["n_gen"], made["n_depth"]) == (0, 64, 100)
    assert (made["median_ts"], made["samples_ts"]) == (64.0, [64.0, 64.0, 32.0])
    assert (made["compile_s"], made["graphs_built"], made["graphs_evicted"]) == (1.25, 2, 1)
    assert "peer" not in made


def test_the_ratio_is_of_medians():
    peer = row(peer=PEER)["peer"]
    assert (peer["name"], peer["version"]) == ("llama.cpp", "9.9")
    assert (peer["median_ts"], peer["ratio"]) == (32.0, 2.0)
    assert peer["samples_ts"] == [16.0, 32.0, 32.0]


def test_json_is_a_list_of_objects():
    rows = [row(), row(peer=PEER)]
    assert json.loads(as_json(rows)) == rows


def test_csv_is_the_same_flat():
    made = row(peer=PEER)
    [line] = csv.DictReader(io.StringIO(as_csv([made])))
    assert line["model_type"] == "llama 135M Q4_1" and line["median_ts"] == "64.0"
    assert line["samples_ts"] == "64.0 64.0 32.0"
    assert (line["peer_name"], line["peer_ratio"]) == ("llama.cpp", "2.0")
    assert line.keys() == made.keys() - {"peer"} | {f"peer_{key}" for key in made["peer"]}


def test_a_loops_gain_is_that_over_the_host_at_the_same_size():
    rows = [
        row(Workload(n_gen=n, n_depth=depth, sampling=way), median_ts=ts)
        for n, depth, way, ts in [
            *((64, 0, "", 90.0), (64, 0, "host", 50.0), (64, 0, "loop", 75.0)),
            *((64, 8, "host", 40.0), (64, 8, "loop", 44.0), (32, 0, "loop", 1.0)),
        ]
    ]
    gains = [line for line in foot_lines(rows) if " of " in line and "x of" in line]
    assert gains == [
        "tg64 loop: 1.50x of tg64 host",
        "tg64 loop @ d8: 1.10x of tg64 host @ d8",
    ]


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_has_llama_benchs_columns():
    table = bench_table(show_ubatch=False, peer=None)
    head, rule = table.head()
    assert cells(head) == [
        *("model", "size", "params", "backend", "threads", "test", "t/s", "median"),
    ]
    lines = [head, rule, table.row(row(Workload(n_prompt=100)))]
    assert len({len(line) for line in lines}) == 1
    assert cells(rule)[0].strip("-") == "" and cells(rule)[1].endswith("-:")
    assert cells(lines[2]) == [
        *("llama 135M Q4_1", "92.10 MiB", "134.52 M", "JAX CPU", "2", "pp100"),
        *("83.33 ± 28.87", "100.00"),
    ]


def test_the_table_with_a_peer_and_another_ubatch():
    table = bench_table(show_ubatch=True, peer="llama.cpp 9.9")
    assert cells(table.head()[0])[5:] == [
        *("n_ubatch", "test", "t/s", "median", "llama.cpp 9.9", "ratio"),
    ]
    assert cells(table.row(row(peer=PEER)))[5:] == [
        *("512", "tg64 @ d100", "53.33 ± 18.48", "64.00", "32.00", "2.00x"),
    ]


def test_large_models_are_counted_in_billions():
    large = {**row(), "model_size": 3 << 30, "model_n_params": 7_240_000_000}
    assert cells(bench_table(show_ubatch=False, peer=None).row(large))[1:3] == [
        "3.00 GiB",
        "7.24 B",
    ]


def test_the_head_names_machine_versions_model_and_flags():
    assert head_lines(SETUP) == [
        "machine: Some CPU (avx2); load 0.25 before",
        "versions: minfer-jax 0.1.0, jax 0.10.2, jaxlib 0.10.3",
        "model: /m.gguf; KV f16/f16",
        "flags: -p 100",
    ]
    other = head_lines(
        {**SETUP, "gpu_info": "H200", "cpu_flags": "", "load_average": None, "exact": True}
    )
    assert other[0] == "machine: Some CPU (flags unknown); H200"
    assert other[2].endswith("KV f16/f16, exact")


def test_the_foot_has_memory_graphs_and_bandwidth():
    totals = {"peak_memory_bytes": 300 << 20, "bandwidth_gbs": 40.0}
    prompt = row(Workload(n_prompt=100), **totals, bytes_per_token=None, bandwidth_fraction=None)
    gen = row(**totals, bytes_per_token=100_000_000, bandwidth_fraction=0.16)
    assert foot_lines([prompt, gen]) == [
        "peak memory: 300.00 MiB",
        "graphs: 4 built in 2.50 s (in no other figure), 2 evicted",
        "tg64 @ d100, 2 threads: 100.0 MB a token x 64.00 t/s = 6.40 GB/s,"
        " 16% of the 40.0 GB/s that they read",
    ]


@pytest.mark.parametrize("peak", [None, 0])
def test_a_system_that_does_not_tell_the_peak(peak):
    assert foot_lines([row(peak_memory_bytes=peak)])[0].startswith("graphs:")


def test_the_profile_is_a_table_whose_shares_add_up():
    nodes = (Node("blk.*/ffn_down", 30.0, 6000.0), Node("output", 2.0, 3000.0))
    profile = Profile(
        n_depth=7, steps=16, step_us=9500.0, traced_us=10000.0, nodes=nodes, idle_us=1000.0
    )
    title, blank, head, _, *rows = profile_lines(profile)
    assert title == (
        "decode step at depth 7: 9.500 ms; 10.000 ms while traced, as below; mean of 16 steps"
    )
    assert blank == "" and cells(head) == ["node", "calls", "us per step", "% of step"]
    assert [cells(line) for line in rows] == [
        ["blk.*/ffn_down", "30.0", "6000.0", "60.0"],
        ["output", "2.0", "3000.0", "30.0"],
        ["(no node running)", "", "1000.0", "10.0"],
    ]
