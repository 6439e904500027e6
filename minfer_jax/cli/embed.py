"""`embed`: texts in, one vector a line (or JSON) on stdout."""

from __future__ import annotations

import codecs
import json as jsonlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minfer_jax.cli import INTERRUPTED
from minfer_jax.cli.interrupt import stop_on_interrupt
from minfer_jax.cli.request import argument_bytes, check_threads, utf8_text
from minfer_jax.cli.session import load_model, local_file, waiting
from minfer_jax.errors import UsageError
from minfer_jax.pooling import POOLINGS, check_norm, cosine_similarity
from minfer_jax.settings import Settings

if TYPE_CHECKING:
    from minfer_jax.embedding import Embedding

_INT16 = 0
"""The norm whose vectors are whole numbers."""


@dataclass(frozen=True, kw_only=True)
class EmbedRequest:
    """The flags of one run; raises `UsageError` for values out of range."""

    model: str | None
    pooling: str | None
    """None: as the file says."""
    normalize: int
    n_ctx: int
    exact: bool
    threads: int | None
    device: str
    json: bool

    def __post_init__(self) -> None:
        if self.pooling is not None and self.pooling not in POOLINGS:
            raise UsageError(f"--pooling is {self.pooling!r}; allowed: {', '.join(POOLINGS)}")
        check_norm(self.normalize, "--embd-normalize")
        if self.n_ctx < 0:
            raise UsageError(f"-c/--n-ctx is {self.n_ctx}; allowed: 0 or more")
        check_threads(self.threads)


def read_texts(prompts: Sequence[str] | None, file: str | None) -> list[str]:
    """The texts given with -p, or the lines of a file, or of stdin ("-", or nothing at all).

    An argument is one text, whatever is in it; of lines the ends are no part of the texts, and an
    empty line is an empty text, so that line and vector number agree.
    """
    if prompts and file is not None:
        raise UsageError("give texts with -p, or a file of them with -f, not both")
    if prompts and list(prompts) != ["-"]:
        return [utf8_text("the text of -p", argument_bytes(text)) for text in prompts]
    if file is None and not prompts and sys.stdin.isatty():
        raise UsageError("no text: give it with -p, a file of lines with -f, or on stdin")
    from_stdin = file is None or file == "-"
    data = sys.stdin.buffer.read() if from_stdin else Path(file or "").read_bytes()
    what = "stdin" if from_stdin else f"{file}"
    lines = data.removeprefix(codecs.BOM_UTF8).removesuffix(b"\n").split(b"\n")
    if lines == [b""] and not data.endswith(b"\n"):
        raise UsageError(f"{what} is empty: there is nothing to embed")
    return [
        utf8_text(f"line {i} of {what}", line.removesuffix(b"\r"))
        for i, line in enumerate(lines, start=1)
    ]


def run_embed(request: EmbedRequest, texts: Sequence[str]) -> int:
    """The exit code."""
    settings = Settings.from_env()
    path = local_file(request.model, settings)
    with stop_on_interrupt() as asked:
        # Only here, since importing jax takes a while and nothing can be interrupted in it.
        from minfer_jax.device import device_errors

        lm = load_model(
            path,
            settings,
            interrupted=asked.is_set,
            n_ctx=request.n_ctx,
            exact=request.exact,
            device=request.device,
            threads=request.threads,
        )
        done: list[Embedding] = []
        with device_errors(), waiting("Embedding"):
            for embedding in lm.embedder.stream(texts, request.pooling, request.normalize):
                if asked.is_set():
                    return INTERRUPTED
                done.append(embedding)
                if not request.json:
                    _print(embedding.vector, request.normalize)
        if request.json:
            kind = lm.embedder.pooling(request.pooling)
            print(jsonlib.dumps(_report(str(path), kind, request.normalize, done)))
    return 0


def _print(vector: np.ndarray, norm: int) -> None:
    """A line of numbers for a vector, or for each of several."""
    for row in np.atleast_2d(vector):
        print(" ".join(map(str, _numbers(row, norm))), flush=True)


def _report(model: str, pooling: str, norm: int, done: Sequence[Embedding]) -> dict[str, Any]:
    """One object; with the cosines of all pairs if there are several texts and a vector of each."""
    report: dict[str, Any] = {
        "model": model,
        "pooling": pooling,
        "normalize": norm,
        "data": [
            {"index": i, "n_tokens": e.n_tokens, "embedding": _nested(e.vector, norm)}
            for i, e in enumerate(done)
        ],
    }
    if len(done) > 1 and pooling not in ("none", "rank"):
        cosines = cosine_similarity(np.stack([e.vector for e in done]))
        report["cosine_similarity"] = [[round(c, 7) for c in row] for row in cosines.tolist()]
    return report


def _nested(vector: np.ndarray, norm: int) -> list[Any]:
    if vector.ndim > 1:
        return [_nested(row, norm) for row in vector]
    return _numbers(vector, norm)


def _numbers(values: Iterable[np.float32], norm: int) -> list[int | float]:
    """Python numbers with as few digits as tell a float32; whole ones where the norm makes them."""
    if norm == _INT16:
        return [round(float(value)) for value in values]
    return [float(str(value)) for value in values]
