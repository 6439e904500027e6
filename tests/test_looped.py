"""Tokens chosen in the graph: the same text, and a context as single steps leave it."""

import numpy as np
import pytest
from test_generate import TINY_PROMPT, Digits, generate, run_tiny

from minfer_jax.batch import Batch
from minfer_jax.errors import SamplingError
from minfer_jax.graph.inputs import LOOP_STEPS
from minfer_jax.sampling import Sampler, SamplingParams

SAMPLED = {"temp": 1.5, "seed": 9, "repeat_penalty": 1.2}


@pytest.fixture(scope="module")
def tiny(load_tiny):
    return load_tiny("llama-dense", n_ctx=40)


def test_tokens_chosen_in_the_graph_are_those_that_the_host_chooses(tiny):
    runs = [
        run_tiny(tiny, n_predict=25, sampling=SAMPLED, context=tiny.context(n_ctx=48), in_graph=way)
        for way in (False, True)
    ]
    assert runs[0][0] == runs[1][0] and len(runs[0][1].ids) == 25
    assert runs[0][2].memory.n_past() == runs[1][2].memory.n_past() == len(TINY_PROMPT) + 24
    assert runs[1][1].stats.n_decoded == 24 and runs[1][1].stats.decode_s > 0
    # A step of its own for the first token after the prompt, then as many as a call has time for.
    assert runs[1][2].perf().n_reused + runs[1][2].perf().n_built < 1 + 24


@pytest.mark.parametrize(
    "options",
    [
        {"stop": ["no such text"]},
        {"logprobs": 1},
        {"sampling": {"temp": 0.8, "mirostat": 2}},
        {"eog": range(100, 117)},
        {"in_graph": False},
    ],
)
def test_what_takes_the_host_has_no_loop(tiny, options, monkeypatch):
    context = tiny.context(n_ctx=72)
    monkeypatch.setattr(context, "decode_loop", None)
    _, out, _ = run_tiny(tiny, context=context, n_predict=4, **{"in_graph": True, **options})
    assert len(out.ids) == 4


def test_whoever_stops_early_finds_what_came_before_the_last_token(tiny):
    """As on the host: the last one is not evaluated, and what the graph chose beyond it is gone."""
    whole = run_tiny(tiny, n_predict=25, sampling=SAMPLED, context=tiny.context(n_ctx=56))[1].ids
    for taken in range(1, 25, 5):
        context = tiny.context(n_ctx=56)
        sampler = Sampler(SamplingParams(**SAMPLED), TINY_PROMPT)
        pieces = generate(context, Digits(), TINY_PROMPT, sampler, n_predict=25, in_graph=True)
        got = [next(pieces) for _ in range(taken)]
        pieces.close()
        assert got == [f"{i} " for i in whole[:taken]]
        alone = Sampler(SamplingParams(**SAMPLED), TINY_PROMPT)
        by_host = generate(tiny.context(n_ctx=56), Digits(), TINY_PROMPT, alone, n_predict=25)
        assert [next(by_host) for _ in range(taken)] == got
        assert sampler.state() == alone.state()
        assert context.history.tokens(0) == [*TINY_PROMPT, *whole[: taken - 1]]


def test_a_generation_that_ends_late_leaves_alone_what_others_have_made_of_the_context(tiny):
    context = tiny.context(n_ctx=56)
    pieces = generate(
        context, Digits(), TINY_PROMPT, Sampler(SamplingParams()), n_predict=25, in_graph=True
    )
    for _ in range(4):
        next(pieces)
    n_past = context.memory.n_past()
    context.memory.clear()
    context.decode(Batch(token=[5] * n_past))
    pieces.close()
    assert context.memory.n_past() == n_past


@pytest.mark.parametrize("n_predict", [-1, 100])
def test_a_memory_that_is_never_full_ends_with_the_context(load_tiny, n_predict):
    context = load_tiny("mamba-dense").context(n_ctx=32)
    _, out, _ = run_tiny(None, context=context, n_predict=n_predict, in_graph=True)
    assert out.finish_reason == "length"
    assert context.memory.n_past() == 32 and len(out.ids) == 32 - len(TINY_PROMPT) + 1


def test_a_recurrent_memory_forgets_the_sequence_where_it_cannot_go_back(load_tiny):
    context = load_tiny("mamba-dense").context(n_ctx=128, n_seq_max=2)
    context.decode(Batch(token=[7, 8], seq_id=[1, 1]))
    pieces = generate(
        context, Digits(), TINY_PROMPT, Sampler(SamplingParams()), n_predict=40, in_graph=True
    )
    while context.memory.n_past() < len(TINY_PROMPT) + 8:
        next(pieces)
    pieces.close()
    assert context.memory.lengths == (0, 2)


def test_it_is_asked_to_abort_between_calls(tiny):
    context = tiny.context(n_ctx=64)
    asked = iter([False] * 4 + [True])
    _, out, _ = run_tiny(
        tiny, context=context, n_predict=-1, in_graph=True, abort=lambda: next(asked)
    )
    assert out.finish_reason == "abort"
    assert len(out.ids) <= 1 + 3 * LOOP_STEPS


def test_nothing_to_choose_in_the_graph_is_an_error_after_what_could_be(tiny, monkeypatch):
    context = tiny.context(n_ctx=64)
    monkeypatch.setattr(
        context, "decode_loop", lambda *args, **options: (0, np.array([[7], [-1]], np.int32))
    )
    sampler = Sampler(SamplingParams())
    pieces = generate(context, Digits(), TINY_PROMPT, sampler, n_predict=9, in_graph=True)
    first, second = next(pieces), next(pieces)
    assert second == "7 " and first != ""
    with pytest.raises(SamplingError, match="no token is possible: logits are not numbers"):
        next(pieces)
