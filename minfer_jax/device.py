"""Which of jax's devices to run on, and saying aloud when it is not the one that was hoped for."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import jax
from jax._src.xla_bridge import backends_are_initialized  # jax has no public name for it

from minfer_jax.errors import MinferError, UsageError
from minfer_jax.settings import MAX_THREADS, client_threads

AUTO = "auto"

_threads: int | None = None
"""What `set_threads` was told."""


class Device(Protocol):
    """What is read of a jax device."""

    id: int
    platform: str
    device_kind: str


def select_device(name: str = AUTO) -> Device:
    """The first device of a platform: `auto` for jax's choice, or cpu, gpu, tpu...

    Raises `UsageError` if jax has no such device here.
    """
    wanted = name.lower()
    if found := available_devices(wanted):
        return found[0]
    if wanted == AUTO:
        raise UsageError(
            f"jax finds no device for JAX_PLATFORMS={_asked_of_jax()}: unset it, or pass"
            " --device cpu"
        )
    here = {"cpu", *(device.platform for device in available_devices())}
    raise UsageError(
        f"--device {name or repr(name)}: jax finds no such device here (it has"
        f" {', '.join(sorted(here))}); `minfer-jax doctor` says more"
    )


def available_devices(name: str = AUTO) -> list[Device]:
    """Devices of a platform, `auto` for the one that jax prefers; empty where jax finds none."""
    if not name:  # which jax takes for auto
        return []
    try:
        return list(jax.devices(None if name == AUTO else name))
    except (RuntimeError, AssertionError):  # the latter if JAX_PLATFORMS names a missing plugin
        return []


@contextmanager
def device_errors(what: str = "the device failed") -> Iterator[None]:
    """Raise a `MinferError` for what jax raises when a device fails: out of memory, above all."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        full = "RESOURCE_EXHAUSTED" in str(error)
        remedy = ": lower -c/--n-ctx, or use a smaller model" if full else ""
        raise MinferError(f"{what}: {error}{remedy}") from error


def idle_accelerator(device: Device) -> str | None:
    """One line if `device` is the CPU although the machine seems to have an accelerator.

    Looks at the system, not at jax, which falls back to the CPU without a word.
    """
    if device.platform != "cpu" or _asked_of_jax() == "cpu":
        return None
    found = _accelerator_of_system()
    if found is None:
        return None
    kind, remedy = found
    return f"running on the CPU, but this machine seems to have {kind}: {remedy}"


def set_threads(n: int | None) -> None:
    """Give jax's CPU client, and all that asks `threads`, n threads; None: one for each CPU.

    Raises `UsageError` if the client has started with another number, which is fixed from then on.
    """
    global _threads
    n = _usable_cpus() if n is None else n
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_THREADS:
        raise UsageError(f"threads is {n!r}; allowed: 1 to {MAX_THREADS}")
    if backends_are_initialized() and n != threads():
        raise UsageError(
            f"jax has started with {threads()} threads, not {n}: set their number before that"
        )
    _threads = n
    # The size of the client's pool of threads, which it reads once, when it starts.
    os.environ["PJRT_NPROC"] = str(n)


def settle_threads() -> None:
    """`set_threads(None)`, unless jax's client has started or the environment asks for a number."""
    if not backends_are_initialized() and client_threads() is None:
        set_threads(None)


def threads() -> int:
    """Threads that compute on the CPU."""
    return _threads or client_threads() or _usable_cpus()


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def host_memory() -> int | None:
    """Bytes of memory that this process may use: the machine's, or its container's limit."""
    if not hasattr(os, "sysconf"):
        return None
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroups v2 and v1
        try:
            limits.append(int((Path("/sys/fs/cgroup") / file).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(limits)


def _asked_of_jax() -> str | None:
    # jax adds its flags to `config` at run time.
    return jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]


def _accelerator_of_system(root: Path = Path("/")) -> tuple[str, str] | None:
    if (root / "dev/nvidiactl").exists():
        return "an NVIDIA GPU", "pip install 'minfer-jax[cuda]'"
    if (root / "dev/kfd").exists():
        return "an AMD GPU", "install jax's ROCm plugin"
    if (root / "dev/accel0").exists():
        return "a TPU", "pip install 'minfer-jax[tpu]'"
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return "an Apple GPU", "pip install jax-mps"
    return None
