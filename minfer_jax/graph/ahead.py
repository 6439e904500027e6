"""Executables that are read from the disk before anybody asks for them, beside the caller.

They are guesses: what a wrong one costs is time that nobody waits for, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from minfer_jax.graph import disk


class Ahead:
    """What `model` used last of each group of kinds, which are used in each other's place, being
    loaded from the moment that this is made.

    The interpreter's lock is free during most of it. Native targets that the executables call have
    to be registered before.
    """

    def __init__(
        self, root: Path, model: Path, groups: Iterable[Sequence[str]], device: Any
    ) -> None:
        newest = [disk.newest(root, model, kinds, device) for kinds in groups]
        files = [file for file in newest if file is not None]
        self._guesses: dict[str, tuple[disk.GraphFile, Future[jax.stages.Compiled | None]]] = {}
        if files:
            pool = ThreadPoolExecutor(len(files), thread_name_prefix="graphs")
            self._guesses = {file.line: (file, pool.submit(disk.peek, file)) for file in files}
            pool.shutdown(wait=False)

    @property
    def files(self) -> set[disk.GraphFile]:
        """Guesses that are still kept: the first graph of a kind that is asked for ends its own."""
        return {file for file, _ in self._guesses.values()}

    def load(self, file: disk.GraphFile) -> jax.stages.Compiled | None:
        """As `disk.load`, but without the wait if `file` is what was guessed."""
        guess, future = self._guesses.pop(file.line, (None, None))
        if future is None or guess != file or (compiled := future.result()) is None:
            return disk.load(file)
        disk.mark_used(file)
        return compiled
