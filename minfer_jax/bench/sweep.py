"""One flag over several values, each in a process of its own: some are fixed when jax starts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from minfer_jax.errors import MinferError, UsageError

_END_SECONDS = 5.0  # for a process that was told to end


def bench_in_process(argv: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of `minfer-jax bench ARGV -o json`.

    Raises `MinferError` with that process's own line if it fails, `UsageError` if that was one.
    However this is left, the process has ended.
    """
    command = [sys.executable, "-m", "minfer_jax", "bench", *argv, "-o", "json"]
    # A session of its own: a Ctrl-C is ours to handle.
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate()
        except BaseException:
            _end(process)
            raise
    if process.returncode:
        last = (err.strip().splitlines() or [f"it exited with {process.returncode}"])[-1]
        kind = UsageError if process.returncode == 2 else MinferError
        raise kind(f"bench {' '.join(argv)}: {last.removeprefix('error: ')}")
    return json.loads(out)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
