"""Choosing a device, and saying aloud when it is not the one hoped for; how many threads."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from test_cli_main import request_parser, run_cli, run_process

from minfer_jax import device as module
from minfer_jax.device import (
    available_devices,
    device_errors,
    host_memory,
    idle_accelerator,
    select_device,
    set_threads,
    threads,
)
from minfer_jax.errors import MinferError, UsageError

CPU = SimpleNamespace(id=0, platform="cpu", device_kind="cpu")
GPU = SimpleNamespace(id=0, platform="gpu", device_kind="NVIDIA H200")

_COUNT = """
import os, sys
from minfer_jax.device import set_threads, threads
set_threads(None if sys.argv[1] == "all" else int(sys.argv[1]))
import jax
jax.devices()
tasks = [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
print(threads(), sum(name.startswith("tf_XLAEigen") for name in tasks))
"""


@pytest.mark.parametrize("name", ["auto", "AUTO", "cpu", "CPU"])
def test_the_cpu_is_found(name):
    assert select_device(name) == jax.devices("cpu")[0]


@pytest.mark.parametrize("name", ["gpu", "tpu", "metal", "nonsense"])
def test_a_device_that_is_not_here(name):
    assert available_devices(name) == []
    with pytest.raises(UsageError, match=rf"--device {name}: .*it has cpu"):
        select_device(name)


def test_an_empty_name_is_not_jaxs_default():
    with pytest.raises(UsageError, match="--device ''"):
        select_device("")


@pytest.fixture
def accelerated(monkeypatch):
    """A jax with one accelerator beside the CPU."""
    found = {None: [GPU], "gpu": [GPU], "cuda": [GPU], "cpu": [CPU]}
    monkeypatch.setattr(jax, "devices", lambda name=None: found[name])


def test_jax_has_the_choice_unless_told(accelerated):
    assert select_device() == GPU and select_device("gpu") == GPU
    assert select_device("cpu") == CPU


def test_jaxs_environment_is_named_where_it_is_wrong(tiny_path):
    argv = ("generate", "-m", str(tiny_path("llama-dense")), "hi")
    result = run_process(*argv, env={"JAX_PLATFORMS": "cuda"})
    assert result.code == 2
    assert result.error == (
        "jax finds no device for JAX_PLATFORMS=cuda: unset it, or pass --device cpu"
    )


def test_a_device_out_of_memory_is_one_line_with_a_remedy():
    with pytest.raises(MinferError, match="lower -c/--n-ctx") as caught, device_errors():
        jnp.zeros((1 << 31, 1 << 12), jnp.float32)
    assert "\n" not in str(caught.value)


def test_other_errors_pass():
    with pytest.raises(ZeroDivisionError), device_errors():
        _ = 1 // 0
    with pytest.raises(MinferError, match=r"^the device failed: lost$"), device_errors():
        raise jax.errors.JaxRuntimeError("lost")


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A Linux machine without accelerators, on which jax was not told what to use."""
    (tmp_path / "dev").mkdir()
    look = functools.partial(module._accelerator_of_system, tmp_path)
    monkeypatch.setattr(module, "_accelerator_of_system", look)
    monkeypatch.setattr(module, "_asked_of_jax", lambda: None)
    monkeypatch.setattr(module.platform, "system", lambda: "Linux")
    return tmp_path / "dev"


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ("nvidiactl", "an NVIDIA GPU: pip install 'minfer-jax\\[cuda\\]'"),
        ("kfd", "an AMD GPU"),
        ("accel0", "a TPU: pip install 'minfer-jax\\[tpu\\]'"),
    ],
)
def test_an_idle_accelerator_is_said_aloud(node, words, system):
    assert idle_accelerator(CPU) is None
    (system / node).touch()
    warning = idle_accelerator(CPU)
    assert warning and warning.startswith("running on the CPU, but this machine seems to have")
    assert words.replace("\\", "") in warning
    assert idle_accelerator(GPU) is None


def test_on_apple_silicon(system, monkeypatch):
    monkeypatch.setattr(module.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(module.platform, "machine", lambda: "arm64")
    assert "pip install jax-mps" in (idle_accelerator(CPU) or "")


def test_who_asked_for_the_cpu_is_not_warned(system, monkeypatch):
    (system / "nvidiactl").touch()
    monkeypatch.setattr(module, "_asked_of_jax", lambda: "cpu")
    assert idle_accelerator(CPU) is None


def test_memory_is_the_machines_or_the_containers(monkeypatch):
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < host_memory() <= physical
    limit = 123_000_000
    monkeypatch.setattr(Path, "read_text", lambda self: f"{limit}\n")
    assert host_memory() == limit
    monkeypatch.setattr(Path, "read_text", lambda self: "max\n")
    assert host_memory() == physical


@pytest.fixture
def untouched(monkeypatch):
    """Puts back what a test changes of the process."""
    monkeypatch.setattr(module, "_threads", module._threads)
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
    monkeypatch.setattr(module, "backends_are_initialized", lambda: False)
    for n in (5, 1, 1024):
        set_threads(n)
        assert (threads(), os.environ["PJRT_NPROC"]) == (n, str(n))
    set_threads(None)
    assert threads() == module._usable_cpus() > 0


@pytest.mark.parametrize("n", [0, -1, 1025, True, 2.0, "2"])
def test_numbers_that_no_machine_has(n, untouched):
    with pytest.raises(UsageError, match="allowed: 1 to 1024"):
        set_threads(n)


def test_where_the_system_does_not_know_the_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert module._usable_cpus() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert module._usable_cpus() == 1


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
