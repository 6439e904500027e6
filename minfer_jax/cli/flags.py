"""Flags that several commands share, spelled as llama.cpp and minfer spell them."""

from __future__ import annotations

from typing import Annotated

import typer

debug = False
"""Whether `--debug` was given: errors then show their traceback."""


def _set_debug(value: bool) -> bool:
    global debug
    debug = value
    return value


Model = Annotated[
    str | None,
    typer.Option(
        "-m",
        "--model",
        help="GGUF file, alias (smollm2, gemma3-270m) or pypi:PACKAGE==VERSION."
        " Default: MINFER_MODEL, else smollm2.",
        show_default=False,
    ),
]
Device = Annotated[
    str, typer.Option("--device", help="auto, cpu, gpu, tpu: the platform to run on.")
]
Threads = Annotated[
    int | None,
    typer.Option(
        "-t",
        "--threads",
        help="CPU threads. Default: one for each CPU that this process may use.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of errors.", callback=_set_debug),
]
TypeK = Annotated[
    str | None,
    typer.Option(
        "-ctk",
        "--cache-type-k",
        help="Type of cached keys: f32, f16, bf16, q8_0 or q4_0. Default: f16.",
        show_default=False,
    ),
]
TypeV = Annotated[
    str | None,
    typer.Option("-ctv", "--cache-type-v", help="The same of cached values.", show_default=False),
]
SwaFull = Annotated[
    bool,
    typer.Option("--swa-full", help="Sliding-window layers keep all tokens, not only a window."),
]


def kv_types(k: str | None, v: str | None, exact: bool) -> tuple[str, str] | None:
    """The types asked for; None if neither was."""
    default = "f32" if exact else "f16"
    return None if k is None and v is None else (k or default, v or default)
