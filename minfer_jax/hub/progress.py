"""A progress bar on stderr, or silence; the code that does the work cannot tell which."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[str, int, int | None], None]
"""`report(label, done, total)` in bytes; a new label starts a new bar, total None is unknown."""


def silent(label: str, done: int, total: int | None) -> None:
    """A `Report` that shows nothing."""


@contextmanager
def progress_bar(show: bool | None) -> Iterator[Report]:
    """Yields the `Report` to call; `show` None: only where stderr is a terminal."""
    if show is None:
        show = sys.stderr.isatty()
    if not show:
        yield silent
        return
    with _rich_bar() as report:
        yield report


@contextmanager
def _rich_bar() -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks = {}

        def report(label: str, done: int, total: int | None) -> None:
            if label not in tasks:
                tasks[label] = bar.add_task(label, total=total)
            bar.update(tasks[label], completed=done, total=total)

        yield report
