"""The peer's side of a measurement: a process that loads the same file and waits for its turn."""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from minfer_jax.errors import MinferError, UsageError

PEERS = ("llama.cpp",)

_WORKER = Path(__file__).with_name("peer_worker.py")
_POLL_SECONDS = 0.1  # between two looks at `abort` while the peer computes


class PeerSide:
    """A running peer. Use `started`, which ends it however the block is left."""

    def __init__(self, process: subprocess.Popen[str], *, abort: Callable[[], bool]) -> None:
        self._process = process
        self._abort = abort
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="peer", daemon=True)
        self._reader.start()
        self.name, self.version = PEERS[0], ""

    def greet(self, python: str) -> None:
        """Learn the peer's version; `MinferError` if `python` has no `llama_cpp`."""
        hello = self._receive()
        if "missing" in hello:
            raise MinferError(
                f"--peer llama.cpp: {python} cannot import llama_cpp ({hello['missing']}):"
                " pip install 'minfer-jax[peer]' there, or name another Python with --peer-python"
            )
        self.name, self.version = hello["name"], hello["version"]

    def load(self, model: Path, *, n_ctx: int, n_ubatch: int, n_threads: int, on_cpu: bool) -> None:
        """Open the file with everything as on our side. Flash attention is the peer's choice."""
        self._ask(
            "load",
            model=str(model.absolute()),
            n_ctx=n_ctx,
            n_ubatch=n_ubatch,
            n_threads=n_threads,
            n_gpu_layers=0 if on_cpu else 9999,
        )

    def fill(self, tokens: Sequence[int]) -> None:
        """As `OurSide.fill`."""
        self._ask("fill", tokens=list(tokens))

    def run(self, keep: int, tokens: Sequence[int], n_batch: int) -> int:
        """As `OurSide.run`; the clock is the peer's own."""
        return self._ask("run", keep=keep, tokens=list(tokens), n_batch=n_batch)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        process = self._process
        process.kill()
        process.wait()
        self._reader.join()
        assert process.stdin is not None and process.stdout is not None
        process.stdout.close()
        with suppress(BrokenPipeError):
            process.stdin.close()

    def _ask(self, do: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        try:
            print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None
        answer = self._receive()
        if "error" in answer:
            raise MinferError(f"the peer failed: {answer['error']}")
        return answer["result"]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _receive(self) -> dict[str, Any]:
        while True:
            if self._abort():
                raise KeyboardInterrupt
            try:
                line = self._lines.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if not line:
                raise self._ended()
            return json.loads(line)

    def _ended(self) -> MinferError:
        return MinferError(f"the peer's process ended early, with exit code {self._process.wait()}")


@contextmanager
def started(python: str | None, *, abort: Callable[[], bool]) -> Iterator[PeerSide]:
    """A peer in a process of its own, run by `python` (None: the one that runs us).

    Raises `UsageError` if there is no such program and `MinferError` if it has no `llama_cpp`.
    """
    program = shutil.which(python or sys.executable)
    if program is None:
        raise UsageError(f"--peer-python {python}: no such program, or it cannot be executed")
    # A session of its own: a Ctrl-C is ours to handle, and the process is ended below.
    process = subprocess.Popen(
        [program, str(_WORKER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        start_new_session=True,
    )
    side = PeerSide(process, abort=abort)
    try:
        side.greet(program)
        yield side
    finally:
        side.close()
