"""The peer from our side: its answers, its failures, its end. llama.cpp itself is a fake."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_llama import read_log, write_fake_llama

from minfer_jax.bench import peer as module
from minfer_jax.bench.peer import started
from minfer_jax.errors import MinferError, UsageError

SIZES = {"n_ctx": 640, "n_ubatch": 512, "n_threads": 2, "on_cpu": True}


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
        ["keep", 0, 3, -1],
        ["decode", [4]],
        ["wait"],
        ["decode", [5]],
        ["wait"],
    ]


@pytest.mark.parametrize(("on_cpu", "layers"), [(True, 0), (False, 9999)])
def test_it_computes_where_we_do(on_cpu, layers, log):
    with started(sys.executable, abort=never) as peer:
        peer.load(Path("/some.gguf"), **{**SIZES, "on_cpu": on_cpu})
    assert read_log(log)[1] == ["model", "/some.gguf", layers]


def test_a_python_without_it_is_one_line_with_the_remedy(monkeypatch, tmp_path):
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(MinferError) as caught, started(None, abort=never):
        pass
    assert str(caught.value) == (
        f"--peer llama.cpp: {sys.executable} cannot import llama_cpp (not here):"
        " pip install 'minfer-jax[peer]' there, or name another Python with --peer-python"
    )


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
        (lambda peer: peer.run(66, [1], 1), "cannot take this model's last tokens back"),
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
            with pytest.raises(MinferError, match="ended early, with exit code 3"):
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
