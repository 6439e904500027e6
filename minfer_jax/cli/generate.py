"""`generate`: a prompt in, streamed text on stdout, the run report on stderr."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minfer_jax.cli import INTERRUPTED
from minfer_jax.cli.report import RunReport
from minfer_jax.cli.session import load_model
from minfer_jax.errors import UsageError
from minfer_jax.generate import Generation


@dataclass(frozen=True, kw_only=True)
class Request:
    """The flags of one run."""

    model: str | None
    prompt: list[str]
    file: str | None
    system: str
    no_template: bool
    n_predict: int
    n_ctx: int
    n_ubatch: int
    sampling: dict[str, Any]
    stop: list[str]
    flash_attn: str
    exact: bool
    device: str
    json: bool


def run_generate(request: Request) -> int:
    """The exit code."""
    started = time.perf_counter()
    prompt = _prompt(request)
    if request.flash_attn not in ("on", "off", "auto"):
        raise UsageError(f"--flash-attn is {request.flash_attn!r}; allowed: on, off, auto")
    lm = load_model(
        request.model,
        n_ctx=request.n_ctx,
        n_ubatch=request.n_ubatch,
        exact=request.exact,
        flash_attn=request.flash_attn != "off",
        device=request.device,
    )
    load_seconds = time.perf_counter() - started
    out = Generation()
    template = not request.no_template and lm.chat_template is not None
    with _flag_on_interrupt() as interrupted:
        pieces = lm.stream(
            prompt,
            request.n_predict,
            stop=request.stop,
            template=template,
            system=request.system or None,
            abort=lambda: bool(interrupted),
            into=out,
            **request.sampling,
        )
        text = "".join(pieces) if request.json else _print(pieces)
    RunReport(lm=lm, run=out, text=text, load_seconds=load_seconds).print(json=request.json)
    return INTERRUPTED if out.finish_reason == "abort" else 0


def _prompt(request: Request) -> str:
    """The prompt from the one place that it was given in."""
    sources = [*request.prompt, *([request.file] if request.file is not None else [])]
    if len(sources) != 1:
        found = "none was given" if not sources else "it was given more than once"
        raise UsageError(f"give one prompt, as PROMPT, with -p or with -f FILE: {found}")
    if request.file is not None:
        data = Path(request.file).read_bytes()
    elif request.prompt[0] == "-":
        data = sys.stdin.buffer.read()
    else:
        return request.prompt[0]
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt is not UTF-8 at byte {error.start}") from error


def _print(pieces: Iterator[str]) -> str:
    """Write pieces to stdout as they come, and a line end after the last."""
    out = sys.stdout.buffer
    text = []
    for piece in pieces:
        text.append(piece)
        out.write(piece.encode("utf-8"))
        out.flush()
    if not text or not text[-1].endswith("\n"):
        out.write(b"\n")
        out.flush()
    return "".join(text)


@contextmanager
def _flag_on_interrupt() -> Iterator[list[int]]:
    """While it lasts, the first Ctrl-C only fills the list: generation then ends between steps.

    The second one interrupts whatever runs.
    """
    signals: list[int] = []

    def handle(number: int, _frame: object) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(number)

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGINT, previous)
