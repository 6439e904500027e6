"""`bench --batched` end to end on a tiny model: flags, formats, peer, refusals, Ctrl-C."""

import csv
import io
import json
import os
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
from fake_llama import read_log, write_fake_llama
from test_cli_main import run_cli

from minfer_jax.cli import bench_batched as module
from minfer_jax.cli import session
from minfer_jax.cli.bench_batched import BatchedRequest
from minfer_jax.errors import MinferError, UsageError

TINY = ("-npp", "6", "-ntg", "2", "-npl", "1,3", "-r", "2")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """One cache of graphs for all runs."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def environment(home, monkeypatch):
    for name in [name for name in os.environ if name.startswith("MINFER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MINFER_HOME", str(home))


@pytest.fixture
def model(tiny_path):
    return str(tiny_path("llama-dense"))


@pytest.fixture
def bench(model, capfd):
    """Runs a few short tests."""

    def run(*argv):
        return run_cli(capfd, "bench", "--batched", "-m", model, *TINY, *argv)

    return run


@pytest.fixture
def fake_peer(tmp_path, monkeypatch):
    """A llama_cpp for the worker; what it was asked."""
    log = write_fake_llama(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("FAKE_LLAMA_LOG", str(log))
    return log


def request(**changes):
    fields = {
        "model": None,
        "n_pp": (128,),
        "n_tg": (128,),
        "n_pl": (1, 2, 4, 8),
        "pp_shared": False,
        "kv_unified": False,
        "n_ctx": None,
        "repetitions": 5,
        "threads": None,
        "n_ubatch": 512,
        "exact": False,
        "device": "auto",
        "output": "md",
        "peer": None,
        "peer_python": None,
    }
    return BatchedRequest(**{**fields, **changes})


@pytest.fixture
def request_of(monkeypatch, capfd):
    """From the arguments to the request; nothing runs."""
    seen = []
    monkeypatch.setattr(module, "run_batched", lambda request: seen.append(request) or 0)

    def parse(*argv):
        assert run_cli(capfd, "bench", *argv) == (0, "", "")
        return seen.pop()

    return parse


@pytest.mark.parametrize(
    ("argv", "changes"),
    [
        ([], {}),
        (["-npp", "128,512", "-npp", "7"], {"n_pp": (128, 512, 7)}),
        (["-ntg", "1", "-npl", "1,256"], {"n_tg": (1,), "n_pl": (1, 256)}),
        (["-pps"], {"pp_shared": True}),
        (["--kv-unified", "-c", "4096"], {"kv_unified": True, "n_ctx": 4096}),
        (["-r", "3", "-t", "2", "-ub", "64"], {"repetitions": 3, "threads": 2, "n_ubatch": 64}),
        (["-m", "x.gguf", "--exact"], {"model": "x.gguf", "exact": True}),
        (["-o", "csv", "--device", "cpu"], {"output": "csv", "device": "cpu"}),
        (
            ["--peer", "llama.cpp", "--peer-python", "py"],
            {"peer": "llama.cpp", "peer_python": "py"},
        ),
    ],
)
def test_flags_reach_the_request_and_are_reported_as_such(argv, changes, request_of):
    asked = request_of("--batched", *argv)
    assert asked == request(**changes)
    assert request_of(*asked.argv()) == replace(asked, output="md")


def test_a_context_can_have_as_many_sequences():
    from minfer_jax.limits import MAX_SEQUENCES

    assert module.MOST_SEQUENCES == MAX_SEQUENCES


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["-npp", "0"], "-npp is 0; allowed: 1 to 1048576"),
        (["-npp", "4,x"], "-npp is 'x'; allowed: integers, separated by commas"),
        (["-ntg", "0"], "-ntg is 0; allowed: 1 to 1048576"),
        (["-npl", "1,257"], "-npl is 257; allowed: 1 to 256"),
        (["-npl", "-1"], "-npl is -1; allowed: 1 to 256"),
        (["-c", "0"], "-c/--n-ctx is 0; allowed: 1 to 16777216"),
        (["-c", "9" * 30], "-c/--n-ctx is 999"),
        (["-r", "1001"], "-r/--repetitions is 1001; allowed: 1 to 1000"),
        (["-ub", "0"], "-ub/--n-ubatch is 0; allowed: 1 to 65536"),
        (["-t", "0"], "-t/--threads is 0; allowed: 1 to 1024"),
        (["-o", "jsonl"], "-o/--output is 'jsonl'; allowed: md, csv, json"),
        (["--peer", "vllm"], "--peer is 'vllm'; allowed: llama.cpp"),
        (["--peer-python", "py"], "--peer-python needs --peer"),
        (["-p", "8"], "--batched has tests of its own: leave -p (its prompts are -npp) out"),
        (["-n", "8"], "leave -n (its steps are -ntg) out"),
        (["-d", "8"], "leave -d out"),
        (["--sweep", "depth", "--values", "1"], "leave --sweep out"),
        (["--plot", "x.png"], "leave --plot out"),
        (["--profile"], "leave --profile out"),
        (["-npp", "250", "-ntg", "7"], "pp250 tg7 x1 needs sequences of 257 tokens, this model's"),
        (
            ["-npp", "6,9", "-ntg", "4,5", "-npl", "3,2", "-c", "41"],
            "pp9 tg5 x3 needs a context of 42 tokens, -c/--n-ctx is 41: lower -npp, -ntg or -npl,"
            " or raise -c",
        ),
        (
            ["-npp", "9", "-ntg", "5", "-npl", "3", "-pps", "--kv-unified", "-c", "23"],
            "pp9 tg5 x3 needs a context of 24 tokens, -c/--n-ctx is 23",
        ),
        (["--device", "nonsense", *TINY], "--device nonsense: jax finds no such device here"),
        (["--peer", "llama.cpp", "--peer-python", "/no/py", *TINY], "/no/py: no such program"),
    ],
)
def test_bad_usage_is_one_line(argv, words, model, capfd):
    result = run_cli(capfd, "bench", "--batched", "-m", model, *argv)
    assert (result.code, result.out) == (2, "")
    assert words in result.error


def test_more_cells_than_any_context_has(model, capfd, monkeypatch):
    monkeypatch.setattr(module, "MOST_CELLS", 15)
    result = run_cli(capfd, "bench", "--batched", "-m", model, *TINY)
    assert (result.code, result.out) == (2, "")
    assert result.error == (
        "pp6 tg2 x3 needs a context of 24 tokens, allowed are at most 15: lower -npp, -ntg or -npl"
    )


def test_what_memory_does_not_hold_is_refused_before_any_compute(bench, monkeypatch):
    from minfer_jax.bench.batched import OurBatchedSide
    from minfer_jax.context import Context

    def open_context(self, *, n_ctx, n_seq_max, kv_unified):
        if n_ctx == 24:
            raise UsageError("too large")

    monkeypatch.setattr(OurBatchedSide, "open", open_context)
    monkeypatch.setattr(Context, "decode", None)
    result = bench()
    assert (result.code, result.out, result.error) == (2, "", "too large")


def test_the_table_and_what_stands_round_it(bench):
    result = bench()
    assert (result.code, result.err) == (0, "")
    head, table, foot = result.out.split("\n\n")
    assert [line.split(":")[0] for line in head.splitlines()] == [
        *("machine", "versions", "model", "flags", "batched"),
    ]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert rows[0][:4] == ["PP", "TG", "B", "N_KV"] and rows[0][-1] == "x B=1"
    assert [row[:4] for row in rows[2:]] == [["6", "2", "1", "8"], ["6", "2", "3", "24"]]
    assert rows[2][-1] == "1.00x"
    lines = foot.splitlines()
    assert [line.split(":")[0] for line in lines] == ["peak memory", "graphs", "fork"]
    assert lines[2].startswith("fork: seq_cp of 6 tokens to 8 sequences in unified cells: ")


def test_json_is_a_list_with_every_figure(bench):
    result = bench("-o", "json", "-pps")
    assert (result.code, result.err) == (0, "")
    one, three = json.loads(result.out)
    for row, b in ((one, 1), (three, 3)):
        assert (row["pp"], row["tg"], row["pl"], row["n_kv"]) == (6, 2, b, 8 * b)
        assert (row["n_ctx"], row["n_batch"], row["n_ubatch"]) == (8 * b, 2048, 512)
        assert (row["is_pp_shared"], row["kv_unified"]) == (1, 0)
        assert len(row["samples_pp_ns"]) == len(row["samples_tg_ns"]) == 2
        speeds = [1e9 * 2 * b / ns for ns in row["samples_tg_ns"]]
        assert row["speed_tg"] == pytest.approx(sum(speeds) / 2)
        assert row["speedup"] == row["speed_tg"] / one["speed_tg"]
        assert row["peak_memory_bytes"] > 0 and row["graphs_built"] == 2
        assert (row["fork"]["n_tokens"], row["fork"]["n_seq"]) == (6, 8)
        assert row["fork"]["bytes"] == 0 and len(row["fork"]["samples_ns"]) == 2
        assert "peer" not in row


def test_unified_cells_hold_a_shared_prompt_once(bench):
    one, three = json.loads(bench("-o", "json", "-pps", "--kv-unified").out)
    assert (one["n_kv"], three["n_kv"], three["n_ctx"]) == (8, 6 + 3 * 2, 12)
    assert three["kv_unified"] == 1


def test_csv_has_a_line_for_each_test(bench):
    rows = list(csv.DictReader(io.StringIO(bench("-o", "csv", "-c", "100").out)))
    assert [(row["pl"], row["n_ctx"], row["n_kv"]) for row in rows] == [
        ("1", "100", "8"),
        ("3", "100", "24"),
    ]
    assert rows[0]["fork_bytes"] == "0"


@pytest.mark.parametrize(
    ("n_ctx_train", "n_ctx", "n_tokens"),
    [(1000, None, 1000), (999, None, 6), (8192, 1000, 1000), (8192, 999, 6)],
)
def test_a_fork_is_of_1000_tokens_where_they_fit(n_ctx_train, n_ctx, n_tokens):
    asked = request(n_pp=(5, 6, 4), n_ctx=n_ctx)
    assert module.fork_tokens(asked, n_ctx_train) == n_tokens


def test_without_one_sequence_there_is_no_speedup(model, capfd):
    def bench(*argv):
        tiny = ("-npp", "6", "-ntg", "2", "-npl", "3", "-r", "1")
        return run_cli(capfd, "bench", "--batched", "-m", model, *tiny, *argv)

    assert "x B=1" not in bench().out
    [row] = json.loads(bench("-o", "json").out)
    assert row["speedup"] is None


def test_a_peer_gets_the_same_tokens_in_turns(bench, fake_peer):
    result = bench("--peer", "llama.cpp", "-o", "json", "--kv-unified", "-pps")
    assert (result.code, result.err) == (0, "")
    one, three = json.loads(result.out)
    for row in (one, three):
        peer = row["peer"]
        assert (peer["name"], peer["version"]) == ("llama.cpp", "9.9.9")
        assert len(peer["samples_tg_ns"]) == 2
        assert peer["ratio_tg"] == row["speed_tg"] / peer["speed_tg"]
        assert peer["ratio_pp"] == row["speed_pp"] / peer["speed_pp"]
    calls = read_log(fake_peer)
    sizes = [call[1] for call in calls if call[0] == "context"][1:]
    assert [(s["n_ctx"], s["n_seq_max"], s["kv_unified"]) for s in sizes] == [
        (8, 1, True),
        (12, 3, True),
    ]
    assert all(s["n_threads"] == one["n_threads"] for s in sizes)
    # A warm-up and two repetitions of each test: a prompt, then two steps.
    tokens = [[row[0] for row in call[2]] for call in calls if call[0] == "rows"]
    assert [len(t) for t in tokens] == [6, 1, 1] * 3 + [6, 3, 3] * 3
    assert tokens[9:12] == tokens[12:15] == tokens[15:18]


def test_the_table_shows_the_peer(bench, fake_peer):
    result = bench("--peer", "llama.cpp")
    head, table, _ = result.out.split("\n\n")
    assert head.splitlines()[-1] == "peer: llama.cpp 9.9.9"
    assert [cell.strip() for cell in table.splitlines()[0].split("|")][-6:-1] == [
        *("llama.cpp S_PP", "ratio", "llama.cpp S_TG", "ratio", "x B=1"),
    ]


def test_a_peer_that_is_not_installed_is_said_before_our_model_is_loaded(
    bench, tmp_path, monkeypatch
):
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(module, "load_model", None)
    result = bench("--peer", "llama.cpp")
    assert (result.code, result.out) == (1, "")
    assert "pip install 'minfer-jax[peer]'" in result.error


def test_the_rows_so_far_are_printed_if_what_follows_fails(bench, monkeypatch):
    from minfer_jax.bench.batched import OurBatchedSide

    def fork_cost(self, n_tokens, *, repetitions):
        raise MinferError("it failed")

    monkeypatch.setattr(OurBatchedSide, "fork_cost", fork_cost)
    result = bench("-o", "json")
    assert (result.code, result.error) == (1, "it failed")
    assert [row["pl"] for row in json.loads(result.out)] == [1, 3]
    table = bench().out.split("\n\n")[1]
    assert len(table.splitlines()) == 4


def test_ctrl_c_in_the_last_call(bench, monkeypatch):
    from minfer_jax.bench.batched import OurBatchedSide

    asked = threading.Event()

    @contextmanager
    def stop_on_interrupt():
        yield asked

    fork_cost = OurBatchedSide.fork_cost

    def pressed(self, n_tokens, *, repetitions):
        cost = fork_cost(self, n_tokens, repetitions=repetitions)
        asked.set()
        return cost

    monkeypatch.setattr(module, "stop_on_interrupt", stop_on_interrupt)
    monkeypatch.setattr(OurBatchedSide, "fork_cost", pressed)
    result = bench("-o", "json")
    assert (result.code, result.error) == (130, "interrupted")
    assert [row["pl"] for row in json.loads(result.out)] == [1, 3]


def test_on_a_terminal_a_line_says_what_comes_and_nothing_moves(bench, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(session, "_bar", lambda title: nullcontext(lambda done, total: None))
    assert bench().err.splitlines() == [
        *("measuring pp6 tg2 x1...", "measuring pp6 tg2 x3..."),
        "measuring what it costs to share 6 tokens...",
    ]
