"""Choosing a device, and saying aloud when it is not the one that was hoped for."""

import functools
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from test_cli_main import run_process

from minfer_jax import device as module
from minfer_jax.device import (
    available_devices,
    device_errors,
    host_memory,
    idle_accelerator,
    select_device,
)
from minfer_jax.errors import MinferError, UsageError

CPU = SimpleNamespace(id=0, platform="cpu", device_kind="cpu")
GPU = SimpleNamespace(id=0, platform="gpu", device_kind="NVIDIA H200")


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
