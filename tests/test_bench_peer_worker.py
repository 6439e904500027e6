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


def open_sizes(**changes):
    return {"do": "open", "n_ctx": 90, "n_seq_max": 3, "kv_unified": True, **changes}


def test_another_context_takes_the_place_of_the_first(talk):
    answers, calls = talk(load(), open_sizes(), open_sizes(n_ctx=60, kv_unified=False))
    assert answers[1:] == [{"result": None}] * 3
    assert [call[0] for call in calls[2:]] == ["context", "end", "context", "end", "context"]
    first, *others = [call[1] for call in calls if call[0] == "context"]
    assert others == [
        {**first, "n_ctx": 90, "n_seq_max": 3, "kv_unified": True},
        {**first, "n_ctx": 60, "n_seq_max": 3, "kv_unified": False},
    ]


def test_a_context_that_cannot_be_is_said_and_the_next_one_is_made(talk):
    answers, calls = talk(load(), open_sizes(n_ctx=13), open_sizes())
    assert answers[2:] == [
        {"error": "llama.cpp cannot make a context of 13 tokens"},
        {"result": None},
    ]
    # The second has nothing left to end.
    assert [call for call in calls if call[0] == "end"] == [["end", 8], ["end", None]]


def rows(*given):
    """A call with rows of (token, position, sequence, logits), and the wait for it."""
    full = [[token, pos, 1, [seq], wanted] for token, pos, seq, wanted in given]
    return [["rows", len(given), full], ["wait"]]


def test_a_prompt_for_each_sequence_then_steps_of_a_token_for_each(talk):
    run = {"do": "run_batched", "prompts": [[3, 4], [5, 6]], "steps": [[7, 8], [9, 1]]}
    answers, calls = talk(load(), open_sizes(), run)
    prefill_ns, steps_ns = answers[3]["result"]
    assert prefill_ns > 0 and steps_ns > 0
    assert calls[5:] == [
        ["clear", False],
        *rows((3, 0, 0, False), (4, 1, 0, True), (5, 0, 1, False), (6, 1, 1, True)),
        ["free", 4],
        *rows((7, 2, 0, True), (8, 2, 1, True)),
        *rows((9, 3, 0, True), (1, 3, 1, True)),
        *[["free", 2]] * 2,
    ]


SHARED = {"do": "run_batched", "prompts": [[3, 4]], "steps": [[7, 8, 9]]}
_COPIES = [["copy", 0, 1, -1, -1], ["copy", 0, 2, -1, -1]]


def test_in_unified_cells_a_prompt_is_shared_as_it_is(talk):
    _, calls = talk(load(), open_sizes(), SHARED)
    assert calls[5:] == [
        ["clear", False],
        *rows((3, 0, 0, False), (4, 1, 0, True)),
        ["free", 2],
        *_COPIES,
        *rows((7, 2, 0, True), (8, 2, 1, True), (9, 2, 2, True)),
        ["free", 3],
    ]


def test_streams_are_copied_before_the_steps_clock_starts(talk):
    _, calls = talk(load(), open_sizes(kv_unified=False), SHARED)
    assert calls[9:] == [
        *_COPIES,
        *rows((0, 2, 0, True)),
        ["free", 1],
        ["remove", 0, 2, -1],
        *rows((7, 2, 0, True), (8, 2, 1, True), (9, 2, 2, True)),
        ["free", 3],
    ]


def test_a_model_that_cannot_go_back_cannot_share_its_prompt_across_streams(talk):
    run = {**SHARED, "prompts": [[1, 2, 3, 4, 5, 6]]}
    answers, _ = talk(load(), open_sizes(kv_unified=False), run)
    assert answers[3] == {
        "error": "llama.cpp cannot share this model's prompt but in unified cells"
    }


def test_long_prompts_go_in_batches_of_2048(talk):
    prompts = [[1] * 1500, [2] * 1500]
    _, calls = talk(load(), open_sizes(), {**SHARED, "prompts": prompts, "steps": [[7, 8]]})
    assert [call[1] for call in calls if call[0] == "rows"] == [2048, 952, 2]


def test_a_batch_that_fails_is_freed_like_the_others(talk):
    answers, calls = talk(load(), open_sizes(), {**SHARED, "steps": [[7, 98, 9], [1, 2, 3]]})
    assert answers[3] == {"error": "llama_decode returned 1"}
    assert calls[-2:] == [["free", 3]] * 2


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
