"""`embed`: texts from flags, files and stdin; a vector a line, or JSON."""

import io
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_cli_main import _IMPORTED, run_cli
from tiny_models import write_tiny

from minfer_jax.cli import embed as command
from minfer_jax.cli.embed import read_texts
from minfer_jax.embedding import Embedding
from minfer_jax.errors import UsageError

ENCODERS = Path(__file__).parent / "data" / "encoders"
IDS = {2: "bos", 3: "seperator", 1: "unknown", 0: "padding"}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁the", "▁cat", "▁sat", "s", "▁!"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The tiny BERT with a WordPiece vocabulary, whose own pooling is the mean."""
    spec = json.loads((ENCODERS / "bert-dense.json").read_text())
    tokens = WORDS + [f"[unused{i}]" for i in range(128 - len(WORDS))]
    spec["kv"] += [
        ["bert.pooling_type", ["UINT32"], 1],
        *([f"tokenizer.ggml.{name}_token_id", ["UINT32"], i] for i, name in IDS.items()),
    ]
    kv = {"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": tokens}
    return str(write_tiny(spec, tmp_path_factory.mktemp("model") / "tiny.gguf", kv=kv))


@pytest.fixture(autouse=True)
def environment(tmp_path_factory, monkeypatch):
    for name in [name for name in os.environ if name.startswith("MINFER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MINFER_HOME", str(tmp_path_factory.getbasetemp() / "embed-home"))


@pytest.fixture
def embed(model, capfd):
    return lambda *argv: run_cli(capfd, "embed", "-m", model, "--exact", *argv)


@pytest.fixture
def stdin(monkeypatch):
    def give(data, tty=False):
        fake = SimpleNamespace(buffer=io.BytesIO(data), isatty=lambda: tty)
        monkeypatch.setattr("sys.stdin", fake)

    return give


def vectors(out):
    return np.array([[float(number) for number in line.split()] for line in out.splitlines()])


def test_a_line_for_each_text(embed):
    result = embed("-p", "the cat", "-p", "the cats sat!")
    assert (result.code, result.err) == (0, "")
    rows = vectors(result.out)
    assert rows.shape == (2, 64)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.0, rtol=1e-6)


def test_json_has_the_same_numbers_and_their_cosines(embed):
    texts = ("-p", "the cat", "-p", "the cats sat!", "-p", "THE CAT")
    report = json.loads(embed("--json", *texts).out)
    assert report["model"].endswith("tiny.gguf")
    assert (report["pooling"], report["normalize"]) == ("mean", 2)
    assert [entry["index"] for entry in report["data"]] == [0, 1, 2]
    # [CLS] the cat [SEP], and [CLS] the cat s sat ! [SEP]
    assert [entry["n_tokens"] for entry in report["data"]] == [4, 7, 4]
    rows = np.array([entry["embedding"] for entry in report["data"]])
    np.testing.assert_array_equal(rows, vectors(embed(*texts).out))
    np.testing.assert_allclose(report["cosine_similarity"], rows @ rows.T, atol=1e-6)
    assert report["cosine_similarity"][0][2] == 1.0 > report["cosine_similarity"][0][1]


def test_one_text_is_like_no_other(embed):
    report = json.loads(embed("--json", "-p", "the cat").out)
    assert "cosine_similarity" not in report and len(report["data"]) == 1


def test_poolings(embed):
    argv = ("-p", "the cat", "--embd-normalize", "-1")
    tokens = vectors(embed(*argv, "--pooling", "none").out)
    assert tokens.shape == (4, 64)
    for kind, want in (("cls", tokens[0]), ("last", tokens[3]), ("mean", tokens.mean(axis=0))):
        out = vectors(embed(*argv, "--pooling", kind).out)
        np.testing.assert_allclose(out, [want], atol=1e-6)
    report = json.loads(embed(*argv, "-p", "!", "--pooling", "none", "--json").out)
    assert np.shape(report["data"][0]["embedding"]) == (4, 64)
    assert np.shape(report["data"][1]["embedding"]) == (3, 64)
    assert "cosine_similarity" not in report


def test_whole_numbers_in_the_range_of_int16(embed):
    out = embed("-p", "the cat", "--embd-normalize", "0").out
    numbers = [int(number) for number in out.split()]
    assert len(numbers) == 64 and max(map(abs, numbers)) == 32760
    report = json.loads(embed("-p", "the cat", "--embd-normalize", "0", "--json").out)
    assert report["data"][0]["embedding"] == numbers


def test_lines_of_stdin_and_of_a_file(embed, stdin, tmp_path):
    want = embed("-p", "the cat", "-p", "", "-p", "sat").out
    data = b"\xef\xbb\xbfthe cat\r\n\nsat\n"
    (tmp_path / "texts").write_bytes(data)
    assert want.count("\n") == 3
    assert embed("-f", str(tmp_path / "texts")).out == want
    for argv in ([], ["-f", "-"], ["-p", "-"]):
        stdin(data)
        assert embed(*argv).out == want


def test_rank_needs_a_re_ranker(embed):
    result = embed("-p", "a\tb", "--pooling", "rank")
    assert result.code == 1 and "pooling 'rank' is for re-rankers" in result.error


def test_a_text_that_is_too_long(embed):
    result = embed("-p", "the", "-p", "the " * 40, "-c", "30")
    assert (result.code, result.out) == (1, "")
    assert result.error == "text 1 has 42 tokens, the context holds 30: shorten it"


def test_the_default_context_is_no_longer_than_the_model_knows(embed):
    result = embed("-p", "the " * 200)
    assert result.error == "text 0 has 202 tokens, the context holds 128: shorten it"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--pooling", "max"], "--pooling is 'max'; allowed: none, mean, cls, last, rank"),
        (["--embd-normalize", "-2"], "--embd-normalize is -2; allowed: -1 (none), 0"),
        (["--embd-normalize", "x"], "'--embd-normalize'"),
        (["-c", "-1"], "-c/--n-ctx is -1; allowed: 0 or more"),
        (["-t", "0"], "-t/--threads is 0"),
        (["-f", "x"], "give texts with -p, or a file of them with -f, not both"),
        (["-p", "a\udcff"], "the text of -p is not UTF-8 at byte 1"),
        (["extra"], "extra"),
    ],
)
def test_bad_usage_is_one_line(embed, argv, words):
    result = embed("-p", "a", *argv)
    assert (result.code, result.out) == (2, "")
    assert words in result.error


def test_a_file_that_is_not_there(embed):
    result = embed("-f", "/none")
    assert (result.code, result.error) == (1, "/none: No such file or directory")


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"\n", [""]),
        (b"a\n\n", ["a", ""]),
        (b"a\r\nb\x0bc\rd\xe2\x80\xa8e\r\n", ["a", "b\x0bc\rd\u2028e"]),
    ],
)
def test_what_a_line_is(stdin, data, texts):
    stdin(data)
    assert read_texts(None, None) == texts


def test_several_arguments_are_texts_with_line_ends_and_all():
    assert read_texts(["a\nb", "-"], None) == ["a\nb", "-"]


@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf"])
def test_nothing_on_stdin(stdin, data):
    stdin(data)
    with pytest.raises(UsageError, match=r"^stdin is empty: there is nothing to embed$"):
        read_texts(None, None)


def test_nobody_waits_for_a_terminal(stdin):
    stdin(b"a", tty=True)
    with pytest.raises(UsageError, match="no text: give it with -p"):
        read_texts(None, None)
    assert read_texts(None, "-") == ["a"]


def test_a_line_that_is_no_utf8(tmp_path):
    (tmp_path / "x").write_bytes(b"a\nb\xff\n")
    with pytest.raises(UsageError, match=r"line 2 of .*x is not UTF-8 at byte 1"):
        read_texts(None, str(tmp_path / "x"))


@pytest.fixture
def fake_lm(monkeypatch):
    """What `run_embed` loads: an embedder of three vectors, and the flags it was loaded with."""
    seen = {}

    def load_model(path, settings, *, interrupted, **options):
        seen.update(options)

        def stream(texts, pooling, norm):
            seen.update(texts=texts, pooling=pooling, norm=norm)
            for i in range(3):
                if i == 2:
                    seen["interrupt"]()
                yield Embedding(1, np.float32([i + 0.1, 1e-30]))

        embedder = SimpleNamespace(stream=stream, pooling=lambda kind: kind or "cls")
        return SimpleNamespace(embedder=embedder)

    monkeypatch.setattr(command, "load_model", load_model)
    monkeypatch.setattr(command, "local_file", lambda model, settings: Path("x.gguf"))
    seen["interrupt"] = lambda: None
    return seen


def test_flags_reach_the_model(fake_lm, capfd):
    argv = ("-p", "a", "-c", "77", "--device", "cpu", "-t", "3")
    argv += ("--pooling", "last", "--embd-normalize", "1")
    assert run_cli(capfd, "embed", *argv).code == 0
    del fake_lm["interrupt"]
    assert fake_lm == {
        **{"n_ctx": 77, "device": "cpu", "threads": 3, "exact": False},
        **{"texts": ["a"], "pooling": "last", "norm": 1},
    }


def test_numbers_have_the_digits_that_tell_them(fake_lm, capfd):
    assert run_cli(capfd, "embed", "-p", "a").out == "0.1 1e-30\n1.1 1e-30\n2.1 1e-30\n"
    report = json.loads(run_cli(capfd, "embed", "-p", "a", "--json").out)
    assert report["data"][1] == {"index": 1, "n_tokens": 1, "embedding": [1.1, 1e-30]}
    assert report["pooling"] == "cls"


def test_ctrl_c_leaves_after_whole_lines(fake_lm, monkeypatch, capfd):
    asked = []
    event = SimpleNamespace(is_set=lambda: bool(asked))
    monkeypatch.setattr(command, "stop_on_interrupt", lambda: nullcontext(event))
    fake_lm["interrupt"] = lambda: asked.append(1)
    result = run_cli(capfd, "embed", "-p", "a")
    assert (result.code, result.out) == (130, "0.1 1e-30\n1.1 1e-30\n")
    asked.clear()
    assert run_cli(capfd, "embed", "-p", "a", "--json").out == ""


@pytest.mark.parametrize(
    "argv",
    [["embed", "--help"], ["embed", "-p", "a", "-c", "-1"], ["embed", "-m", "/none", "-p", "a"]],
)
def test_jax_is_not_imported_for_what_does_not_need_it(argv):
    process = [sys.executable, "-c", _IMPORTED, *argv]
    done = subprocess.run(process, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1].endswith(" False")
