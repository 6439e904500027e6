"""The number of threads: set before jax starts, told afterwards, never silently another."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from test_cli_main import request_parser, run_cli

from minfer_jax import device
from minfer_jax.device import set_threads, threads
from minfer_jax.errors import UsageError

_COUNT = """
import os, sys
from minfer_jax.device import set_threads, threads
set_threads(None if sys.argv[1] == "all" else int(sys.argv[1]))
import jax
jax.devices()
tasks = [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
print(threads(), sum(name.startswith("tf_XLAEigen") for name in tasks))
"""


@pytest.fixture
def untouched(monkeypatch):
    """Puts back what a test changes of the process."""
    monkeypatch.setattr(device, "_threads", device._threads)
    monkeypatch.setenv("PJRT_NPROC", "?")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
@pytest.mark.parametrize("asked", ["1", "3", "all"])
def test_jaxs_pool_has_as_many_threads(asked):
    done = subprocess.run(
        [sys.executable, "-c", _COUNT, asked],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PJRT_NPROC": "7"},
    )
    n = len(os.sched_getaffinity(0)) if asked == "all" else int(asked)
    assert done.stdout.split() == [str(n), str(n)], done.stderr


def test_once_jax_has_started_only_the_same_number_will_do(untouched):
    jax.devices()
    n = threads()
    set_threads(n)
    assert os.environ["PJRT_NPROC"] == str(n) and threads() == n
    with pytest.raises(UsageError, match=f"jax has started with {n} threads, not {n + 1}"):
        set_threads(n + 1)
    assert os.environ["PJRT_NPROC"] == str(n) and threads() == n


def test_before_it_starts_any_number_will_do(untouched, monkeypatch):
    monkeypatch.setattr(device, "backends_are_initialized", lambda: False)
    for n in (5, 1, 1024):
        set_threads(n)
        assert (threads(), os.environ["PJRT_NPROC"]) == (n, str(n))
    set_threads(None)
    assert threads() == device._usable_cpus() > 0


@pytest.mark.parametrize("n", [0, -1, 1025, True, 2.0, "2"])
def test_numbers_that_no_machine_has(n, untouched):
    with pytest.raises(UsageError, match="allowed: 1 to 1024"):
        set_threads(n)


def test_where_the_system_does_not_know_the_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert device._usable_cpus() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert device._usable_cpus() == 1


@pytest.mark.parametrize(("argv", "n"), [([], None), (["-t", "2"], 2), (["--threads", "1"], 1)])
def test_the_flag_reaches_the_request(argv, n, monkeypatch, capfd):
    request, _ = request_parser(monkeypatch, capfd)("hi", *argv)
    assert request.threads == n


@pytest.mark.parametrize("n", ["0", "-1", "1025"])
def test_the_flag_is_checked_before_jax_starts(n, capfd):
    result = run_cli(capfd, "generate", "hi", "-t", n)
    assert (result.code, result.error) == (2, f"-t/--threads is {n}; allowed: 1 to 1024")


def test_generate_says_in_one_line_that_jax_has_started(tiny_path, capfd):
    jax.devices()
    argv = ("generate", "-m", str(tiny_path("llama-dense")), "-t", str(threads() + 1), "hi")
    result = run_cli(capfd, *argv)
    assert result.code == 2 and result.error.startswith("jax has started with")
