"""`doctor`: what this installation is made of, what it found, and what is missing."""

from __future__ import annotations

import json as jsonlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from minfer_jax.settings import Settings

_PACKAGES = ("minfer-jax", "jax", "jaxlib", "numpy", "tokenizers", "jinja2")


def run_doctor(device: str, *, json: bool) -> None:
    """Print versions, devices, native code and caches."""
    report = _report(device, Settings.from_env())
    if json:
        print(jsonlib.dumps(report))
        return
    for section, entries in report.items():
        print(section)
        for name, value in entries.items():
            print(f"  {name:12}  {value}")


def _report(device: str, settings: Settings) -> dict[str, dict[str, Any]]:
    import jax

    from minfer_jax.device import idle_accelerator, select_device
    from minfer_jax.graph import disk
    from minfer_jax.hub import cached, catalog

    chosen = select_device(device)
    xla = disk.enable(settings.xla_dir)
    warnings = {}
    if idle := idle_accelerator(chosen):
        warnings["warning"] = idle
    if _installed("jax-metal"):
        # Apple's own plugin fails from jax 0.5.1 on and has had no release since.
        warnings["jax-metal"] = "does not work with this jax: uninstall it, install jax-mps"
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: _installed(name) or "not installed" for name in _PACKAGES},
            "system": f"{platform.system()} {platform.machine()}",
        },
        "devices": {
            "found": ", ".join(f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()),
            "in use": f"{chosen.platform}:{chosen.id} {chosen.device_kind}",
            **warnings,
        },
        "native code": {"kernels": "none in this version; every graph runs through XLA"},
        "caches": {
            "models": f"{settings.models_dir} ({_size(settings.models_dir)})",
            **{
                alias.name: str(cached(alias, settings.models_dir) or "not fetched yet")
                for alias in catalog().values()
            },
            "graphs": f"{xla} ({_size(xla)})" if xla else "off: the folder cannot be used",
        },
    }


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _size(folder: Path) -> str:
    files = [f for f in folder.rglob("*") if f.is_file()] if folder.is_dir() else []
    return f"{len(files)} files, {sum(f.stat().st_size for f in files) / (1 << 20):.1f} MiB"
