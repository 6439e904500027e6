"""What one `generate` was asked for, checked before a model is fetched or jax is started."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minfer_jax.errors import UsageError
from minfer_jax.sampling.logprobs import checked_logprobs
from minfer_jax.sampling.params import SamplingParams
from minfer_jax.settings import MAX_THREADS

if TYPE_CHECKING:
    from minfer_jax.sampling.grammar import GrammarSpec


@dataclass(frozen=True, kw_only=True)
class Request:
    """The flags of one run; raises `UsageError` for values out of range."""

    model: str | None
    prompt_sources: Mapping[str, str]
    """As `read_prompt` takes them."""
    system: str
    no_template: bool
    n_predict: int
    n_ctx: int
    n_batch: int = 2048
    n_ubatch: int
    kv_types: tuple[str, str] | None = None
    """None: what suits `exact`."""
    swa_full: bool = False
    sampling: SamplingParams
    grammar: GrammarSpec | None = None
    logprobs: int | None = None
    """How many of the likeliest tokens to report with each one; None: no report."""
    stop: list[str]
    in_graph: bool = True
    """Whether tokens may be chosen there."""
    flash_attn: str
    exact: bool
    threads: int | None = None
    """None: as many as there are CPUs."""
    device: str
    json: bool

    def __post_init__(self) -> None:
        _at_least(-1, "-n/--n-predict", self.n_predict)
        _at_least(0, "-c/--n-ctx", self.n_ctx)
        _at_least(1, "-b/--n-batch", self.n_batch)
        _at_least(1, "-ub/--n-ubatch", self.n_ubatch)
        check_threads(self.threads)
        checked_logprobs(self.logprobs)
        if self.flash_attn not in ("on", "off", "auto"):
            raise UsageError(f"--flash-attn is {self.flash_attn!r}; allowed: on, off, auto")
        if self.system and self.no_template:
            raise UsageError("--system needs the chat template: leave --no-template out")
        if "" in self.stop:
            raise UsageError("--stop is empty: give it a text, or leave it out")
        for flag, values in (("--system", [self.system]), ("--stop", self.stop)):
            for value in values:
                utf8_text(f"the text of {flag}", argument_bytes(value))


def read_prompt(sources: Mapping[str, str]) -> str:
    """The prompt from the one place in which it was given.

    `sources` holds what was given of `text` (the argument), `prompt` (-p) and `file` (-f); any of
    them "-" stands for stdin. A file's or stdin's last line end is not part of the prompt.
    """
    if len(sources) != 1:
        found = "more than one was given" if sources else "none was given"
        raise UsageError(f"give one prompt, as PROMPT, with -p or with -f FILE: {found}")
    [(source, value)] = sources.items()
    if source != "file" and value != "-":
        return utf8_text("the prompt", argument_bytes(value))
    data = sys.stdin.buffer.read() if value == "-" else Path(value).read_bytes()
    # Editors add a byte order mark and a last line end that nobody typed.
    data = data.removeprefix(codecs.BOM_UTF8).removesuffix(b"\n").removesuffix(b"\r")
    return utf8_text("the prompt", data)


def check_threads(threads: int | None, flag: str = "-t/--threads") -> None:
    """Raise `UsageError` unless `flag` is unset or as many threads as a machine could have."""
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise UsageError(f"{flag} is {threads}; allowed: 1 to {MAX_THREADS}")


def argument_bytes(value: str) -> bytes:
    """An argument as bytes: Python keeps those that it cannot decode as surrogates."""
    return value.encode("utf-8", "surrogateescape")


def utf8_text(what: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} is not UTF-8 at byte {error.start}: convert it") from error


def _at_least(low: int, flag: str, value: int) -> None:
    if value < low:
        raise UsageError(f"{flag} is {value}; allowed: {low} or more")
