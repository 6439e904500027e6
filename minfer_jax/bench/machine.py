"""What a figure was measured on, and how much memory it took."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

# What decides how fast integer and float products are; other flags of a CPU do not.
_TELLING_FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")
_TELLING_FEATURES = ("asimddp", "i8mm", "sve")  # the same on ARM


def cpu_info() -> str:
    """The CPU's model, as the system has it."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_flags() -> list[str]:
    """The CPU's instruction sets that matter here; empty where the system does not tell."""
    found = set(_cpuinfo("flags").split()) | set(_cpuinfo("Features").split())
    return [flag for flag in (*_TELLING_FLAGS, *_TELLING_FEATURES) if flag in found]


def load_average() -> float | None:
    """Processes that wanted a CPU in the last minute, ours included: a busy machine's figures, and
    ratios above all, mean nothing. None where the system does not tell."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def peak_memory() -> int | None:
    """Bytes of memory that this process has held at most; None where the system does not tell."""
    # Unlike the `ru_maxrss` of getrusage this does not count the process that started us.
    for line in _lines(Path("/proc/self/status")):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _cpuinfo(key: str) -> str:
    for line in _lines(Path("/proc/cpuinfo")):
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
