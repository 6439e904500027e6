"""`tokenize`: ids and pieces, of text and of bytes."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_cli_main import run_cli

REAL = Path(__file__).parent / "data" / "real"


@pytest.fixture
def tokenize(smollm2_path, capfd):
    return lambda *argv: run_cli(capfd, "tokenize", "-m", str(smollm2_path), *argv)


def test_a_line_for_each_token(tokenize):
    golden = json.loads((REAL / "smollm2.json").read_text())["prompts"]["capital"]
    assert golden["text"].startswith("The capital of France is")
    result = tokenize("The capital of France is")
    assert (result.code, result.err) == (0, "")
    pieces = ["The", " capital", " of", " France", " is"]
    lines = [f"{i:>8}  {piece!r}" for i, piece in zip(golden["ids"], pieces, strict=False)]
    assert result.out.splitlines() == lines


def test_only_ids(tokenize):
    assert tokenize("--ids", "The capital").out == "[504, 3575]\n"


def test_json(tokenize):
    result = tokenize("--json", "The capital")
    assert json.loads(result.out) == {"ids": [504, 3575], "pieces": ["The", " capital"]}


def test_control_tokens_are_read_unless_told_not_to(tokenize):
    assert tokenize("--ids", "<|im_start|>").out == "[1]\n"
    plain = json.loads(tokenize("--json", "--no-parse-special", "<|im_start|>").out)
    assert len(plain["ids"]) > 1 and "".join(plain["pieces"]) == "<|im_start|>"


def test_no_bos_leaves_the_models_own_tokens_out(gemma3_path, capfd):
    command = ("tokenize", "-m", str(gemma3_path), "--ids", "hi")
    with_bos, without = (
        json.loads(run_cli(capfd, *command, *extra).out) for extra in ([], ["--no-bos"])
    )
    assert with_bos == [2, *without]


def test_text_may_be_empty(tokenize):
    assert tokenize("") == (0, "", "")
    assert tokenize("--ids", "").out == "[]\n"


def test_bytes_from_stdin_and_from_arguments_are_the_same(tokenize, monkeypatch):
    argument = tokenize("--json", "caf\udce9 🦊")
    assert argument.code == 0
    assert "".join(json.loads(argument.out)["pieces"][:2]).startswith("caf")
    stdin = SimpleNamespace(buffer=io.BytesIO(b"caf\xe9 " + "🦊".encode()))
    monkeypatch.setattr("sys.stdin", stdin)
    assert tokenize("--json", "-") == argument


def test_a_file_without_a_tokenizer(tiny_path, capfd):
    result = run_cli(capfd, "tokenize", "-m", str(tiny_path("llama-dense")), "hi")
    assert (result.code, result.out) == (1, "")
    assert "unsupported tokenizer model 'test'" in result.error
