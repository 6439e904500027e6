"""What `bench` prints, whatever it measures: rows as they come, and what it is at."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minfer_jax.bench.report import MarkdownTable, Row

FORMATS = ("md", "csv", "json")


class Printer:
    """Rows as they come for people, all at the end for programs.

    `output` is a format of `FORMATS`; `foot` makes what stands below the table from all rows.
    """

    def __init__(
        self, output: str, table: MarkdownTable, foot: Callable[[Sequence[Row]], list[str]]
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self._format = output
        self._table = table
        self._foot = foot

    def head(self, lines: Sequence[str]) -> None:
        """What stands above the table, and its first two lines."""
        if self._format == "md":
            print("\n".join([*lines, "", *self._table.head()]), flush=True)

    def row(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self._format == "md":
            print(self._table.row(row), flush=True)

    def foot(self) -> None:
        """What belongs to the rows so far; nothing if there are none."""
        if not self.rows:
            return
        from minfer_jax.bench.report import as_csv, as_json

        if self._format == "md":
            print("\n".join(["", *self._foot(self.rows)]))
        else:
            print(as_json(self.rows) if self._format == "json" else as_csv(self.rows))


def announce(work: str) -> None:
    """A line on a terminal. What moves there would take time from what is measured."""
    if sys.stderr.isatty():
        print(f"{work}...", file=sys.stderr)
