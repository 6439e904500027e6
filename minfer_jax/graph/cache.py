"""The table of compiled graphs: at most 8, most recently used first."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from minfer_jax.graph.compile import CompiledGraph
from minfer_jax.graph.params import GraphParams

CAPACITY = 8

_uids = itertools.count(1)


@dataclass(frozen=True)
class GraphEntry:
    """One compiled graph. `uid` is never given twice: the same uid is the same executable."""

    uid: int
    params: GraphParams
    compiled: CompiledGraph


@dataclass
class GraphCounters:
    """What the table did since it was made."""

    reused: int = 0
    built: int = 0
    evicted: int = 0
    trace_seconds: float = 0.0
    compile_seconds: float = 0.0
    disk_hits: int = 0
    disk_misses: int = 0
    rebuilt_by: Counter[str] = field(default_factory=Counter)
    """How many graphs were built because this field differed from the nearest one in the table;
    `first` for a graph built into an empty table."""

    def copy(self) -> GraphCounters:
        """As they are now."""
        return replace(self, rebuilt_by=self.rebuilt_by.copy())

    def as_dict(self) -> dict[str, object]:
        """For reports: plain values, times in seconds."""
        return {
            "reused": self.reused,
            "built": self.built,
            "evicted": self.evicted,
            "trace_s": round(self.trace_seconds, 4),
            "compile_s": round(self.compile_seconds, 4),
            "disk_hits": self.disk_hits,
            "disk_misses": self.disk_misses,
            "rebuilt_by": dict(self.rebuilt_by),
        }


def trace_build(entry: GraphEntry, reason: str) -> None:
    """One line on stderr about a graph that was built (`MINFER_REBUILD_TRACE=1`)."""
    c = entry.compiled
    source = "loaded from disk" if c.disk_hits else "compiled"
    print(
        f"graph {entry.uid} built because of {reason}: {entry.params};"
        f" traced in {c.trace_seconds:.2f} s, {source} in {c.compile_seconds:.2f} s",
        file=sys.stderr,
    )


class GraphCache:
    """`GraphParams` -> executable.

    `build` compiles a graph from its params. `reuse=False` builds one for every call, to measure
    what reuse saves. `on_build(entry, reason)` is told of every graph built.
    """

    def __init__(
        self,
        build: Callable[[GraphParams], CompiledGraph],
        *,
        capacity: int = CAPACITY,
        reuse: bool = True,
        on_build: Callable[[GraphEntry, str], None] | None = None,
    ) -> None:
        self._build = build
        self._capacity = capacity
        self._reuse = reuse
        self._on_build = on_build
        self._entries: list[GraphEntry] = []
        self.counters = GraphCounters()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> tuple[GraphEntry, ...]:
        """The table, most recently used first."""
        return tuple(self._entries)

    def get(self, params: GraphParams) -> GraphEntry:
        """The graph of `params`, compiled now if the table does not hold it."""
        for i, entry in enumerate(self._entries):
            if entry.params == params and self._reuse:
                self._entries.insert(0, self._entries.pop(i))
                self.counters.reused += 1
                return entry
        return self._add(params)

    def _add(self, params: GraphParams) -> GraphEntry:
        reason = self._reason(params)
        # Room is made first: two executables of the largest shape never need to exist at once.
        while len(self._entries) >= self._capacity:
            self._entries.pop()
            self.counters.evicted += 1
        entry = GraphEntry(next(_uids), params, self._build(params))
        self._entries.insert(0, entry)
        self._count(entry, reason)
        if self._on_build:
            self._on_build(entry, ", ".join(reason))
        return entry

    def _reason(self, params: GraphParams) -> tuple[str, ...]:
        """The fields that differ from the nearest graph in the table."""
        if not self._entries:
            return ("first",)
        differing = (params.differing(entry.params) for entry in self._entries)
        return min(differing, key=len) or ("reuse disabled",)

    def _count(self, entry: GraphEntry, reason: tuple[str, ...]) -> None:
        c = self.counters
        c.built += 1
        c.rebuilt_by.update(reason)
        c.trace_seconds += entry.compiled.trace_seconds
        c.compile_seconds += entry.compiled.compile_seconds
        c.disk_hits += entry.compiled.disk_hits
        c.disk_misses += entry.compiled.disk_misses
