"""Commands and flags: how they are spelled, what they default to, what bad ones answer."""

from importlib.metadata import version

import pytest
from test_cli_main import request_parser, run_cli

from minfer_jax.cli import generate as command
from minfer_jax.sampling import SamplingParams

COMMANDS = ("generate", "bench", "embed", "info", "tokenize", "doctor")


@pytest.fixture
def request_of(monkeypatch, capfd):
    return request_parser(monkeypatch, capfd)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "Missing command; see `minfer-jax --help`"),
        (["nonsense"], "No such command 'nonsense'; see `minfer-jax --help`"),
        (["--vers"], "No such option: --vers"),
        (["generate"], "give one prompt"),
        (
            ["generate", "--qqq", "hi"],
            "--qqq (a text that begins with - goes after --); see `minfer-jax generate --help`",
        ),
        (["generate", "hi", "there"], "there"),
        (["generate", "hi", "-p", "there"], "more than one was given"),
        (["generate", "hi", "-n"], "'-n' requires an argument"),
        (["generate", "hi", "-n", "1.5"], "'-n' / '--n-predict'"),
        (["generate", "hi", "-n", "-2"], "-n/--n-predict is -2; allowed: -1 or more"),
        (["generate", "hi", "-c", "-5"], "-c/--n-ctx is -5; allowed: 0 or more"),
        (["generate", "hi", "-ub", "0"], "-ub/--n-ubatch is 0; allowed: 1 or more"),
        (["generate", "hi", "--temp", "warm"], "'--temp'"),
        (["generate", "hi", "--temp", "nan"], "temp is nan"),
        (["generate", "hi", "--top-p", "-1"], "top_p is -1.0"),
        (["generate", "hi", "--top-k", "1.5"], "'--top-k'"),
        (["generate", "hi", "-s", "-2"], "seed is -2"),
        (["generate", "hi", "-fa", "maybe"], "--flash-attn is 'maybe'; allowed: on, off, auto"),
        (["generate", "hi", "--stop", ""], "--stop is empty"),
        (["info", "extra"], "extra"),
        (["info", "-c", "-1"], "--n-ctx is -1; allowed: 0 to"),
        (["tokenize"], "Missing argument"),
        (["tokenize", "a", "b"], "(b)"),
    ],
)
def test_bad_usage_is_one_line(argv, words, capfd):
    result = run_cli(capfd, *argv)
    assert (result.code, result.out) == (2, "")
    assert words in result.error


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_the_commands(flag, capfd):
    result = run_cli(capfd, flag)
    assert result.code == 0 and result.err == ""
    assert all(name in result.out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command(name, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    result = run_cli(capfd, name, "--help")
    assert (result.code, result.err) == (0, "")
    assert "--debug" in result.out and f"minfer-jax {name}" in result.out


def test_version(capfd):
    assert run_cli(capfd, "--version") == (0, f"minfer-jax {version('minfer-jax')}\n", "")


def test_defaults_are_the_documented_ones(request_of):
    request, prompt = request_of("hi")
    assert prompt == "hi"
    assert request.sampling == SamplingParams()
    assert (request.sampling.seed, request.sampling.temp, request.sampling.top_k) == (42, 0.8, 40)
    assert (request.n_predict, request.n_ctx, request.n_ubatch) == (512, 2048, 512)
    assert (request.model, request.device, request.flash_attn) == (None, "auto", "auto")
    assert (request.stop, request.system) == ([], "")
    assert (request.grammar, request.logprobs) == (None, None)
    assert not (request.no_template or request.exact or request.json)


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["-m", "x.gguf"], "model", "x.gguf"),
        (["--model", ""], "model", ""),
        (["-sys", "Be brief."], "system", "Be brief."),
        (["--no-template"], "no_template", True),
        (["-n", "-1"], "n_predict", -1),
        (["--n-predict", "7"], "n_predict", 7),
        (["-c", "0"], "n_ctx", 0),
        (["--ctx-size", "64"], "n_ctx", 64),
        (["-ub", "33"], "n_ubatch", 33),
        (["--stop", "a", "--stop", "b"], "stop", ["a", "b"]),
        (["-fa", "off"], "flash_attn", "off"),
        (["--exact"], "exact", True),
        (["--device", "cpu"], "device", "cpu"),
        (["--json"], "json", True),
        (["-lp", "3"], "logprobs", 3),
        (["--temp", "0"], "sampling", SamplingParams(temp=0.0)),
    ],
)
def test_flags_reach_the_request(argv, field, value, request_of):
    request, _ = request_of("hi", *argv)
    assert getattr(request, field) == value


@pytest.mark.parametrize("argv", [["hi"], ["-p", "hi"], ["--prompt", "hi"]])
def test_the_prompt_is_an_argument_or_a_flag(argv, request_of):
    assert request_of(*argv)[1] == "hi"


def test_the_exit_code_of_a_command_is_passed_on(monkeypatch, capfd):
    monkeypatch.setattr(command, "run_generate", lambda request, prompt: 130)
    assert run_cli(capfd, "generate", "hi").code == 130
