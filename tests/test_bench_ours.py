"""Our side: what is evaluated where, and what the clock leaves out."""

import numpy as np
import pytest

from minfer_jax.batch import Batch
from minfer_jax.bench.ours import OurSide
from minfer_jax.sampling import Sampler, SamplingParams

TOKENS = list(range(3, 43))


@pytest.fixture
def context(load_tiny):
    return load_tiny("llama-dense").context(n_ctx=64)


def fresh_logits(context, tokens):
    context.memory.clear()
    context.decode(Batch(token=tokens))
    return context.logits()


@pytest.mark.parametrize("n_batch", [1, 8])
def test_each_run_continues_what_was_kept(context, n_batch):
    ours = OurSide(context)
    ours.fill(TOKENS[:30])
    for keep, timed in ((30, TOKENS[30:38]), (30, TOKENS[32:40]), (20, TOKENS[:8])):
        assert ours.run(keep, timed, n_batch) > 0
        assert context.memory.n_past() == keep + 8
        got = context.logits()
    # The last run followed the first 20 tokens.
    np.testing.assert_allclose(
        got, fresh_logits(context, TOKENS[:20] + TOKENS[:8]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("where", ["host", "loop"])
def test_chosen_tokens_are_fed_again_on_the_host_and_in_the_graph_alike(context, where):
    """The default chain with its own seed: both come to the same tokens, which single steps do."""
    ours = OurSide(context).choosing(where)
    ours.fill(TOKENS[:10])
    assert ours.run(10, TOKENS[10:30], 1) > 0
    fed = context.history.tokens(0)
    assert fed[:11] == TOKENS[:11] and len(fed) == 30
    judge = Sampler(SamplingParams())
    for i in range(11, 30):
        assert judge.sample(fresh_logits(context, fed[:i])) == fed[i]


def test_without_a_way_of_choosing_it_is_the_same_side(context):
    ours = OurSide(context)
    assert ours.choosing("") is ours


def test_a_batch_is_one_call_and_single_tokens_are_as_many(context):
    ours = OurSide(context)
    ours.fill([])
    assert context.memory.n_past() == 0
    ours.run(0, TOKENS[:6], 6)
    assert (context.perf().n_p_eval, context.perf().n_eval) == (6, 0)
    ours.run(0, TOKENS[:6], 1)
    assert (context.perf().n_p_eval, context.perf().n_eval) == (6, 6)


@pytest.mark.parametrize(("built", "low", "high"), [(1, -1001e9, -900e9), (0, 0, 900e9)])
def test_building_a_graph_is_not_under_the_clock_but_looking_one_up_is(
    built, low, high, context, monkeypatch
):
    ours = OurSide(context)
    ours.fill([])
    decode = context.decode

    def slow(batch, *, abort):
        context.perf().build_seconds += 1000.0
        context.graphs.counters.built += built
        return decode(batch, abort=abort)

    ours.run(0, TOKENS[:2], 2)
    monkeypatch.setattr(context, "decode", slow)
    assert low < ours.run(0, TOKENS[:2], 2) < high


def test_an_interrupt_is_seen_between_calls(context):
    asked = []

    def abort():
        asked.append(None)
        return len(asked) > 3

    ours = OurSide(context, abort=abort)
    with pytest.raises(KeyboardInterrupt):
        ours.run(0, TOKENS[:6], 1)
    assert context.memory.n_past() == 3
