"""Ahead-of-time compilation of one step, and the check that its trace is a pure function."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from minfer_jax.errors import MinferError
from minfer_jax.graph import disk
from minfer_jax.graph.params import GraphParams

Step = Callable[..., tuple[Any, Any]]
"""(params, weights, regions, inputs) -> (logits, regions). `params` is static, the regions are
donated."""


@dataclass(frozen=True)
class CompiledGraph:
    """An executable (weights, regions, inputs) -> (logits, regions), and what it took to get."""

    run: Callable[..., tuple[Any, Any]]
    trace_seconds: float
    compile_seconds: float
    """Compiling and writing it to the disk, or loading it from there."""
    disk_hits: int
    disk_misses: int


def compile_step(
    make_step: Callable[[], Step],
    params: GraphParams,
    args: tuple,
    file: disk.GraphFile | None = None,
    load: Callable[[disk.GraphFile], jax.stages.Compiled | None] = disk.load,
) -> CompiledGraph:
    """One step for `args`, arrays or `ShapeDtypeStruct`s: out of `file`, or compiled and put there.

    The jit object is new and wraps a new function: a shared one would keep the executables of
    evicted graphs alive.
    """
    started = time.perf_counter()
    if file is not None and (stored := load(file)) is not None:
        return CompiledGraph(stored, 0.0, time.perf_counter() - started, 1, 0)
    jitted = jax.jit(make_step(), static_argnums=0, donate_argnums=2)
    lowered = jitted.lower(params, *args)
    traced = time.perf_counter()
    hits = disk.jax_hits()
    compiled = lowered.compile()
    if file is not None and disk.jax_hits() == hits:
        disk.save(file, compiled)
    return CompiledGraph(
        run=compiled,
        trace_seconds=traced - started,
        compile_seconds=time.perf_counter() - traced,
        disk_hits=0,
        disk_misses=0 if file is None else 1,
    )


def verify_structural(make_step: Callable[[], Step], params: GraphParams, args: tuple) -> None:
    """Trace twice and compare the jaxprs; raises `MinferError` at the first difference.

    Each trace starts from a new function object. With the same one jax would answer from its
    cache of jaxprs, and the check could not fail.
    """
    first, second = (jax.make_jaxpr(make_step(), static_argnums=0)(params, *args) for _ in range(2))
    lines, again = _equations(first), _equations(second)
    for i in range(max(len(lines), len(again))):
        a, b = (x[i] if i < len(x) else "(end)" for x in (lines, again))
        if a != b:
            raise MinferError(
                f"the graph of [{params}] is not a function of its params:"
                f" equation {i} was {a!r} and then {b!r}"
            )
    for a, b in zip(first.consts, second.consts, strict=True):
        if not np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True):
            raise MinferError(
                f"the graph of [{params}] is not a function of its params: a constant differs"
            )


def _equations(jaxpr: Any) -> list[str]:
    """The jaxpr, one equation a line, without the addresses of function objects."""
    text = re.sub(r" at 0x[0-9a-f]+", "", str(jaxpr.jaxpr))
    return [line.strip() for line in text.splitlines()]
