"""What commands that run a model share: loading it, with a word on what happens meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minfer_jax.cli.interrupt import cleaned_up_on_termination
from minfer_jax.hub import cached, catalog, resolve
from minfer_jax.settings import Settings

if TYPE_CHECKING:
    from minfer_jax.lm import LanguageModel


def note(text: str) -> None:
    """One line on stderr."""
    print(f"note: {text}", file=sys.stderr)


def local_file(model: str | None, settings: Settings) -> Path:
    """The file of a model's name, fetched first if need be, with the licence said aloud."""
    name = settings.model if model is None else model
    alias = catalog().get(name.lower())
    if alias and cached(alias, settings.models_dir) is None and not Path(name).is_file():
        note(f"fetching {alias.name}, licence: {alias.licence}. {alias.licence_note}")
    with cleaned_up_on_termination():
        return resolve(name, models_dir=settings.models_dir)


def load_model(
    path: Path,
    settings: Settings,
    *,
    interrupted: Callable[[], bool],
    n_ctx: int,
    device: str,
    **options: Any,
) -> LanguageModel:
    """The model of a file; `n_ctx` 0 means as much as the model was trained for.

    `interrupted` is asked after each tensor; raises `KeyboardInterrupt` if it says yes.
    """
    import jax

    from minfer_jax.device import idle_accelerator
    from minfer_jax.lm import load

    if device.lower() == "cpu":
        # Keeps jax from starting an accelerator, too, and reserving its memory.
        jax.config.update("jax_platforms", "cpu")

    with _bar("Loading") as show:

        def progress(done: int, total: int) -> None:
            if interrupted():
                raise KeyboardInterrupt
            show(done, total)

        lm = load(path, n_ctx=n_ctx, device=device, progress=progress, settings=settings, **options)
    if warning := idle_accelerator(lm.model.device):
        note(warning)
    if lm.n_ctx > lm.model.hp.n_ctx_train:
        note(
            f"n_ctx {lm.n_ctx} is more than the {lm.model.hp.n_ctx_train} the model was trained for"
        )
    return lm


def waiting(title: str) -> AbstractContextManager[object]:
    """A spinner on a terminal for work of unknown length; nothing where nobody would see it."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(title)


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar of bytes on a terminal; nothing where nobody would see it."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
