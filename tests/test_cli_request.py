"""What is checked of a request before any model is opened."""

import io
from types import SimpleNamespace
from typing import Any

import pytest

from minfer_jax.cli.request import Request, read_prompt
from minfer_jax.errors import UsageError
from minfer_jax.sampling import SamplingParams


def make_request(**changes: Any) -> Request:
    fields: dict[str, Any] = {
        "model": None,
        "prompt_sources": {"text": "hi"},
        "system": "",
        "no_template": False,
        "n_predict": 512,
        "n_ctx": 2048,
        "n_ubatch": 512,
        "sampling": SamplingParams(),
        "stop": [],
        "flash_attn": "auto",
        "exact": False,
        "device": "auto",
        "json": False,
    }
    return Request(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_predict": -2}, "-n/--n-predict is -2; allowed: -1 or more"),
        ({"n_ctx": -1}, "-c/--n-ctx is -1; allowed: 0 or more"),
        ({"n_ubatch": 0}, "-ub/--n-ubatch is 0; allowed: 1 or more"),
        ({"flash_attn": "yes"}, "--flash-attn is 'yes'; allowed: on, off, auto"),
        ({"logprobs": -1}, "logprobs is -1; allowed: integers from 0 to 1024"),
        ({"logprobs": 1025}, "logprobs is 1025"),
        ({"stop": ["a", ""]}, "--stop is empty"),
        ({"stop": ["a\udcff"]}, "the text of --stop is not UTF-8 at byte 1"),
        ({"system": "\udcff"}, "the text of --system is not UTF-8 at byte 0"),
        ({"system": "Be brief.", "no_template": True}, "--system needs the chat template"),
    ],
)
def test_refused(changes, words):
    with pytest.raises(UsageError, match=words):
        make_request(**changes)


@pytest.mark.parametrize(
    "changes",
    [{"n_predict": -1}, {"n_predict": 0}, {"n_ctx": 0}, {"n_ubatch": 1}, {"logprobs": 0}],
)
def test_limits_are_allowed(changes):
    make_request(**changes)


@pytest.mark.parametrize("source", ["text", "prompt"])
def test_an_argument_is_the_prompt_as_it_is(source):
    assert read_prompt({source: "Füchslein 🦊\n"}) == "Füchslein 🦊\n"
    assert read_prompt({source: ""}) == ""


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"hi", "hi"),
        (b"hi\n", "hi"),
        (b"hi\r\n", "hi"),
        (b"hi\n\n", "hi\n"),
        (b"\n", ""),
        ("Füchslein 🦊\n".encode(), "Füchslein 🦊"),
    ],
)
def test_a_files_last_line_end_is_left_out(data, text, tmp_path, monkeypatch):
    path = tmp_path / "prompt.txt"
    path.write_bytes(data)
    assert read_prompt({"file": str(path)}) == text
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    assert read_prompt({"text": "-"}) == text


@pytest.mark.parametrize(
    ("sources", "words"),
    [({}, "none was given"), ({"text": "a", "file": "b"}, "more than one was given")],
)
def test_one_prompt_is_wanted(sources, words):
    with pytest.raises(UsageError, match=words):
        read_prompt(sources)


def test_bytes_that_are_no_utf8(tmp_path, monkeypatch):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"abc \xff\xfe def")
    for sources in ({"file": str(path)}, {"text": "abc \udcff\udcfe def"}):
        with pytest.raises(UsageError, match="the prompt is not UTF-8 at byte 4"):
            read_prompt(sources)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.txt"):
        read_prompt({"file": str(tmp_path / "none.txt")})
