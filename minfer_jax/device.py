"""Which of jax's devices to run on, and saying aloud when it is not the one that was hoped for."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Protocol

import jax

from minfer_jax.errors import UsageError

AUTO = "auto"


class Device(Protocol):
    """What is read of a jax device."""

    id: int
    platform: str
    device_kind: str


def select_device(name: str = AUTO) -> Device:
    """The first device of a platform: `auto` for jax's choice, or cpu, gpu, tpu...

    Raises `UsageError` if jax has no such device here.
    """
    name = name.lower()
    try:
        if name == AUTO:
            return jax.devices()[0]
        if name == "cpu":
            # Before any backend is up, this also keeps jax from reserving a GPU's memory.
            jax.config.update("jax_platforms", "cpu")
        return jax.devices(name)[0]
    except RuntimeError as error:
        raise UsageError(
            f"--device {name}: jax finds no such device here (it has"
            f" {', '.join(sorted(platforms()))}); `minfer-jax doctor` says more"
        ) from error


def platforms() -> set[str]:
    """Platforms that jax can use in this process; the CPU is always one."""
    try:
        return {device.platform for device in jax.devices()} | {"cpu"}
    except RuntimeError:
        return {"cpu"}


def idle_accelerator(device: Device) -> str | None:
    """One line if `device` is the CPU although the machine seems to have an accelerator.

    Looks at the system, not at jax, which falls back to the CPU without a word.
    """
    # jax adds its flags to `config` at run time.
    asked = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if device.platform != "cpu" or asked == "cpu":
        return None
    found = _accelerator_of_system()
    if found is None:
        return None
    kind, remedy = found
    return f"running on the CPU, but this machine seems to have {kind}: {remedy}"


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
