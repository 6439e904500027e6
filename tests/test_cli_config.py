"""`--config FILE`: its values, its mistakes, and that flags win over it."""

import tomllib
from pathlib import Path

import pytest
from test_cli_main import request_parser, run_cli

CONFIG = Path(__file__).parents[1] / "configs" / "generate.toml"


@pytest.fixture
def config(tmp_path):
    """Writes a configuration file; returns the flag for it."""

    def write(text: str | bytes) -> tuple[str, str]:
        path = tmp_path / "run.toml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return "--config", str(path)

    return write


@pytest.fixture
def request_of(monkeypatch, capfd):
    return request_parser(monkeypatch, capfd)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n_predicted = 1", "unknown key 'n_predicted'; known: adaptive_decay, "),
        ("debug = true", "unknown key 'debug'"),
        ("[generate]\nn_predict = 1", "unknown key 'generate'"),
        ("n_predict = 'many'", "n_predict is 'many'; allowed: an integer"),
        ("n_predict = '3'", "n_predict is '3'; allowed: an integer"),
        ("n_predict = 3.5", "n_predict is 3.5; allowed: an integer"),
        ("n_predict = true", "n_predict is True; allowed: an integer"),
        ("temp = 'hot'", "temp is 'hot'; allowed: a number"),
        ("temp = true", "temp is True; allowed: a number"),
        ("stop = 3", "stop is 3; allowed: a list of strings"),
        ("stop = 'x'", "stop is 'x'; allowed: a list of strings"),
        ("stop = ['x', 1]", "stop is ['x', 1]; allowed: a list of strings"),
        ("model = 3", "model is 3; allowed: a string"),
        ("threads = '3'", "threads is '3'; allowed: an integer"),
        ("logprobs = 1.5", "logprobs is 1.5; allowed: an integer"),
        ("logit_bias = ['1+1', 2]", "allowed: a list of strings"),
        ("help = true", "unknown key 'help'"),
        ("json = 'no'", "json is 'no'; allowed: true or false"),
        ("n_predict =", "not valid TOML"),
        (b"# \xff", "not valid TOML"),
    ],
)
def test_a_bad_file_is_named_in_one_line(text, words, config, capfd):
    flag, path = config(text)
    result = run_cli(capfd, "generate", "hi", flag, path)
    assert (result.code, result.out) == (2, "")
    assert result.error.startswith(f"--config {path}: ") and words in result.error


@pytest.mark.parametrize(
    ("path", "words"), [("none.toml", "No such file or directory"), (".", "Is a directory")]
)
def test_a_file_that_cannot_be_read(path, words, capfd):
    result = run_cli(capfd, "generate", "hi", "--config", path)
    assert (result.code, result.error) == (2, f"--config {path}: {words}")


def test_values_out_of_range_are_refused_as_flags_are(config, capfd):
    result = run_cli(capfd, "generate", "hi", *config("n_ubatch = 0"))
    assert (result.code, result.error) == (2, "-ub/--n-ubatch is 0; allowed: 1 or more")


def test_the_file_gives_values_and_flags_win(config, request_of):
    flags = config("n_predict = 3\ntemp = 1\nstop = ['a']\nexact = true\nmodel = 'm'")
    request, _ = request_of("hi", *flags)
    assert (request.n_predict, request.sampling.temp, request.model) == (3, 1.0, "m")
    assert request.stop == ["a"] and request.exact
    request, _ = request_of(*flags, "hi", "-n", "4", "--temp", "0", "--stop", "b", "-m", "n")
    assert (request.n_predict, request.sampling.temp, request.model) == (4, 0.0, "n")
    assert request.stop == ["b"]
    # A flag wins also where it says what the default is.
    assert request_of("hi", *flags, "-n", "512")[0].n_predict == 512


def test_numbers_that_have_no_default(config, request_of):
    request, _ = request_of("hi", *config("threads = 3\nlogprobs = 2"))
    assert (request.threads, request.logprobs) == (3, 2)


def test_a_prompt_in_the_file_gives_way(config, request_of, tmp_path):
    (tmp_path / "prompt.txt").write_text("from -f")
    flags = config("prompt = 'from the file'")
    assert request_of(*flags)[1] == "from the file"
    assert request_of(*flags, "typed")[1] == "typed"
    assert request_of(*flags, "-p", "from -p")[1] == "from -p"
    assert request_of(*flags, "-f", str(tmp_path / "prompt.txt"))[1] == "from -f"
    assert request_of(*flags, "from the file")[1] == "from the file"


def test_the_documented_file_changes_nothing(request_of):
    plain, _ = request_of("hi")
    request, _ = request_of("hi", "--config", str(CONFIG))
    assert vars(request) == vars(plain)


def test_the_documented_file_has_every_key(config, capfd):
    error = run_cli(capfd, "generate", "hi", *config("no_such_key = 1")).error
    keys = set(error.partition("known: ")[2].split(", "))
    written = set(tomllib.loads(CONFIG.read_text()))
    without_default = {
        *("model", "prompt", "file", "threads", "type_k", "type_v", "sampler_seq", "logprobs"),
        *("grammar", "grammar_file", "json_schema", "json_schema_file", "regex", "lark"),
    }
    assert len(keys) > 20 and keys - written == without_default
    assert all(f"# {key} = " in CONFIG.read_text() for key in without_default)
