"""Flags of samplers and grammars: spelled as in llama.cpp, and what they come to."""

import inspect
import math
import subprocess
import sys
from dataclasses import fields

import pytest
import typer
from test_cli_main import request_parser, run_cli

from minfer_jax.cli.sampling_flags import GrammarFlags, SamplingFlags, spread
from minfer_jax.sampling import SamplingParams


@pytest.fixture
def request_of(monkeypatch, capfd):
    return request_parser(monkeypatch, capfd)


@pytest.fixture
def config(tmp_path):
    """Writes a configuration file; returns the flag for it."""

    def write(text):
        (tmp_path / "run.toml").write_text(text)
        return "--config", str(tmp_path / "run.toml")

    return write


@pytest.fixture
def refused(capfd):
    """Runs `generate` with bad flags: the one line that it says, without looking at the model."""

    def run(*argv):
        result = run_cli(capfd, "generate", "hi", "-m", "/none.gguf", *argv)
        assert (result.code, result.out) == (2, "")
        return result.error

    return run


# Samplers


def test_without_flags_everything_has_its_default(request_of):
    assert request_of("hi")[0].sampling == SamplingParams()


FLAGS = {
    "seed": ("--seed", "7", 7),
    "temp": ("--temp", "0.5", 0.5),
    "dynatemp_range": ("--dynatemp-range", "0.3", 0.3),
    "dynatemp_exponent": ("--dynatemp-exp", "2", 2.0),
    "top_k": ("--top-k", "7", 7),
    "top_p": ("--top-p", "0.5", 0.5),
    "min_p": ("--min-p", "0.1", 0.1),
    "typical_p": ("--typical", "0.5", 0.5),
    "top_n_sigma": ("--top-nsigma", "1.5", 1.5),
    "xtc_probability": ("--xtc-probability", "0.5", 0.5),
    "xtc_threshold": ("--xtc-threshold", "0.2", 0.2),
    "mirostat": ("--mirostat", "2", 2),
    "mirostat_tau": ("--mirostat-ent", "4", 4.0),
    "mirostat_eta": ("--mirostat-lr", "0.2", 0.2),
    "adaptive_target": ("--adaptive-target", "0.5", 0.5),
    "adaptive_decay": ("--adaptive-decay", "0.5", 0.5),
    "repeat_penalty": ("--repeat-penalty", "1.1", 1.1),
    "repeat_last_n": ("--repeat-last-n", "7", 7),
    "frequency_penalty": ("--frequency-penalty", "0.5", 0.5),
    "presence_penalty": ("--presence-penalty", "0.25", 0.25),
    "dry_multiplier": ("--dry-multiplier", "0.8", 0.8),
    "dry_base": ("--dry-base", "2", 2.0),
    "dry_allowed_length": ("--dry-allowed-length", "3", 3),
    "dry_penalty_last_n": ("--dry-penalty-last-n", "7", 7),
    "dry_sequence_breakers": ("--dry-sequence-breaker", "x", ("x",)),
    "logit_bias": ("--logit-bias", "5+1", ((5, 1.0),)),
    "min_keep": ("--min-keep", "2", 2),
    "samplers": ("--samplers", "top_k;temperature", ("top_k", "temperature")),
}


def test_every_parameter_has_a_flag():
    assert FLAGS.keys() | {"ignore_eos"} == {f.name for f in fields(SamplingParams)}


@pytest.mark.parametrize("field", FLAGS)
def test_a_flag_sets_its_parameter_and_nothing_else(field, request_of):
    flag, text, value = FLAGS[field]
    assert request_of("hi", flag, text)[0].sampling == SamplingParams(**{field: value})


def test_ignore_eos(request_of):
    assert request_of("hi", "--ignore-eos")[0].sampling == SamplingParams(ignore_eos=True)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["-s", "7"], ["--seed", "7"]),
        (["--temperature", "0.5"], ["--temp", "0.5"]),
        (["--typical-p", "0.5"], ["--typical", "0.5"]),
        (["--top-n-sigma", "1"], ["--top-nsigma", "1"]),
        (["-l", "5+1"], ["--logit-bias", "5+1"]),
        (["--sampling-seq", "kt"], ["--sampler-seq", "kt"]),
        (["--sampler-seq", "edskypmxt"], []),
        (["--samplers", "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature"], []),
        (["--sampler-seq", "kt"], ["--samplers", "top_k;temperature"]),
    ],
)
def test_two_ways_to_say_the_same(one, other, request_of):
    assert request_of("hi", *one)[0].sampling == request_of("hi", *other)[0].sampling


@pytest.mark.parametrize("seed", [-1, 0, 42, 2**32, 2**64 - 1])
def test_s04_all_64_bits_of_a_seed(seed, request_of):
    assert request_of("hi", "--seed", str(seed))[0].sampling.seed == seed


@pytest.mark.parametrize(
    ("text", "bias"),
    [
        ("15043+1", (15043, 1.0)),
        ("15043-1.5", (15043, -1.5)),
        ("0-inf", (0, -math.inf)),
        ("7-INF", (7, -math.inf)),
        ("7+1e2", (7, 100.0)),
        ("7-.5", (7, -0.5)),
        (" 7 + 2 ", (7, 2.0)),
    ],
)
def test_biases(text, bias, request_of):
    assert request_of("hi", "-l", text)[0].sampling.logit_bias == (bias,)


def test_several_biases(request_of):
    request, _ = request_of("hi", "-l", "5+1", "-l", "6-2")
    assert request.sampling.logit_bias == ((5, 1.0), (6, -2.0))


@pytest.mark.parametrize(
    "text", ["", "5", "+1", "5=1", "x+1", "-5+1", "5+", "5+one", "5--1", "5+nan", "9" * 5000 + "+1"]
)
def test_biases_that_are_none(text, refused):
    assert "allowed: a token's id, + or -, and a number" in refused(f"--logit-bias={text}")


@pytest.mark.parametrize(
    ("given", "breakers"),
    [
        (["none"], ()),
        ([r"\n", ":"], ("\n", ":")),
        ([r"\t\r\\n\"\'\q"], ("\t\r\\n\"'\\q",)),
        (["a", "none", "b"], ("b",)),
        (["a", "none"], ()),
        (["None"], ("None",)),
    ],
)
def test_breakers_of_dry_take_the_place_of_the_default_ones(given, breakers, request_of):
    flags = [word for text in given for word in ("--dry-sequence-breaker", text)]
    assert request_of("hi", *flags)[0].sampling.dry_sequence_breakers == breakers


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--samplers", "top_k;sharpen"], "sharpen"),
        (["--samplers", "top_k;top_k"], "top_k"),
        (["--sampler-seq", "kz"], "z"),
        (["--samplers", "top_k", "--sampler-seq", "k"], "one of --samplers and --sampler-seq"),
        (["--mirostat", "3"], "mirostat is 3"),
        (["--mirostat", "1.5"], "'--mirostat'"),
        (["--xtc-probability", "nan"], "xtc_probability is nan"),
        (["--adaptive-decay", "1"], "adaptive_decay is 1"),
        (["--dry-penalty-last-n", "-2"], "dry_penalty_last_n is -2"),
        (["--dry-allowed-length", "-1"], "dry_allowed_length is -1"),
        (["--repeat-last-n", "-2"], "repeat_last_n is -2"),
        (["--repeat-penalty", "0"], "repeat_penalty is 0"),
        (["--logit-bias", "5+inf"], "inf"),
        (["--seed", "18446744073709551616"], "seed is 18446744073709551616"),
        (["--seed", "one"], "'--seed'"),
        (["--min-keep", "-1"], "min_keep is -1"),
        (["-lp", "-1"], "logprobs is -1; allowed: integers from 0 to 1024"),
        (["-lp", "1025"], "logprobs is 1025"),
    ],
)
def test_bad_values_are_one_line(argv, words, refused):
    assert words in refused(*argv)


def test_the_order_typed_wins_over_the_one_in_the_file(config, request_of, refused):
    flags = config("samplers = 'top_k'")
    assert request_of("hi", *flags)[0].sampling.samplers == ("top_k",)
    request, _ = request_of("hi", *flags, "--sampler-seq", "t")
    assert request.sampling.samplers == ("temperature",)
    both = config("samplers = 'top_k'\nsampler_seq = 'k'")
    assert "one of --samplers and --sampler-seq" in refused(*both)


def test_sampling_in_the_file(config, request_of):
    flags = config(
        "dynatemp_exp = 2\nmirostat_ent = 4\nignore_eos = true\nlogit_bias = ['5-inf']\n"
        "dry_sequence_breaker = ['\\n', '.']\nlogprobs = 3"
    )
    request, _ = request_of("hi", *flags)
    assert request.logprobs == 3
    assert request.sampling == SamplingParams(
        dynatemp_exponent=2.0,
        mirostat_tau=4.0,
        ignore_eos=True,
        logit_bias=((5, -math.inf),),
        dry_sequence_breakers=("\n", "."),
    )


@pytest.mark.parametrize("flag", ["-lp", "--logprobs"])
def test_logprobs(flag, request_of):
    assert request_of("hi")[0].logprobs is None
    assert request_of("hi", flag, "0")[0].logprobs == 0


# Grammars

GBNF = 'root ::= "yes" | "no"'
SCHEMA = '{"type": "string"}'


@pytest.mark.parametrize(
    ("argv", "kind", "text"),
    [
        (["--grammar", GBNF], "gbnf", GBNF),
        (["--json-schema", SCHEMA], "json_schema", SCHEMA),
        (["-j", f" {SCHEMA}"], "json_schema", f" {SCHEMA}"),
        (["-j", "true"], "json_schema", "true"),
        (["--regex", "[0-9]+"], "regex", "[0-9]+"),
        (["--lark", "start: /[0-9]+/"], "lark", "start: /[0-9]+/"),
    ],
)
def test_grammars(argv, kind, text, request_of):
    grammar = request_of("hi", *argv)[0].grammar
    assert (grammar.kind, grammar.text.strip()) == (kind, text.strip())


def test_no_grammar_and_any_object(request_of):
    assert request_of("hi")[0].grammar is None
    assert request_of("hi", "--json-object")[0].grammar.kind == "json_object"


@pytest.mark.parametrize("start", ["", "\ufeff"])
@pytest.mark.parametrize(
    ("flag", "prefix", "inline", "text"),
    [
        ("--grammar-file", "", "--grammar", GBNF),
        ("--json-schema-file", "", "-j", SCHEMA),
        ("-jf", "", "-j", SCHEMA),
        ("-j", "@", "-j", SCHEMA),
        ("--json-schema", "", "-j", SCHEMA),
    ],
)
def test_grammars_in_files(flag, prefix, inline, text, start, request_of, tmp_path):
    path = tmp_path / "grammar"
    path.write_text(start + text, encoding="utf-8")
    request, _ = request_of("hi", flag, f"{prefix}{path}")
    assert request.grammar == request_of("hi", inline, text)[0].grammar


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--grammar-file", "none.gbnf"], "--grammar-file none.gbnf: No such file or directory"),
        (["-jf", "none.json"], "--json-schema-file none.json: No such file"),
        (["-j", "@none.json"], "--json-schema none.json: No such file"),
        (["-j", '["string"]'], "neither a schema"),
        (["-j", "x" * 5000], "neither a schema"),
        (["--grammar-file", "/"], "--grammar-file /: Is a directory"),
        (["--grammar", GBNF, "--regex", "x"], "give one grammar or schema, not --grammar and"),
        (["--json-object", "-j", SCHEMA], "not --json-schema and --json-object"),
        (["--grammar", 'root ::= "a'], "grammar, line 1, column 10"),
        (["--grammar", "\udcff"], "the text of --grammar is not UTF-8 at byte 0"),
        (["--grammar", ""], "empty"),
        (["-j", '{"type": "strange"}'], "strange"),
        (["-j", '{"type": '], "JSON"),
        (["-j", '{"$ref": "https://example.com/schema"}'], "ref"),
        (["--regex", "("], "regular expression: "),
        (["--lark", "start: ("], "Lark grammar: 1(9)"),
    ],
)
def test_bad_grammars_are_one_line(argv, words, refused):
    assert words in refused(*argv)


def test_files_that_hold_no_grammar(refused, tmp_path, monkeypatch):
    path = tmp_path / "grammar"
    path.write_bytes(b"root ::= \xff")
    assert refused("--grammar-file", str(path)) == (
        f"--grammar-file {path} is not UTF-8 at byte 9: convert it"
    )
    monkeypatch.setattr("minfer_jax.cli.sampling_flags._MOST_BYTES", 1 << 20)
    path.write_bytes(b" " * (1 << 20) + b"x")
    assert refused("--grammar-file", str(path)) == f"--grammar-file {path}: more than 1 MiB"


def test_the_grammar_typed_wins_over_the_one_in_the_file(config, request_of, refused):
    flags = config("json_object = true")
    assert request_of("hi", *flags)[0].grammar.kind == "json_object"
    assert request_of("hi", *flags, "--regex", "x")[0].grammar.kind == "regex"
    assert request_of("hi", *config("regex = 'x'"), "--json-object")[0].grammar.kind == (
        "json_object"
    )
    assert "give one grammar" in refused(*config("regex = 'x'\njson_object = true"))


def test_a_file_name_that_no_file_can_have(config, refused):
    assert "null byte" in refused(*config('grammar_file = "a\\u0000b"'))


IMPORTED = """
import sys
from minfer_jax.cli import main
try:
    main(["generate", *sys.argv[1:]])
except SystemExit as done:
    modules = ("numpy", "jax", "llguidance")
    print(done.code, *(name for name in modules if name in sys.modules), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (["--help"], "0"),
        (["hi", "-l", "1=1"], "2 numpy"),
        (["hi", "--regex", "("], "2 numpy llguidance"),
    ],
)
def test_little_is_imported_to_read_flags(argv, found):
    command = [sys.executable, "-c", IMPORTED, *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == found


# Groups of flags


def test_a_command_gets_the_flags_of_its_groups_in_their_place():
    def command(ctx: typer.Context, *, first: int = 1, how: SamplingFlags, last: int = 2):
        return first, how, last

    spread_out = spread(command)
    parameters = inspect.signature(spread_out).parameters
    names = [f.name for f in fields(SamplingFlags)]
    assert list(parameters) == ["ctx", "first", *names, "last"]
    values = {name: p.default for name, p in parameters.items() if name != "ctx"}
    given = spread_out(ctx=None, **{**values, "first": 3, "top_k": 9})
    assert given == (3, SamplingFlags(top_k=9), 2)


def test_groups_show_as_panels_of_the_help(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    out = run_cli(capfd, "generate", "--help").out
    options, sampling, grammar = (
        out.index(f"─ {title}") for title in ("Options ─", "Sampling ─", "Grammar")
    )
    assert options < sampling < grammar
    assert sampling < out.index("--dry-multiplier") < grammar < out.index("--json-schema-file")
    for group in (SamplingFlags, GrammarFlags):
        for f in fields(group):
            assert f"--{f.name.replace('_', '-')}" in out
