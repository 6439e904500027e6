"""What commands that run a model share: loading it, with a word on what happens meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minfer_jax.hub import cached, catalog, resolve
from minfer_jax.settings import Settings


def note(text: str) -> None:
    """One line on stderr."""
    print(f"note: {text}", file=sys.stderr)


def local_file(model: str | None, settings: Settings) -> Path:
    """The file of a model's name, fetched first if need be, with the licence said aloud."""
    name = model or settings.model
    alias = catalog().get(name.lower())
    if alias and cached(alias, settings.models_dir) is None and not Path(name).is_file():
        note(f"fetching {alias.name} ({alias.licence}); {alias.licence_note}")
    return resolve(name, models_dir=settings.models_dir)


def load_model(model: str | None, *, n_ctx: int, device: str, **options: Any) -> Any:
    """A loaded `LanguageModel`; `n_ctx` 0 means as much as the model was trained for."""
    settings = Settings.from_env()
    path = local_file(model, settings)

    from minfer_jax.device import idle_accelerator
    from minfer_jax.lm import load

    with _progress("Loading") as progress:
        lm = load(path, n_ctx=n_ctx, device=device, progress=progress, settings=settings, **options)
    if warning := idle_accelerator(lm.model.device):
        note(warning)
    if lm.n_ctx > lm.model.hp.n_ctx_train:
        note(
            f"n_ctx {lm.n_ctx} is more than the {lm.model.hp.n_ctx_train} the model was trained for"
        )
    return lm


@contextmanager
def _progress(title: str) -> Iterator[Any]:
    """A progress bar's callback on a terminal; None where nobody would see it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
