"""A process for each value: its rows, its errors, its end. The process is a fake `minfer_jax`."""

import subprocess
import sys

import pytest

from minfer_jax.bench import sweep as module
from minfer_jax.bench.sweep import bench_in_process
from minfer_jax.errors import MinferError, UsageError


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Writes the program that runs in place of ours, and gives the processes it ran in."""
    package = tmp_path / "minfer_jax"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    processes = []

    class Popen(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            processes.append(self)

    monkeypatch.setattr(module.subprocess, "Popen", Popen)

    def write(source):
        (package / "__main__.py").write_text(f"import json, sys, time\n{source}\n")
        return processes

    return write


def test_it_runs_our_bench_and_reads_its_rows(fake):
    fake("print(json.dumps([{'argv': sys.argv[1:]}])); print('note: hello', file=sys.stderr)")
    assert bench_in_process(["-p", "4", "-t", "1"]) == [
        {"argv": ["bench", "-p", "4", "-t", "1", "-o", "json"]}
    ]


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("sys.exit('note: a\\nerror: too large')", MinferError, "bench -t 9: too large"),
        ("sys.exit(3)", MinferError, "bench -t 9: it exited with 3"),
        (
            "print('error: no such', file=sys.stderr); sys.exit(2)",
            UsageError,
            "bench -t 9: no such",
        ),
    ],
)
def test_its_error_is_ours(source, kind, words, fake):
    fake(source)
    with pytest.raises(MinferError) as caught:
        bench_in_process(["-t", "9"])
    assert (type(caught.value), str(caught.value)) == (kind, words)


def test_an_interrupt_ends_it(fake, monkeypatch):
    processes = fake("time.sleep(600)")

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench_in_process([])
    assert processes[0].returncode is not None


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_one_that_does_not_end_is_killed(fake, monkeypatch, tmp_path):
    processes = fake(
        "import pathlib, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f" pathlib.Path({str(tmp_path / 'ready')!r}).touch(); time.sleep(600)"
    )

    def interrupted(self):
        while not (tmp_path / "ready").exists():
            pass
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_END_SECONDS", 0.1)
    monkeypatch.setattr(module.subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench_in_process([])
    assert processes[0].returncode == -9
