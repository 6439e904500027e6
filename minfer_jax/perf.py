"""Counters of a context."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from minfer_jax.graph.cache import GraphCounters
from minfer_jax.graph.params import GType


@dataclass
class Perf:
    """What a context did so far. Times are wall-clock seconds without the building of graphs."""

    n_p_eval: int = 0
    """Tokens evaluated in ubatches that had several of one sequence."""
    n_eval: int = 0
    """Tokens evaluated in decode steps: one of a sequence at a time."""
    n_reused: int = 0
    """Ubatches that ran a graph which was there already."""
    n_built: int = 0
    rebuilt_by: Counter[str] = field(default_factory=Counter)
    """Why graphs were built: the fields in which they differed from the nearest one there was."""
    p_eval_seconds: float = 0.0
    eval_seconds: float = 0.0
    build_seconds: float = 0.0
    """Getting graphs (tracing, compiling, loading from disk) and, once, the regions."""

    def count_graph(self, before: GraphCounters, after: GraphCounters, seconds: float) -> None:
        """A graph was asked of a table, whose counters these are."""
        self.build_seconds += seconds
        if after.built == before.built:
            self.n_reused += 1
            return
        self.n_built += 1
        self.rebuilt_by.update(after.rebuilt_by - before.rebuilt_by)

    def count_loop(self, n: int, steps: int) -> None:
        """Of a loop of n rows that was counted as one step, so many were done."""
        self.n_eval += n * (steps - 1)

    def count_step(self, gtype: GType, n: int, seconds: float) -> None:
        """A graph of this kind ran on n tokens."""
        if gtype in (GType.DECODE, GType.DECODE_LOOP):
            self.n_eval += n
            self.eval_seconds += seconds
        else:
            self.n_p_eval += n
            self.p_eval_seconds += seconds
