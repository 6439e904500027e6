"""The decode step by node: where its wall-clock time goes, from XLA's own trace of it."""

from __future__ import annotations

import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from minfer_jax.bench.hlo import Instruction, instructions, merge_layers, module_name
from minfer_jax.bench.ours import OurSide
from minfer_jax.bench.workload import Workload
from minfer_jax.errors import MinferError

_STEP = "minfer_jax decode step"


class Span(NamedTuple):
    """One run of one instruction, in nanoseconds of the trace's clock."""

    start: float
    end: float
    name: str


@dataclass(frozen=True)
class Node:
    """A named scope, the same one of all layers."""

    name: str
    calls: float
    """Instructions run per step."""
    us: float
    """Microseconds per step. Nodes that run at the same moment share it equally, so that all
    nodes and `Profile.idle_us` add up to the step."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Averages over the traced steps, in microseconds."""

    n_depth: int
    steps: int
    step_us: float
    """Median of as many steps without a trace."""
    traced_us: float
    nodes: tuple[Node, ...]
    """Slowest first."""
    idle_us: float
    """While no node ran: Python, dispatch, waiting."""


def profile_decode(workload: Workload, tokens: Sequence[int], ours: OurSide) -> Profile:
    """Time the steps of a generation test, first as they are, then traced.

    `tokens` are as many as the test needs. Raises `MinferError` if the device's trace does not
    show single instructions.
    """
    depth, steps = workload.n_depth, list(enumerate(tokens[workload.n_depth :], workload.n_depth))
    ours.fill(tokens[:depth])
    for at, token in steps:  # to warm up
        ours.run(at, [token], 1)
    plain = [ours.run(at, [token], 1) for at, token in steps]

    def traced() -> None:
        for at, token in steps:
            with jax.profiler.TraceAnnotation(_STEP):
                ours.run(at, [token], 1)

    events = _trace(traced)
    text = ours.context.graphs.entries[0].compiled.run.as_text()
    marks = [Span(e.start_ns, _end(e), _STEP) for e in events if e.name == _STEP]
    spans = _spans(events, module_name(text))
    if not spans:
        platform = ours.context.model.device.platform
        raise MinferError(f"--profile: the trace of this {platform} shows no single instructions")
    nodes, idle = attribute(marks, spans, instructions(text))
    return Profile(
        n_depth=depth,
        steps=len(marks),
        step_us=statistics.median(plain) / 1e3,
        traced_us=statistics.fmean(s.end - s.start for s in marks) / 1e3,
        nodes=nodes,
        idle_us=idle,
    )


def attribute(
    steps: Sequence[Span], spans: Iterable[Span], known: Mapping[str, Instruction]
) -> tuple[tuple[Node, ...], float]:
    """Nodes, slowest first, and the microseconds per step in which none ran.

    At every moment of a step the time goes to the instructions then running, in equal parts. A
    loop counts only while nothing within it runs. Spans of unknown instructions do not count.
    """
    inside = [
        span
        for span in spans
        if span.name in known and any(s.start <= span.start < s.end for s in steps)
    ]
    times = _shares(inside, known)
    ns: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for name, share in times.items():
        ns[_node(known[name])] += share
    for span in inside:
        if not known[span.name].is_container:
            calls[_node(known[span.name])] += 1
    n = len(steps)
    nodes = [Node(name, calls[name] / n, total / n / 1e3) for name, total in ns.items()]
    whole = sum(s.end - s.start for s in steps)
    idle = max(0.0, whole - sum(ns.values())) / n / 1e3
    return tuple(sorted(nodes, key=lambda node: -node.us)), idle


def _shares(spans: Iterable[Span], known: Mapping[str, Instruction]) -> dict[str, float]:
    """Nanoseconds of each instruction."""
    edges = [(span.start, 1, span.name) for span in spans]
    edges += [(span.end, -1, span.name) for span in spans]
    edges.sort()
    shares: defaultdict[str, float] = defaultdict(float)
    running: Counter[str] = Counter()
    before = 0.0
    for at, change, name in edges:
        if running and at > before:
            leaves = [n for n in running if not known[n].is_container]
            for n in leaves or list(running):
                shares[n] += (at - before) / len(leaves or running)
        before = at
        running[name] += change
        if not running[name]:
            del running[name]
    return dict(shares)


def _node(instruction: Instruction) -> str:
    return merge_layers(instruction.scope) or f"(no scope) {instruction.opcode}"


def _trace(run: Callable[[], None]) -> list[Any]:
    """The events of all threads and devices while `run` runs."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would slow every call down
    options.host_tracer_level = 1
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        [file] = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
    return [event for plane in data.planes for line in plane.lines for event in line.events]


def _spans(events: Iterable[Any], module: str) -> list[Span]:
    """Runs of single instructions of `module`."""
    ends: dict[object, float] = {}
    found: list[tuple[float, float, str, Any]] = []
    for event in events:
        stats = dict(event.stats)
        if event.name.startswith("end: ") and "_c" in stats:
            # Of an instruction that may go on after its call has returned.
            ends[stats["_c"]] = event.start_ns
        elif stats.get("hlo_module") == module and "hlo_op" in stats:
            found.append((event.start_ns, _end(event), str(stats["hlo_op"]), stats.get("_p")))
    return [Span(start, max(end, ends.get(key, end)), name) for start, end, name, key in found]


def _end(event: Any) -> float:
    return event.start_ns + event.duration_ns
