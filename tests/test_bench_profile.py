"""How a trace's time is shared out, by hand, and that a real trace is read."""

import pytest

from minfer_jax.bench import profile as module
from minfer_jax.bench.hlo import Instruction
from minfer_jax.bench.ours import OurSide
from minfer_jax.bench.profile import Node, Span, attribute, profile_decode
from minfer_jax.bench.workload import Workload
from minfer_jax.errors import MinferError

KNOWN = {
    "a": Instruction("fusion", "blk.0/norm"),
    "b": Instruction("custom-call", "blk.1/norm"),
    "c": Instruction("custom-call", "blk.1/attend"),
    "w": Instruction("while", "blk.1/attend"),
    "copy.1": Instruction("copy", ""),
}
US = 1000.0


def step(*spans, length=100):
    return attribute(
        [Span(0, length * US, "step")], [Span(s * US, e * US, n) for s, e, n in spans], KNOWN
    )


def test_layers_add_up_and_the_rest_is_idle():
    nodes, idle = step((0, 10, "a"), (10, 40, "b"), (50, 60, "c"), (60, 65, "copy.1"))
    assert nodes == (
        Node("blk.*/norm", 2.0, 40.0),
        Node("blk.*/attend", 1.0, 10.0),
        Node("(no scope) copy", 1.0, 5.0),
    )
    assert idle == 45.0


def test_what_runs_at_the_same_moment_shares_it():
    nodes, idle = step((0, 30, "a"), (10, 20, "c"))
    assert nodes == (Node("blk.*/norm", 1.0, 25.0), Node("blk.*/attend", 1.0, 5.0))
    assert idle == 70.0


def test_a_loop_counts_only_between_what_runs_in_it():
    nodes, idle = step((0, 50, "w"), (10, 20, "a"), (30, 40, "c"))
    assert nodes == (Node("blk.*/attend", 1.0, 40.0), Node("blk.*/norm", 1.0, 10.0))
    assert idle == 50.0


def test_an_instruction_that_runs_twice_at_once_counts_once():
    nodes, _ = step((0, 30, "a"), (10, 40, "a"), (10, 40, "c"))
    assert nodes == (Node("blk.*/norm", 2.0, 25.0), Node("blk.*/attend", 1.0, 15.0))


def test_several_steps_are_averaged_and_what_lies_between_them_left_out():
    steps = [Span(0, 100 * US, "step"), Span(200 * US, 320 * US, "step")]
    spans = [(0, 40, "a"), (120, 180, "a"), (200, 220, "a"), (230, 240, "unknown")]
    nodes, idle = attribute(steps, [Span(s * US, e * US, n) for s, e, n in spans], KNOWN)
    assert nodes == (Node("blk.*/norm", 1.0, 30.0),)
    assert idle == 80.0


class Event:
    def __init__(self, name, start_ns, duration_ns, **stats):
        self.name, self.start_ns, self.duration_ns = name, start_ns, duration_ns
        self.stats = tuple(stats.items())


def test_spans_of_other_modules_are_left_out_and_late_ends_found():
    events = [
        Event("a", 10.0, 5.0, hlo_op="a", hlo_module="jit_step", _p=1),
        Event("end: a", 40.0, 1.0, _c=1),
        Event("b", 50.0, 5.0, hlo_op="b", hlo_module="jit_step", _p=2),
        Event("end: b", 54.0, 1.0, _c=2),
        Event("c", 60.0, 5.0, hlo_op="c", hlo_module="jit_step"),
        Event("d", 60.0, 5.0, hlo_op="d", hlo_module="jit_other"),
        Event("Execute", 60.0, 5.0),
    ]
    assert module._spans(events, "jit_step") == [
        Span(10.0, 40.0, "a"),
        Span(50.0, 55.0, "b"),
        Span(60.0, 65.0, "c"),
    ]


@pytest.fixture
def ours(load_tiny):
    return OurSide(load_tiny("llama-dense").context(n_ctx=64))


def test_a_real_trace_shows_every_stage(ours):
    profile = profile_decode(Workload(n_gen=4, n_depth=5), list(range(3, 12)), ours)
    assert (profile.n_depth, profile.steps) == (5, 4)
    names = {node.name for node in profile.nodes}
    assert {"blk.*/attn_qkv", "blk.*/ffn_down", "blk.*/attend", "output"} <= names
    assert sum(n.us for n in profile.nodes) + profile.idle_us == pytest.approx(profile.traced_us)
    assert all(node.us > 0 for node in profile.nodes)
    assert list(profile.nodes) == sorted(profile.nodes, key=lambda node: -node.us)
    # Two layers: at least one instruction in each.
    assert all(n.calls >= 2 for n in profile.nodes if n.name.startswith("blk.*/ffn_down"))


def test_a_device_whose_trace_shows_nothing(ours, monkeypatch):
    monkeypatch.setattr(module, "_trace", lambda run: run() or [])
    with pytest.raises(MinferError, match="this cpu shows no single instructions"):
        profile_decode(Workload(n_gen=2), [3, 4], ours)
