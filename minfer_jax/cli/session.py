"""What commands that run a model share: loading it, with a word on what happens meanwhile."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minfer_jax.cli.interrupt import cleaned_up_on_termination
from minfer_jax.hub import cached, catalog, resolve
from minfer_jax.settings import Settings

if TYPE_CHECKING:
    from minfer_jax.lm import LanguageModel


class Stages:
    """Wall-clock seconds by stage, in order, beginning with the process's own start."""

    def __init__(self) -> None:
        age = _process_age()
        self.seconds: dict[str, float] = {} if age is None else {"start": age}
        self._since = time.perf_counter()

    def end(self, stage: str) -> None:
        """Count the time since the last stage ended to `stage`, which may be one that was."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._since
        self._since = now

    def split(self, stage: str, off: str, seconds: float) -> None:
        """Count `seconds` of `stage` to `off` instead."""
        self.seconds[stage] -= seconds
        self.seconds[off] = seconds


def _process_age() -> float | None:
    """Seconds since the process started, to a tick of 10 ms; None where the system keeps it."""
    if sys.platform != "linux":
        return None
    try:
        # Field 22, but the second may hold blanks: it is the program's name in brackets.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


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
    threads: int | None = None,
    **options: Any,
) -> LanguageModel:
    """The model of a file; `n_ctx` 0 means as much as the model was trained for.

    `threads` None means one for each CPU that this process may use.

    `interrupted` is asked after each tensor; raises `KeyboardInterrupt` if it says yes.
    """
    import jax

    from minfer_jax.device import idle_accelerator, set_threads
    from minfer_jax.lm import load

    set_threads(threads)
    # Every step is waited for: on this thread it saves two changes of threads, and a CPU step of a
    # small model takes 2 ms.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
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
