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
