"""One test: the turns of the two sides, and what is reported of them."""

import re

import pytest

from minfer_jax.bench import run as module
from minfer_jax.bench.ours import OurSide
from minfer_jax.bench.run import measure
from minfer_jax.bench.workload import Workload

TOKENS = list(range(3, 43))


class FakeSide:
    """Answers with ever longer times."""

    def __init__(self, log, name):
        self._log, self._name, self._ns = log, name, 0

    def fill(self, tokens):
        self._log.append((self._name, "fill", list(tokens)))

    def run(self, keep, tokens, n_batch):
        self._log.append((self._name, "run", keep, list(tokens), n_batch))
        self._ns += 1_000_000
        return self._ns


@pytest.fixture
def ours(load_tiny):
    return OurSide(load_tiny("llama-dense").context(n_ctx=64))


@pytest.fixture
def log(ours, monkeypatch):
    """What both sides were asked, and the rests between; nothing is computed."""
    log = []
    fake = FakeSide(log, "ours")
    monkeypatch.setattr(ours, "fill", fake.fill)
    monkeypatch.setattr(ours, "run", fake.run)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: log.append("rest"))
    return log


def test_two_sides_take_turns(ours, log):
    workload = Workload(n_gen=10, n_depth=4)
    result = measure(workload, TOKENS[:14], ours=ours, peer=FakeSide(log, "peer"), repetitions=2)
    depth, timed = TOKENS[:4], TOKENS[4:14]
    warm = [
        (side, *call)
        for side in ("ours", "peer")
        for call in (("fill", depth), ("run", 4, timed[:8], 1))
    ]
    turn = ["rest", ("ours", "run", 4, timed, 1), "rest", ("peer", "run", 4, timed, 1)]
    assert log == [*warm, *turn, *turn]
    # The first million was the warm-up's.
    assert result.ours.ns == result.peer.ns == (2_000_000, 3_000_000)
    assert result.ours.n_tokens == result.peer.n_tokens == 10


def test_alone_there_is_no_rest(ours, log):
    result = measure(Workload(n_prompt=3), TOKENS[:3], ours=ours, repetitions=3)
    assert log == [("ours", "fill", []), *[("ours", "run", 0, TOKENS[:3], 3)] * 4]
    assert result.peer is None and len(result.ours.ns) == 3
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", result.test_time)


def test_graphs_are_built_before_the_clock_starts_and_counted(ours):
    first = measure(Workload(n_gen=2, n_depth=5), TOKENS[:7], ours=ours, repetitions=2)
    # One for the five tokens of the depth, one for a step.
    assert (first.graphs_built, first.graphs_evicted) == (2, 0)
    assert first.compile_s > 0
    again = measure(Workload(n_gen=2, n_depth=5), TOKENS[:7], ours=ours, repetitions=2)
    assert again.graphs_built == 0


def test_evicted_graphs_are_counted(ours, monkeypatch):
    monkeypatch.setattr(ours.context.graphs, "_capacity", 1)
    result = measure(Workload(n_gen=2, n_depth=5), TOKENS[:7], ours=ours, repetitions=2)
    assert (result.graphs_built, result.graphs_evicted) == (2, 1)
