"""`doctor`: what this installation is made of, what it found, and what is missing."""

from __future__ import annotations

import json as jsonlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minfer_jax.errors import UsageError
from minfer_jax.settings import Settings

if TYPE_CHECKING:
    from minfer_jax.device import Device

_PACKAGES = ("minfer-jax", "jax", "jaxlib", "numpy", "tokenizers", "jinja2")


def run_doctor(device: str, *, json: bool) -> None:
    """Print versions, devices, native code and caches.

    Raises `UsageError` after that if there is no such device.
    """
    report = _report(device, Settings.from_env())
    if json:
        print(jsonlib.dumps(report, ensure_ascii=False))
    else:
        print("\n".join(_lines(report)))
    if error := report["devices"].get("error"):
        raise UsageError(error)


def _lines(report: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for section, entries in report.items():
        lines += [section, *(f"  {name:12}  {value}" for name, value in entries.items())]
    return lines


def _report(device: str, settings: Settings) -> dict[str, dict[str, Any]]:
    from minfer_jax.graph import disk
    from minfer_jax.hub import cached, catalog

    xla = disk.enable(settings.xla_dir)
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: _installed(name) or "not installed" for name in _PACKAGES},
            "system": f"{platform.system()} {platform.machine()}",
        },
        "devices": _devices(device),
        "native code": {"kernels": _kernels()},
        "caches": {
            "models": f"{settings.models_dir} ({_size(settings.models_dir)})",
            **{
                alias.name: str(cached(alias, settings.models_dir) or "not fetched yet")
                for alias in catalog().values()
            },
            "graphs": f"{xla} ({_size(xla)})" if xla else "off: the folder cannot be used",
        },
    }


def _kernels() -> str:
    from minfer_jax.ops.cpu.library import library, register_targets

    found = library()
    if found is None or not register_targets():
        what = "not built" if found is None else "built for another jaxlib"
        return (
            f"{what}, so the CPU runs through XLA alone: install this package again, with a C++17"
            " compiler (GCC or Clang)"
        )
    best, *others = found.variants
    return f"{best} (runs here, too: {', '.join(others) or 'no other'})"


def _devices(device: str) -> dict[str, str]:
    from minfer_jax.device import available_devices, idle_accelerator, select_device

    report = {"found": ", ".join(map(_device, available_devices())) or "none"}
    try:
        chosen = select_device(device)
        report["in use"] = _device(chosen)
        if idle := idle_accelerator(chosen):
            report["warning"] = idle
    except UsageError as error:
        report["error"] = str(error)
    if _installed("jax-metal"):
        # Apple's own plugin fails from jax 0.5.1 on and has had no release since.
        report["jax-metal"] = "does not work with this jax: uninstall it, install jax-mps"
    return report


def _device(device: Device) -> str:
    return f"{device.platform}:{device.id} {device.device_kind}"


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _size(folder: Path) -> str:
    files = [f for f in folder.rglob("*") if f.is_file()] if folder.is_dir() else []
    return f"{len(files)} files, {sum(f.stat().st_size for f in files) / (1 << 20):.1f} MiB"
