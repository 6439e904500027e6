"""The peer's side of a measurement: a process that loads the same file and waits for its turn."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from minfer_jax.errors import MinferError, UsageError

PEERS = ("llama.cpp",)

_WORKER = Path(__file__).with_name("peer_worker.py")
_POLL_SECONDS = 0.1  # between two looks at `abort` while the peer computes
_END_SECONDS = 5.0  # for a process that has closed its streams
_GGML_F32, _GGML_F16 = 0, 1


class PeerSide:
    """A running peer. Use `started`, which ends it however the block is left.

    `process` is `python` and leads a session of its own; `log` is the file of its stderr.
    """

    def __init__(
        self,
        process: subprocess.Popen[str],
        python: str,
        log: IO[bytes],
        *,
        abort: Callable[[], bool],
    ) -> None:
        self._process = process
        self._python = python
        self._log = log
        self._abort = abort
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="peer", daemon=True)
        self._reader.start()
        self.name, self.version = PEERS[0], ""

    def greet(self) -> None:
        """Learn the peer's version; `MinferError` if its Python has no `llama_cpp` of use."""
        hello = self._receive()
        if "missing" in hello:
            raise MinferError(
                f"--peer llama.cpp: {self._python} cannot use llama_cpp ({hello['missing']}):"
                " pip install 'minfer-jax[peer]' there, or name another Python with --peer-python"
            )
        if not {"name", "version"} <= hello.keys():
            raise self._stranger()
        self.name, self.version = hello["name"], hello["version"]

    def load(
        self,
        model: Path,
        *,
        n_ctx: int,
        n_ubatch: int,
        n_threads: int,
        on_cpu: bool,
        exact: bool,
    ) -> None:
        """Open the file with sizes, threads and types of keys and values as on our side.

        The form of attention and the arithmetic are the peer's choice: it has no exact mode.
        """
        self._ask(
            "load",
            model=str(model.absolute()),
            n_ctx=n_ctx,
            n_ubatch=n_ubatch,
            n_threads=n_threads,
            n_gpu_layers=0 if on_cpu else 9999,
            type_kv=_GGML_F32 if exact else _GGML_F16,
        )

    def fill(self, tokens: Sequence[int]) -> None:
        """As `OurSide.fill`."""
        self._ask("fill", tokens=list(tokens))

    def run(self, keep: int, tokens: Sequence[int], n_batch: int) -> int:
        """As `OurSide.run`, by the peer's own clock. `keep` must be all that `fill` was given."""
        return self._ask("run", keep=keep, tokens=list(tokens), n_batch=n_batch)

    def open(self, *, n_ctx: int, n_seq_max: int, kv_unified: bool) -> None:
        """As `OurBatchedSide.open`, all else as in `load`."""
        self._ask("open", n_ctx=n_ctx, n_seq_max=n_seq_max, kv_unified=kv_unified)

    def run_batched(
        self, prompts: Sequence[Sequence[int]], steps: Sequence[Sequence[int]]
    ) -> tuple[int, int]:
        """As `OurBatchedSide.run_batched`, by the peer's own clocks."""
        prefill, generation = self._ask(
            "run_batched", prompts=[list(p) for p in prompts], steps=[list(s) for s in steps]
        )
        return prefill, generation

    def close(self) -> None:
        """End the process and those that it has started, whatever they are doing."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        self._kill()
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()
        self._reader.join()
        process.stdout.close()

    def _kill(self) -> None:
        if self._process.returncode is not None:  # its number may be somebody else's by now
            return
        if hasattr(os, "killpg"):
            # Behind a wrapper that has not become the Python, that would go on and hold the pipes.
            with suppress(PermissionError):  # what macOS answers if all have ended
                os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()

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
            try:
                answer = json.loads(line)
            except ValueError:
                raise self._stranger() from None
            if not isinstance(answer, dict):
                raise self._stranger()
            return answer

    def _stranger(self) -> MinferError:
        return MinferError(
            f"--peer-python {self._python}: it does not answer as a Python with llama_cpp would"
        )

    def _ended(self) -> MinferError:
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            code = self._process.wait()
        said = self._last_line()
        return MinferError(
            f"the peer's process ended early, with exit code {code}{said and f': {said}'}"
        )

    def _last_line(self) -> str:
        """Of what it has written to stderr; empty if it was silent."""
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


@contextmanager
def started(python: str | None, *, abort: Callable[[], bool]) -> Iterator[PeerSide]:
    """A peer in a process of its own, run by `python` (None: the one that runs us).

    Raises `UsageError` if there is no such program and `MinferError` if it is no Python or has no
    `llama_cpp` of use.
    """
    program = shutil.which(python or sys.executable)
    if program is None:
        raise UsageError(f"--peer-python {python}: no such program, or it cannot be executed")
    with tempfile.TemporaryFile() as log:
        # A session of its own: a Ctrl-C is ours to handle, and the process is ended below.
        process = subprocess.Popen(
            [program, str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        side = PeerSide(process, program, log, abort=abort)
        try:
            side.greet()
            yield side
        finally:
            side.close()
