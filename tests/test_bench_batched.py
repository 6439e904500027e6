"""Several sequences at once: what is evaluated where, the turns, and what a fork costs."""

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.batch import Batch
from minfer_jax.bench import batched as module
from minfer_jax.bench.batched import (
    FORK_SEQUENCES,
    BatchedSamples,
    BatchedTest,
    OurBatchedSide,
    measure_batched,
    plan_batched,
    prefill_batches,
    step_batch,
)
from minfer_jax.bench.samples import Samples
from minfer_jax.bench.workload import random_tokens
from minfer_jax.errors import MinferError, UsageError


def never():
    return False


def case(n_prompt=128, n_gen=32, n_seq=4, *, shared=False, unified=False):
    return BatchedTest(n_prompt=n_prompt, n_gen=n_gen, n_seq=n_seq, shared=shared, unified=unified)


@pytest.mark.parametrize(
    ("shared", "unified", "n_kv", "n_prompt_tokens"),
    [
        (False, False, 4 * (128 + 32), 4 * 128),
        (False, True, 4 * (128 + 32), 4 * 128),
        (True, False, 4 * (128 + 32), 128),  # each stream gets a copy
        (True, True, 128 + 4 * 32, 128),
    ],
)
def test_sizes_are_llama_batched_benchs(shared, unified, n_kv, n_prompt_tokens):
    test = case(shared=shared, unified=unified)
    assert (test.n_kv, test.n_prompt_tokens) == (n_kv, n_prompt_tokens)
    assert (test.n_gen_tokens, test.n_ctx_seq) == (4 * 32, 128 + 32)
    assert test.name == "pp128 tg32 x4"


def test_every_combination_ascends_in_sequences():
    tests = plan_batched((512, 128), (16, 8), (8, 1, 8, 2), shared=True, unified=False)
    assert [(t.n_prompt, t.n_gen, t.n_seq) for t in tests] == [
        (pp, tg, b) for pp in (512, 128) for tg in (16, 8) for b in (1, 2, 8)
    ]
    assert all(t.shared and not t.unified for t in tests)


def rows(batches):
    return [list(zip(b.token, b.seq_id, b.logits, strict=True)) for b in batches]


def test_prompts_follow_each_other_and_end_with_logits():
    assert rows(prefill_batches([[5, 6, 7], [8, 9, 4]], 4)) == [
        [(5, 0, False), (6, 0, False), (7, 0, True), (8, 1, False)],
        [(9, 1, False), (4, 1, True)],
    ]


def test_a_step_has_a_token_with_logits_for_each():
    assert rows([step_batch([7, 8, 9])]) == [[(7, 0, True), (8, 1, True), (9, 2, True)]]


PROMPTS = [[3, 5, 9, 11, 4], [12, 13, 14, 3, 8], [6, 7, 6, 7, 6]]
STEPS = [[21, 22, 23], [31, 32, 33], [41, 42, 43]]


@pytest.fixture
def lm(load_tiny):
    return load_tiny("llama-dense")


def opened(lm, *, n_ctx, n_seq_max, kv_unified=False, **options):
    side = OurBatchedSide(lm, abort=never, **options)
    side.open(n_ctx=n_ctx, n_seq_max=n_seq_max, kv_unified=kv_unified)
    return side


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_each_sequence_gets_its_prompt_and_its_column_of_the_steps(shared, unified, lm):
    prompts = PROMPTS[:1] if shared else PROMPTS
    side = opened(lm, n_ctx=3 * 8, n_seq_max=3, kv_unified=unified, n_batch=4)
    side.run_batched(prompts, STEPS[:1])  # nothing of it is left for the next run
    assert min(side.run_batched(prompts, STEPS)) > 0
    for seq in range(3):
        tokens = [*prompts[0 if shared else seq], *(step[seq] for step in STEPS)]
        assert side.context.memory.seq_pos_max(seq) == len(tokens) - 1
        np.testing.assert_allclose(
            side.context.logits(seq), lm.logits(tokens)[-1], rtol=1e-4, atol=1e-5
        )


def test_prompts_are_one_call_and_steps_are_as_many(lm, monkeypatch):
    side = opened(lm, n_ctx=3 * 8, n_seq_max=3)
    sizes = []
    decode = side.context.decode

    def counted(batch, *, abort):
        sizes.append(len(batch.token))
        return decode(batch, abort=abort)

    monkeypatch.setattr(side.context, "decode", counted)
    side.run_batched(PROMPTS, STEPS)
    assert sizes == [15, 3, 3, 3]


def test_an_interrupt_is_seen_between_calls(lm):
    asked = []

    def abort():
        asked.append(None)
        return len(asked) > 3

    side = OurBatchedSide(lm, abort=abort)
    side.open(n_ctx=3 * 8, n_seq_max=3, kv_unified=False)
    with pytest.raises(KeyboardInterrupt):
        side.run_batched(PROMPTS, STEPS)
    assert side.context.memory.seq_pos_max(0) == 5 + 2 - 1


def test_no_room_is_one_line_with_the_remedy(lm):
    side = opened(lm, n_ctx=3 * 7, n_seq_max=3)
    with pytest.raises(MinferError, match=r"^a context of 21 places has no room .*: raise -c"):
        side.run_batched(PROMPTS, STEPS)


def test_a_context_that_cannot_be_is_refused_when_it_is_opened(lm):
    with pytest.raises(UsageError, match="n_seq_max is 257"):
        opened(lm, n_ctx=1024, n_seq_max=257)


@pytest.mark.parametrize(("built", "low", "high"), [(1, -1001e9, -900e9), (0, 0, 900e9)])
def test_building_a_graph_is_not_under_the_clocks_but_looking_one_up_is(
    built, low, high, lm, monkeypatch
):
    side = opened(lm, n_ctx=3 * 8, n_seq_max=3)
    side.run_batched(PROMPTS, STEPS[:1])
    before = side.built()
    decode = side.context.decode

    def slow(batch, *, abort):
        side.context.perf().build_seconds += 1000.0
        side.context.graphs.counters.built += built
        return decode(batch, abort=abort)

    monkeypatch.setattr(side.context, "decode", slow)
    for ns in side.run_batched(PROMPTS, STEPS[:1]):
        assert low < ns < high
    assert side.built()[0] - before[0] == 2 * built
    assert side.built()[2] - before[2] == pytest.approx(2000.0, abs=60)


class FakeSide:
    """Answers with ever longer times."""

    n_vocab = 50

    def __init__(self, log, name):
        self._log, self._name, self._ns = log, name, 0

    def open(self, **sizes):
        self._log.append((self._name, "open", sizes))

    def run_batched(self, prompts, steps):
        self._log.append((self._name, prompts, steps))
        self._ns += 1_000_000
        return self._ns, 2 * self._ns

    def built(self):
        # What had been there, and what the warm-up added.
        return (7, 1, 3.0) if self._ns == 0 else (9, 2, 4.5)


def fake_side(log, name) -> Any:
    return FakeSide(log, name)


@pytest.fixture
def log(monkeypatch):
    log = []
    monkeypatch.setattr(module.time, "sleep", lambda seconds: log.append("rest"))
    return log


def test_two_sides_take_turns_after_a_warm_up(log):
    result = measure_batched(
        case(3, 9, 2),
        n_ctx=100,
        ours=fake_side(log, "ours"),
        peer=fake_side(log, "peer"),
        repetitions=2,
    )
    tokens = random_tokens(2 * 3 + 9 * 2, 50)
    prompts = [tokens[0:3], tokens[3:6]]
    steps = [tokens[i : i + 2] for i in range(6, 24, 2)]
    sizes = {"n_ctx": 100, "n_seq_max": 2, "kv_unified": False}
    turn = ["rest", ("ours", prompts, steps), "rest", ("peer", prompts, steps)]
    assert log == [
        *(("ours", "open", sizes), ("peer", "open", sizes)),
        *(("ours", prompts, steps[:8]), ("peer", prompts, steps[:8])),
        *(turn + turn),
    ]
    # The first million was the warm-up's.
    assert result.ours == result.peer
    assert result.ours.prefill == Samples(6, (2_000_000, 3_000_000))
    assert result.ours.steps == Samples(18, (4_000_000, 6_000_000))
    assert (result.graphs_built, result.graphs_evicted, result.compile_s) == (2, 1, 1.5)
    assert (result.n_ctx, result.test.n_seq) == (100, 2)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", result.test_time)


def test_alone_there_is_no_rest_and_a_shared_prompt_is_one(log):
    result = measure_batched(
        case(3, 2, 2, shared=True, unified=True),
        n_ctx=7,
        ours=fake_side(log, "ours"),
        repetitions=3,
    )
    tokens = random_tokens(3 + 2 * 2, 50)
    run = ("ours", [tokens[:3]], [tokens[3:5], tokens[5:7]])
    sizes = {"n_ctx": 7, "n_seq_max": 2, "kv_unified": True}
    assert log == [("ours", "open", sizes), *[run] * 4]
    assert result.peer is None and len(result.ours.steps.ns) == 3
    assert result.ours.prefill.n_tokens == 3


def test_the_total_adds_times_and_tokens():
    samples = BatchedSamples(Samples(10, (1, 5)), Samples(4, (20, 30)))
    assert samples.total == Samples(14, (21, 35))


def test_graphs_are_built_before_the_clocks_start_and_counted(lm):
    ours = OurBatchedSide(lm, abort=never)
    counts = [
        measure_batched(case(5, 2, 3), n_ctx=21, ours=ours, repetitions=2).graphs_built
        for _ in range(2)
    ]
    # One for the prompts, one for a step; the second context has them from the first one's table
    # or builds as many.
    assert counts[0] == 2 and counts[1] in (0, 2)


class ForkContext:
    """Keeps what is asked; a copy allocates `nbytes`."""

    can = True

    def __init__(self, nbytes):
        self.memory = self
        self.calls, self._nbytes, self._held = [], nbytes, {}

    def decode(self, batch, *, abort):
        self.calls.append(("decode", len(batch.token)))
        return 0

    def seq_rm(self, seq):
        self.calls.append(("rm", seq))
        self._held.pop(seq, None)
        return True

    def seq_cp(self, source, target):
        self.calls.append(("cp", source, target))
        if self._nbytes:
            self._held[target] = jnp.zeros(self._nbytes, jnp.int8)
        return self.can


def fake_lm(context, sizes) -> Any:
    return SimpleNamespace(
        context=lambda **given: sizes.append(given) or context,
        model=SimpleNamespace(hp=SimpleNamespace(n_vocab=50)),
    )


@pytest.mark.parametrize("nbytes", [0, 1000])
@pytest.mark.parametrize("n_tokens", [5, 3000])
def test_a_fork_is_timed_without_its_warm_up_and_its_bytes_are_counted(nbytes, n_tokens):
    context, sizes = ForkContext(nbytes), []
    cost = OurBatchedSide(fake_lm(context, sizes), abort=never).fork_cost(n_tokens, repetitions=3)
    assert sizes == [
        {"n_ctx": max(9, n_tokens), "n_seq_max": 9, "n_batch": 2048, "kv_unified": True}
    ]
    fill = [("decode", 5)] if n_tokens == 5 else [("decode", 2048), ("decode", 952)]
    others = range(1, 9)
    once = [*(("rm", i) for i in others), *(("cp", 0, i) for i in others)]
    assert context.calls == fill + 4 * once
    assert (cost.n_tokens, cost.n_seq, len(cost.ns)) == (n_tokens, FORK_SEQUENCES, 3)
    assert cost.nbytes == 8 * nbytes and min(cost.ns) > 0


def test_a_copy_that_was_not_made_is_an_error():
    context = ForkContext(0)
    context.can = False
    with pytest.raises(MinferError, match="cannot give a sequence's prompt to another"):
        OurBatchedSide(fake_lm(context, []), abort=never).fork_cost(5, repetitions=1)


def test_a_fork_of_unified_cells_allocates_nothing_and_forks(lm):
    side = OurBatchedSide(lm, abort=never)
    cost = side.fork_cost(40, repetitions=2)
    assert (cost.nbytes, cost.n_tokens) == (0, 40)
    assert [side.context.memory.seq_pos_max(seq) for seq in range(9)] == [39] * 9


def test_what_was_opened_before_is_not_kept(lm):
    def regions():
        return [array for array in jax.live_arrays() if array.nbytes == largest]

    side = opened(lm, n_ctx=6 * 256, n_seq_max=6)
    side.context.decode(Batch(token=[1]))
    largest = max(array.nbytes for array in jax.live_arrays())
    before = len(regions())
    side.open(n_ctx=8, n_seq_max=1, kv_unified=False)
    assert len(regions()) < before
