"""`bench` end to end on a tiny model: formats, peer, sweep, profile, bad usage, Ctrl-C."""

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext

import pytest
from fake_llama import is_running, read_log, write_fake_llama
from test_cli_main import run_cli, run_process

from minfer_jax.cli import bench as module
from minfer_jax.cli import session
from minfer_jax.cli.bench import BenchRequest, numbers
from minfer_jax.errors import MinferError, UsageError

SHORT = ("-p", "4", "-n", "2")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """One cache of graphs for all runs."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def environment(home, monkeypatch):
    for name in [name for name in os.environ if name.startswith("MINFER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MINFER_HOME", str(home))


@pytest.fixture(autouse=True)
def small_read(monkeypatch):
    """The memory's bandwidth is measured on a megabyte."""
    from minfer_jax.bench import bandwidth

    read = bandwidth.read_bandwidth
    monkeypatch.setattr(bandwidth, "read_bandwidth", lambda threads: read(threads, 1 << 20))


@pytest.fixture
def model(tiny_path):
    return str(tiny_path("llama-dense"))


@pytest.fixture
def bench(model, capfd):
    """Runs a few short tests."""

    def run(*argv, p="4", n="2"):
        return run_cli(capfd, "bench", "-m", model, "-p", p, "-n", n, "-r", "2", *argv)

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
        "n_prompt": (512,),
        "n_gen": (128,),
        "n_depth": (0,),
        "repetitions": 5,
        "threads": None,
        "n_ubatch": 512,
        "exact": False,
        "device": "auto",
        "output": "md",
        "peer": None,
        "peer_python": None,
        "sweep": None,
        "values": (),
        "plot": None,
        "profile": False,
    }
    return BenchRequest(**{**fields, **changes})


@pytest.fixture
def request_of(monkeypatch, capfd):
    """From the arguments to the request; nothing runs."""
    seen = []
    monkeypatch.setattr(module, "run_bench", lambda request: seen.append(request) or 0)

    def parse(*argv):
        assert run_cli(capfd, "bench", *argv) == (0, "", "")
        return seen.pop()

    return parse


def test_defaults_are_llama_benchs(request_of):
    assert request_of() == request()


@pytest.mark.parametrize(
    ("argv", "changes"),
    [
        (["-p", "128,512", "-p", "7"], {"n_prompt": (128, 512, 7)}),
        (["-n", "0"], {"n_gen": (0,)}),
        (["-d", "0, 1024"], {"n_depth": (0, 1024)}),
        (["-r", "3", "-t", "2", "-ub", "64"], {"repetitions": 3, "threads": 2, "n_ubatch": 64}),
        (["-m", "x.gguf", "--exact"], {"model": "x.gguf", "exact": True}),
        (["-o", "csv", "--device", "cpu"], {"output": "csv", "device": "cpu"}),
        (
            ["--peer", "llama.cpp", "--peer-python", "py"],
            {"peer": "llama.cpp", "peer_python": "py"},
        ),
        (
            ["--sweep", "threads", "--values", "1,2", "--plot", "x.png"],
            {"sweep": "threads", "values": (1, 2), "plot": "x.png"},
        ),
        (["--profile"], {"profile": True}),
    ],
)
def test_flags_reach_the_request(argv, changes, request_of):
    assert request_of(*argv) == request(**changes)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["-r", "0"], "-r/--repetitions is 0; allowed: 1 to 1000"),
        (["-p", "-1"], "-p/--n-prompt is -1; allowed: 0 to 1048576"),
        (["-p", "abc"], "-p/--n-prompt is 'abc'; allowed: integers, separated by commas"),
        (["-p", "1,,2"], "-p/--n-prompt is ''"),
        (["-p", "1.5"], "-p/--n-prompt is '1.5'"),
        (["-n", "9" * 30], "-n/--n-gen is '999"),
        (["-d", "1048577"], "-d/--n-depth is 1048577; allowed: 0 to 1048576"),
        (["-p", "0", "-n", "0"], "nothing to measure: both -p and -n are 0"),
        (["-ub", "0"], "-ub/--n-ubatch is 0; allowed: 1 to 65536"),
        (["-t", "0"], "-t/--threads is 0; allowed: 1 to 1024"),
        (["-o", "xml"], "-o/--output is 'xml'; allowed: md, csv, json"),
        (["--peer", "vllm"], "--peer is 'vllm'; allowed: llama.cpp"),
        (["--peer-python", "py"], "--peer-python needs --peer"),
        (["--sweep", "width", "--values", "1"], "--sweep is 'width'; allowed: threads, ubatch"),
        (["--sweep", "depth"], "--sweep needs --values"),
        (["--values", "1"], "--values needs --sweep threads|ubatch|depth"),
        (["--plot", "x.png"], "--plot needs --sweep"),
        (["--sweep", "threads", "--values", "1,0"], "--values is 0; allowed: 1 to 1024"),
        (["--sweep", "threads", "--values", "1,1025"], "--values is 1025; allowed: 1 to 1024"),
        (["--sweep", "ubatch", "--values", "0"], "--values is 0; allowed: 1 to 65536"),
        (["--sweep", "depth", "--values", "-1"], "--values is -1; allowed: 0 to 1048576"),
        (["--sweep", "depth", "--values", "1", "--plot", "x.pdf"], "must end with .png or .svg"),
        (["--profile", "--peer", "llama.cpp"], "leave --peer out"),
        (["--profile", "--sweep", "depth", "--values", "1"], "leave --sweep out"),
        (["--profile", "-o", "csv"], "--profile has no CSV form"),
        (["--profile", "-p", "512"], "--profile traces decode steps, always as many: leave -p out"),
        (["--profile", "-n", "8"], "leave -n out"),
        (["--profile", "--repetitions", "5"], "leave -r out"),
        (
            ["--sweep", "threads", "--values", "1", "-t", "2"],
            "--sweep threads goes through --values: leave -t/--threads out",
        ),
        (["--sweep", "ubatch", "--values", "1", "--ubatch-size", "2"], "leave -ub/--n-ubatch out"),
        (["--sweep", "depth", "--values", "1", "-d", "0"], "leave -d/--n-depth out"),
        (["-npp", "8"], "-npp needs --batched"),
        (["-ntg", "8"], "-ntg needs --batched"),
        (["-npl", "8"], "-npl needs --batched"),
        (["-pps"], "-pps needs --batched"),
        (["--kv-unified"], "--kv-unified needs --batched"),
        (["--ctx-size", "8"], "-c/--n-ctx needs --batched"),
        (["--bogus"], "No such option: --bogus; see `minfer-jax bench --help`"),
        (["--device", "nonsense", *SHORT], "--device nonsense: jax finds no such device here"),
        (
            ["--peer", "llama.cpp", "--peer-python", "/no/py", *SHORT],
            "--peer-python /no/py: no such",
        ),
        (["-d", "253", *SHORT], "pp4 @ d253 needs a context of 257 tokens, this model's is 256"),
        (["--profile", "-d", "241"], "tg16 @ d241 needs a context of 257 tokens"),
        (["--sweep", "depth", "--values", "0,253,1", *SHORT], "pp4 @ d253 needs a context of 257"),
        (["--sweep", "threads", "--values", "1,2", "-p", "257"], "pp257 needs a context of 257"),
    ],
)
def test_bad_usage_is_one_line(argv, words, model, capfd):
    result = run_cli(capfd, "bench", "-m", model, *argv)
    assert (result.code, result.out) == (2, "")
    assert words in result.error


@pytest.mark.parametrize(
    ("texts", "found"),
    [(None, (5,)), ([], (5,)), (["1"], (1,)), (["1,2", " 3"], (1, 2, 3)), (["-4"], (-4,))],
)
def test_numbers(texts, found):
    assert numbers("-p", texts, (5,)) == found


@pytest.mark.parametrize("text", ["", "1,", "--1", "1e3", "٣", "0x10", "1_000"])
def test_what_is_no_number(text):
    with pytest.raises(UsageError):
        numbers("-p", [text], ())


def test_the_flags_of_a_sweeps_processes():
    asked = request(
        model="x.gguf",
        exact=True,
        device="cpu",
        peer="llama.cpp",
        peer_python="py",
        sweep="threads",
        values=(1, 2),
    )
    common = "--device cpu --peer llama.cpp --peer-python py"
    assert " ".join(asked.argv(2)) == (
        f"-m x.gguf -p 512 -n 128 -d 0 -r 5 -t 2 -ub 512 {common} --exact"
    )
    assert " ".join(asked.argv()) == (
        f"-m x.gguf -p 512 -n 128 -d 0 -r 5 -ub 512 {common} --sweep threads --values 1,2 --exact"
    )
    assert request(sweep="depth", values=(7,)).argv(7)[4:6] == ["-d", "7"]
    assert request(sweep="ubatch", values=(7,)).argv(7)[-2:] == ["-ub", "7"]
    assert request(profile=True).argv() == ["-d", "0", "-ub", "512", "--profile"]


@pytest.mark.parametrize(
    "changes",
    [
        {"profile": True, "n_depth": (0, 9)},
        *({"sweep": sweep, "values": (1, 2)} for sweep in ("threads", "ubatch", "depth")),
        {"threads": 2, "n_prompt": (0,), "peer": "llama.cpp"},
        {"sampling": True, "n_gen": (5,)},
    ],
)
def test_the_flags_that_are_reported_ask_for_the_same(changes, request_of):
    asked = request(**changes)
    assert request_of(*asked.argv()) == asked


def test_the_table_and_what_stands_round_it(bench):
    result = bench("-d", "0,8")
    assert (result.code, result.err) == (0, "")
    head, table, foot = result.out.split("\n\n")
    assert [line.split(":")[0] for line in head.splitlines()] == [
        *("machine", "versions", "model", "flags"),
    ]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert rows[0][-3:] == ["test", "t/s", "median"]
    assert [row[-3] for row in rows[2:]] == ["pp4", "tg2", "pp4 @ d8", "tg2 @ d8"]
    assert all(float(row[-1]) > 0 for row in rows[2:])
    lines = foot.splitlines()
    assert lines[0].startswith("peak memory: ") and " 0 evicted" in lines[1]
    assert [line.split(",")[0] for line in lines[2:]] == ["tg2", "tg2 @ d8"]


def test_choosing_on_the_host_and_in_the_graph_are_tests_of_their_own(bench):
    result = bench("--sampling")
    assert (result.code, result.err) == (0, "")
    _, table, foot = result.out.split("\n\n")
    names = [line.split("|")[-4].strip() for line in table.splitlines()[2:]]
    assert names == ["pp4", "tg2", "tg2 host", "tg2 loop"]
    assert re.search(r"^tg2 loop: \d+\.\d\dx of tg2 host$", foot, re.MULTILINE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"profile": True}, "--profile looks at the decode step alone: leave --sampling out"),
        ({"peer": "llama.cpp"}, "--sampling compares two ways of ours: leave --peer out"),
        ({"n_gen": (0,)}, "--sampling measures generation: give -n"),
    ],
)
def test_choosing_tokens_where_there_is_nothing_to_choose(changes, message):
    with pytest.raises(UsageError, match=message):
        request(sampling=True, **changes)


def test_json_is_a_list_with_every_figure(bench):
    result = bench("-o", "json")
    assert (result.code, result.err) == (0, "")
    prompt, gen = json.loads(result.out)
    assert (prompt["n_prompt"], prompt["n_gen"], prompt["n_depth"]) == (4, 0, 0)
    assert (gen["n_prompt"], gen["n_gen"]) == (0, 2)
    for row, n in ((prompt, 4), (gen, 2)):
        assert len(row["samples_ns"]) == 2
        assert row["samples_ts"] == [1e9 * n / ns for ns in row["samples_ns"]]
        assert row["peak_memory_bytes"] > 0 and row["bandwidth_gbs"] > 0
        assert "peer" not in row and row["graphs_evicted"] == 0
    # A prompt's graph and a step's, each built before its test's clock started.
    assert (prompt["graphs_built"], gen["graphs_built"]) == (1, 1)
    assert prompt["bandwidth_fraction"] is None
    share = gen["bytes_per_token"] * gen["median_ts"] / 1e9 / gen["bandwidth_gbs"]
    assert gen["bandwidth_fraction"] == pytest.approx(share, rel=0.01)


def test_csv_has_a_line_for_each_test(bench):
    result = bench("-o", "csv", "--exact", n="0")
    [row] = csv.DictReader(io.StringIO(result.out))
    assert (row["n_prompt"], row["type_k"], row["exact"]) == ("4", "f32", "True")


def test_a_peer_gets_the_same_tokens_in_turns(bench, fake_peer):
    result = bench("--peer", "llama.cpp", "-d", "3", "-o", "json", p="0")
    assert (result.code, result.err) == (0, "")
    [row] = json.loads(result.out)
    peer = row["peer"]
    assert (peer["name"], peer["version"], len(peer["samples_ts"])) == ("llama.cpp", "9.9.9", 2)
    assert peer["ratio"] == row["median_ts"] / peer["median_ts"]
    calls = read_log(fake_peer)
    context = next(call[1] for call in calls if call[0] == "context")
    assert (context["n_ctx"], context["n_ubatch"]) == (row["n_ctx"], row["n_ubatch"]) == (5, 512)
    assert context["n_threads"] == row["n_threads"]
    assert [call[0] for call in calls].count("restore") == 3  # once to warm up, twice timed
    tokens = [call[1] for call in calls if call[0] == "decode"]
    assert len(tokens[0]) == 3 and tokens[1:] == tokens[1:3] * 3


def test_the_table_shows_the_peer(bench, fake_peer):
    result = bench("--peer", "llama.cpp", n="0")
    head = result.out.split("\n\n")[1].splitlines()[0]
    assert [cell.strip() for cell in head.split("|")][-3:-1] == ["llama.cpp 9.9.9", "ratio"]


def test_a_peer_that_is_not_installed_is_said_before_our_model_is_loaded(
    bench, tmp_path, monkeypatch
):
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(module, "load_model", None)
    result = bench("--peer", "llama.cpp")
    assert (result.code, result.out) == (1, "")
    assert "pip install 'minfer-jax[peer]'" in result.error


def test_with_exact_the_peers_keys_and_values_are_float32_too(bench, fake_peer):
    bench("--peer", "llama.cpp", "--exact", p="0")
    params = next(call[1] for call in read_log(fake_peer) if call[0] == "context")
    assert (params["type_k"], params["type_v"]) == (0, 0)


def test_the_rows_so_far_are_printed_if_what_follows_fails(bench, monkeypatch):
    from minfer_jax.bench import bandwidth

    def read_bandwidth(threads):
        raise MemoryError

    monkeypatch.setattr(bandwidth, "read_bandwidth", read_bandwidth)
    for form in ("json", "csv"):
        result = bench("-o", form)
        assert result.code == 1 and result.error.startswith("out of memory")
        rows = json.loads if form == "json" else lambda out: list(csv.DictReader(io.StringIO(out)))
        assert [int(row["n_gen"]) for row in rows(result.out)] == [0, 2]


@pytest.fixture
def ctrl_c(monkeypatch):
    """Presses Ctrl-C, once the last decode step is over."""
    asked = threading.Event()

    @contextmanager
    def stop_on_interrupt():
        yield asked

    monkeypatch.setattr(module, "stop_on_interrupt", stop_on_interrupt)
    return asked.set


def test_ctrl_c_while_the_bandwidth_is_read(bench, ctrl_c, monkeypatch):
    from minfer_jax.bench import bandwidth

    monkeypatch.setattr(bandwidth, "read_bandwidth", lambda threads: ctrl_c() or 1e9)
    result = bench("-o", "json")
    assert (result.code, result.error) == (130, "interrupted")
    assert [row["n_gen"] for row in json.loads(result.out)] == [0, 2]


def test_ctrl_c_after_a_profiles_last_step(model, capfd, ctrl_c, monkeypatch):
    from minfer_jax.bench import profile

    attribute = profile.attribute
    monkeypatch.setattr(profile, "attribute", lambda *args: ctrl_c() or attribute(*args))
    result = run_cli(capfd, "bench", "-m", model, "--profile")
    assert (result.code, result.out, result.error) == (130, "", "interrupted")


def test_on_a_terminal_a_line_says_what_comes_and_nothing_moves(bench, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(session, "_bar", lambda title: nullcontext(lambda done, total: None))
    assert bench("-d", "0,8", p="0").err.splitlines() == [
        *("measuring tg2...", "measuring tg2 @ d8...", "measuring the memory's bandwidth..."),
    ]


def test_the_profile_as_a_table_and_as_json(model, capfd):
    def bench(*argv):
        return run_cli(capfd, "bench", "-m", model, *argv)

    result = bench("--profile", "-d", "0,9")
    assert (result.code, result.err) == (0, "")
    parts = result.out.split("\n\n")
    assert parts[1].startswith("decode step: ") and parts[3].startswith("decode step at depth 9: ")
    assert parts[2].splitlines()[0].split("|")[1].strip() == "node"
    assert "| blk.*/ffn_down" in parts[2]
    assert parts[2].splitlines()[-1].startswith("| (no node running)")
    [profile] = json.loads(bench("--profile", "-o", "json").out)
    assert profile["steps"] == 16 and profile["n_depth"] == 0
    total = sum(node["us"] for node in profile["nodes"]) + profile["idle_us"]
    assert total == pytest.approx(profile["traced_us"])


@pytest.fixture
def swept(monkeypatch):
    """What the processes of a sweep were asked; each answers with one row."""
    from minfer_jax.bench import sweep

    seen = []

    def bench_in_process(argv):
        seen.append(argv)
        return [{**ROW, "n_threads": int(argv[argv.index("-t") + 1])}]

    monkeypatch.setattr(sweep, "bench_in_process", bench_in_process)
    return seen


ROW = {
    **{
        "cpu_info": "Some CPU",
        "cpu_flags": "",
        "load_average": None,
        "gpu_info": "",
        "backends": "JAX CPU",
    },
    **{"build_commit": "1", "jax_version": "2", "jaxlib_version": "3", "flags": "child's"},
    **{"model_filename": "m", "model_type": "llama 1M F32", "model_size": 1, "n_ubatch": 512},
    **{"model_n_params": 1, "type_k": "f16", "type_v": "f16", "exact": False},
    **{"n_prompt": 4, "n_gen": 0, "n_depth": 0, "sampling": ""},
    **{"graphs_built": 1, "graphs_evicted": 0},
    **{"avg_ts": 5.0, "stddev_ts": 1.0, "median_ts": 5.0, "compile_s": 0.5},
}


def test_a_sweep_asks_for_each_value_and_collects(bench, swept):
    rows = json.loads(bench("--sweep", "threads", "--values", "1,2,4", "-o", "json").out)
    assert [argv[argv.index("-t") + 1] for argv in swept] == ["1", "2", "4"]
    assert [row["n_threads"] for row in rows] == [1, 2, 4]


def test_a_value_that_fails_does_not_take_the_others_rows_with_it(bench, swept, monkeypatch):
    from minfer_jax.bench import sweep

    answer = sweep.bench_in_process

    def bench_in_process(argv):
        if "4" in argv[argv.index("-t") :][:2]:
            raise MinferError("it failed")
        return answer(argv)

    monkeypatch.setattr(sweep, "bench_in_process", bench_in_process)
    for form in ("json", "csv"):
        result = bench("--sweep", "threads", "--values", "1,2,4", "-o", form)
        assert (result.code, result.error) == (1, "it failed")
        rows = json.loads if form == "json" else lambda out: list(csv.DictReader(io.StringIO(out)))
        assert [int(row["n_threads"]) for row in rows(result.out)] == [1, 2]
    result = bench("--sweep", "threads", "--values", "4", "-o", "csv")
    assert (result.code, result.out, result.error) == (1, "", "it failed")


@pytest.mark.slow
def test_a_sweep_prints_one_table_and_plots_it(bench, swept, tmp_path):
    plot = tmp_path / "x.svg"
    result = bench("--sweep", "threads", "--values", "1,2", "--plot", str(plot))
    assert (result.code, result.err) == (0, f"note: plot written to {plot}\n")
    head, table, foot = result.out.split("\n\n")
    assert head.splitlines()[-1].endswith("--sweep threads --values 1,2")
    assert [line.split("|")[5].strip() for line in table.splitlines()[2:]] == ["1", "2"]
    assert "graphs: 2 built in 1.00 s" in foot
    assert "<svg" in plot.read_text()


@pytest.mark.slow
def test_a_sweep_in_real_processes(model):
    argv = ("--sweep", "threads", "--values", "1,2", "-o", "json", "-p", "4", "-n", "2", "-r", "1")
    result = run_process("bench", "-m", model, *argv)
    assert (result.code, result.err) == (0, "")
    rows = json.loads(result.out)
    assert [(row["n_threads"], row["n_prompt"]) for row in rows] == [(1, 4), (1, 0), (2, 4), (2, 0)]


def test_a_process_that_fails_ends_the_sweep_with_its_line(bench):
    result = bench("--sweep", "depth", "--values", "1", "--device", "nonsense")
    assert (result.code, result.out) == (2, "")
    assert result.error.startswith("bench -m ")
    assert ": --device nonsense: jax finds no such device here" in result.error


def test_a_closed_pipe_ends_it_quietly(model):
    read, write = os.pipe()
    os.close(read)
    result = run_process("bench", "-m", model, "-p", "4", "-n", "0", "-r", "1", stdout=write)
    os.close(write)
    assert (result.code, result.err) == (0, "")


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_told_to_end_it_ends_with_its_peer(number, code, model, fake_peer):
    argv = ("-m", model, "-p", "4", "-n", "64", "-r", "1000", "--peer", "llama.cpp")
    process = subprocess.Popen(
        [sys.executable, "-m", "minfer_jax", "bench", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (fake_peer.exists() and fake_peer.read_text().count("clear") > 3):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code and out.startswith("machine:")
    assert err == ("error: interrupted\n" if code == 130 else "")
    [_, pid] = read_log(fake_peer)[0]
    assert not is_running(pid)
