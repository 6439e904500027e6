"""What the system says of itself, and what is said where it does not."""

import os
import platform
import sys
from pathlib import Path

import numpy as np
import pytest

from minfer_jax.bench import machine
from minfer_jax.bench.machine import cpu_flags, cpu_info, load_average, peak_memory

X86 = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2 avx512f avx512_vnni avx\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\nCPU part\t: 0xd0c\n"


@pytest.fixture
def cpuinfo(monkeypatch):
    def write(text):
        monkeypatch.setattr(machine, "_lines", lambda path: text.splitlines())

    return write


def test_an_x86(cpuinfo):
    cpuinfo(X86)
    assert cpu_info() == "AMD EPYC"
    assert cpu_flags() == ["avx2", "avx512f", "avx512_vnni"]


def test_an_arm(cpuinfo, monkeypatch):
    cpuinfo(ARM)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert cpu_info() == "aarch64"
    assert cpu_flags() == ["asimddp", "i8mm"]


def test_a_system_without_these_files(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda self: (_ for _ in ()).throw(OSError()))
    assert cpu_flags() == [] and cpu_info()
    if sys.platform != "win32":
        assert peak_memory() > 1 << 20  # from getrusage


def test_the_load_of_the_last_minute(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (1.239, 5.0, 6.0), raising=False)
    assert load_average() == 1.24
    monkeypatch.delattr(os, "getloadavg")
    assert load_average() is None


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_the_peak_stays_after_the_memory_is_gone(cpuinfo):
    before = peak_memory()
    assert np.ones(1 << 26, np.uint8).sum() == 1 << 26
    now = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmRSS")
    )
    assert peak_memory() >= max(before, now)
    cpuinfo("VmPeak:\t  9 kB\nVmHWM:\t  7 kB\n")
    assert peak_memory() == 7 * 1024
