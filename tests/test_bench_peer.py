"""The peer from our side: its answers, its failures, its end. llama.cpp itself is a fake."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fake_llama import is_running, read_log, write_fake_llama

from minfer_jax.bench import peer as module
from minfer_jax.bench.peer import started
from minfer_jax.errors import MinferError, UsageError

SIZES = {"n_ctx": 640, "n_ubatch": 512, "n_threads": 2, "on_cpu": True, "exact": False}


def never():
    return False


@pytest.fixture
def log(tmp_path, monkeypatch):
    log = write_fake_llama(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("FAKE_LLAMA_LOG", str(log))
    return log


@pytest.fixture
def processes(monkeypatch):
    """Every process that was started."""
    found = []

    class Popen(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            found.append(self)

    monkeypatch.setattr(module.subprocess, "Popen", Popen)
    return found


def test_it_says_what_it_is_and_computes_what_it_is_told(log, processes):
    with started(None, abort=never) as peer:
        assert (peer.name, peer.version) == ("llama.cpp", "9.9.9")
        peer.load(Path("some.gguf"), **SIZES)
        peer.fill([1, 2, 3])
        assert peer.run(3, [4, 5], 1) > 0
    assert processes[0].poll() is not None
    calls = read_log(log)
    assert calls[1] == ["model", str(Path("some.gguf").absolute()), 0]
    assert calls[2][1]["n_threads"] == calls[2][1]["n_threads_batch"] == 2
    assert calls[3:] == [
        ["clear", False],
        ["decode", [1, 2, 3]],
        ["wait"],
        ["clear", False],
        ["restore", 0, [1, 2, 3]],
        ["decode", [4]],
        ["wait"],
        ["decode", [5]],
        ["wait"],
    ]


def test_several_sequences_in_a_context_of_their_own(log):
    with started(None, abort=never) as peer:
        peer.load(Path("/some.gguf"), **SIZES)
        peer.open(n_ctx=90, n_seq_max=3, kv_unified=True)
        prefill, steps = peer.run_batched([(1, 2)], [(3, 4, 5)])
    assert prefill > 0 and steps > 0
    calls = read_log(log)
    sizes = [call[1] for call in calls if call[0] == "context"][-1]
    assert (sizes["n_ctx"], sizes["n_seq_max"], sizes["kv_unified"]) == (90, 3, True)
    tokens = [[row[0] for row in call[2]] for call in calls if call[0] == "rows"]
    assert tokens == [[1, 2], [3, 4, 5]]


@pytest.mark.parametrize(("on_cpu", "layers"), [(True, 0), (False, 9999)])
def test_it_computes_where_we_do(on_cpu, layers, log):
    with started(sys.executable, abort=never) as peer:
        peer.load(Path("/some.gguf"), **{**SIZES, "on_cpu": on_cpu})
    assert read_log(log)[1] == ["model", "/some.gguf", layers]


@pytest.mark.parametrize(("exact", "kind"), [(False, 1), (True, 0)])  # ggml's F16 and F32
def test_its_keys_and_values_are_of_our_type(exact, kind, log):
    with started(None, abort=never) as peer:
        peer.load(Path("/some.gguf"), **{**SIZES, "exact": exact})
    params = read_log(log)[2][1]
    assert (params["type_k"], params["type_v"]) == (kind, kind)


def test_a_python_without_it_is_one_line_with_the_remedy(monkeypatch, tmp_path):
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(MinferError) as caught, started(None, abort=never):
        pass
    assert str(caught.value) == (
        f"--peer llama.cpp: {sys.executable} cannot use llama_cpp (not here):"
        " pip install 'minfer-jax[peer]' there, or name another Python with --peer-python"
    )


def test_one_that_is_too_old(log, tmp_path):
    source = tmp_path / "site" / "llama_cpp" / "llama_cpp.py"
    source.write_text(source.read_text().replace("llama_get_memory", "llama_get_kv_self"))
    with (
        pytest.raises(
            MinferError, match=r"\(version 9\.9\.9 has no llama_get_memory\): pip install"
        ),
        started(None, abort=never),
    ):
        pass


@pytest.fixture
def script(tmp_path):
    """Writes a program that stands where the Python should."""

    def write(text):
        path = tmp_path / "program"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    return write


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
@pytest.mark.parametrize(
    "text",
    [
        "echo Welcome!; exec PYTHON $1",
        "cat $1",
        "yes",
        "printf '\\377\\n'; sleep 600",
        "echo 5",
        "echo '[]'",
        "echo '{}'",
        "echo '{\"name\": 1}'",
    ],
)
def test_a_program_that_is_no_python(text, script, log, processes):
    program = script(text.replace("PYTHON", sys.executable))
    with pytest.raises(MinferError) as caught, started(program, abort=never):
        pass
    assert str(caught.value) == (
        f"--peer-python {program}: it does not answer as a Python with llama_cpp would"
    )
    assert processes[0].returncode is not None


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_a_program_that_closes_its_streams_and_goes_on(script, processes, monkeypatch):
    monkeypatch.setattr(module, "_END_SECONDS", 0.1)
    program = script("exec >&- <&-; sleep 600")
    with (
        pytest.raises(MinferError, match=r"ended early, with exit code -9$"),
        started(program, abort=never),
    ):
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_a_python_behind_a_wrapper_ends_with_it(script, log):
    program = script(f'{sys.executable} "$@"; exit')

    def use():
        with started(program, abort=never) as peer:
            peer.load(Path("/some.gguf"), **SIZES)

    # Were only the wrapper ended, this would wait for the Python for ever.
    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    [_, pid] = read_log(log)[0]
    waited = threading.Event()  # the system needs a moment to take a killed process away
    assert any(not is_running(pid) or waited.wait(0.05) for _ in range(200))


def test_a_python_that_does_not_exist():
    with (
        pytest.raises(UsageError, match=r"--peer-python /no/python: no such program"),
        started("/no/python", abort=never),
    ):
        pass


@pytest.mark.parametrize(
    ("do", "words"),
    [
        (lambda peer: peer.load(Path("/broken.gguf"), **SIZES), "cannot load /broken.gguf"),
        (lambda peer: peer.load(Path("/a"), **{**SIZES, "n_ctx": 13}), "a context of 13 tokens"),
        (lambda peer: peer.fill([55]), "cannot copy this model's state"),
        (lambda peer: peer.fill([66]) or peer.run(1, [1], 1), "cannot restore this model's state"),
        (lambda peer: peer.run(6, [1], 1), "6 tokens are to be kept, the sequence began with 0"),
        (lambda peer: peer.run(0, [98], 1), "llama_decode returned 1"),
    ],
)
def test_what_fails_over_there_is_said_here(do, words, log):
    with started(None, abort=never) as peer:
        peer.load(Path("/some.gguf"), **SIZES)
        with pytest.raises(MinferError, match=f"^the peer failed: .*{words}"):
            do(peer)


def test_a_peer_that_dies_is_an_error_now_and_later(log):
    with started(None, abort=never) as peer:
        peer.load(Path("/some.gguf"), **SIZES)
        for _ in range(2):
            with pytest.raises(MinferError, match=r"ended early, .* code 3: the last words$"):
                peer.run(0, [99], 1)


def test_an_interrupt_ends_it_while_it_computes(log, processes, monkeypatch, tmp_path):
    source = tmp_path / "site" / "llama_cpp" / "llama_cpp.py"
    source.write_text(
        source.read_text().replace(
            "def llama_decode(context, batch):",
            "def llama_decode(*a):\n    import time; time.sleep(600)\ndef unused(context, batch):",
        )
    )
    asked = []

    def abort():
        asked.append(None)
        return len(asked) > 20

    with pytest.raises(KeyboardInterrupt), started(None, abort=abort) as peer:
        peer.load(Path("/some.gguf"), **SIZES)
        peer.fill([1])
    assert processes[0].poll() is not None


@pytest.mark.skipif(not hasattr(os, "getsid"), reason="needs POSIX sessions")
def test_it_does_not_share_our_terminals_ctrl_c(log, processes):
    with started(None, abort=never):
        assert os.getsid(processes[0].pid) == processes[0].pid != os.getsid(0)
