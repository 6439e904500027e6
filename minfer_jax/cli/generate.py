"""`generate`: a prompt in, streamed text on stdout, the run report on stderr."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict

from minfer_jax.cli import INTERRUPTED
from minfer_jax.cli.interrupt import stop_on_interrupt
from minfer_jax.cli.request import Request
from minfer_jax.cli.session import Stages, load_model, local_file, note, waiting
from minfer_jax.settings import Settings


def run_generate(request: Request, prompt: str) -> int:
    """The exit code."""
    stages = Stages()
    settings = Settings.from_env()
    path = local_file(request.model, settings)
    stages.end("open")
    with stop_on_interrupt() as asked:
        # Only here, since importing jax takes a while and nothing can be interrupted in it.
        from minfer_jax.cli.report import FirstToken, RunReport
        from minfer_jax.device import device_errors
        from minfer_jax.generate import Generation

        stages.end("import")
        lm = load_model(
            path,
            settings,
            interrupted=asked.is_set,
            n_ctx=request.n_ctx,
            n_batch=request.n_batch,
            n_ubatch=request.n_ubatch,
            kv_types=request.kv_types,
            swa_full=request.swa_full,
            exact=request.exact,
            flash_attn=request.flash_attn != "off",
            device=request.device,
            threads=request.threads,
        )
        stages.end("open")
        stages.split("open", "pack", lm.load_seconds.pack)
        template = not request.no_template and lm.chat_template is not None
        if not template and not request.no_template:
            note("the model has no chat template: the prompt is continued as it is")
        out = Generation()
        first = FirstToken(lm, out, stages.seconds)

        def abort() -> bool:
            first.watch()
            return asked.is_set()

        with device_errors():
            pieces = lm.stream(
                prompt,
                request.n_predict,
                stop=request.stop,
                template=template,
                system=request.system or None,
                abort=abort,
                into=out,
                grammar=request.grammar,
                logprobs=request.logprobs,
                in_graph=request.in_graph,
                **asdict(request.sampling),
            )
            stages.end("tokenizer")
            for line in out.notes:
                note(line)
            text = _collect(pieces) if request.json else _print(pieces)
    report = RunReport(lm=lm, request=request, run=out, text=text, stages=first.stages())
    report.print(json=request.json)
    return INTERRUPTED if out.finish_reason == "abort" else 0


def _collect(pieces: Iterator[str]) -> str:
    with waiting("Generating"):
        return "".join(pieces)


def _print(pieces: Iterator[str]) -> str:
    """Write pieces to stdout as they come, and a line end after the last."""
    text = []
    with waiting("Building graphs and reading the prompt"):
        first = next(pieces, "")
    try:
        for piece in itertools.chain([first], pieces):
            text.append(piece)
            print(piece, end="", flush=True)
    finally:
        # Also before the line that tells of an error, which is what a dead end in a grammar is.
        if text[-1] and not text[-1].endswith("\n"):
            print(flush=True)
    return "".join(text)
