"""The worker's protocol, as a process: JSON lines in and out, nothing else on stdout."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_llama import read_log, write_fake_llama

from minfer_jax.bench import peer_worker


@pytest.fixture
def talk(tmp_path, monkeypatch):
    """Sends requests, and returns the answers and what llama.cpp was asked."""
    log = write_fake_llama(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_LLAMA_LOG", str(log))

    def talk(*requests):
        done = subprocess.run(
            [sys.executable, peer_worker.__file__],
            input="".join(json.dumps(r) + "\n" for r in requests),
            capture_output=True,
            text=True,
            timeout=60,
        )
        # What others print is kept apart from the answers.
        noise = "noise from the library\nnoise from native code\n"
        assert (done.returncode, done.stderr) == (0, noise)
        return [json.loads(line) for line in done.stdout.splitlines()], read_log(log)

    return talk


def load(**changes):
    sizes = {"n_ctx": 640, "n_ubatch": 256, "n_threads": 3, "n_gpu_layers": 0, "type_kv": 1}
    return {"do": "load", "model": "/m.gguf", **sizes, **changes}


def test_sizes_reach_the_context_and_the_rest_keeps_its_default(talk):
    answers, calls = talk(load())
    assert answers == [{"name": "llama.cpp", "version": "9.9.9"}, {"result": None}]
    assert calls[0][0] == "init"
    assert calls[1:] == [
        ["model", "/m.gguf", 0],
        [
            "context",
            {
                "flash_attn_type": -1,
                "swa_full": False,
                "n_ctx": 640,
                "n_batch": 2048,
                "n_ubatch": 256,
                "n_threads": 3,
                "n_threads_batch": 3,
                "type_k": 1,
                "type_v": 1,
            },
        ],
    ]


def test_a_prompt_goes_in_batches_of_2048(talk):
    tokens = list(range(3000))
    answers, calls = talk(load(), {"do": "run", "keep": 0, "tokens": tokens, "n_batch": 3000})
    assert answers[2]["result"] > 0
    assert calls[3:] == [
        ["clear", False],
        ["decode", tokens[:2048]],
        ["wait"],
        ["decode", tokens[2048:]],
        ["wait"],
    ]


def test_each_run_starts_from_what_was_filled_in(talk):
    again = {"do": "run", "keep": 2, "n_batch": 1}
    _, calls = talk(
        load(),
        {"do": "fill", "tokens": [7, 8]},
        {**again, "tokens": [1]},
        {**again, "tokens": [2]},
        {"do": "fill", "tokens": []},
        {**again, "keep": 0, "tokens": [3]},
    )
    start = [["clear", False], ["restore", 0, [7, 8]]]
    assert [call for call in calls[3:] if call != ["wait"]] == [
        *(["clear", False], ["decode", [7, 8]]),
        *(*start, ["decode", [1]]),
        *(*start, ["decode", [2]]),
        *(["clear", False], ["clear", False], ["decode", [3]]),
    ]


def test_what_is_needed_is_what_is_called():
    called = set(re.findall(r"llama\.(llama_\w+)", Path(peer_worker.__file__).read_text()))
    assert called == set(peer_worker._NEEDED)


def test_after_a_failure_it_goes_on(talk):
    answers, _ = talk(
        load(),
        {"do": "run", "keep": 0, "tokens": [98], "n_batch": 1},
        {"do": "fill", "tokens": [1]},
    )
    assert answers[2:] == [{"error": "llama_decode returned 1"}, {"result": None}]


def test_it_imports_nothing_of_ours():
    assert "minfer_jax" not in Path(peer_worker.__file__).read_text()
