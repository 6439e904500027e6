"""Tokens chosen in the graph, one step or several at a time: the host's chain is the judge."""

from collections.abc import Callable

import numpy as np
import pytest
from test_context_sequences import decode_and_fail
from tiny_models import read_spec, write_tiny

from minfer_jax.batch import Batch
from minfer_jax.context import Context
from minfer_jax.errors import BatchError, MinferError, UsageError
from minfer_jax.graph.inputs import LOOP_STEPS
from minfer_jax.lm import load
from minfer_jax.memory import plan
from minfer_jax.sampling import Sampler, SamplingParams
from minfer_jax.settings import Settings

PROMPT = np.random.default_rng(5).integers(0, 128, 21).tolist()
CHAINS = {
    "greedy": {"temp": 0.0},
    "default": {"temp": 1.5},
    "penalties": {"temp": 0.0, "repeat_penalty": 1.8, "frequency_penalty": 0.5},
    "bias": {"temp": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "logit_bias": ((7, 4.0),)},
}
MEMORIES = {  # each with shared cells or with streams, which are both met by some
    "llama-gqa-dense": True,
    "gemma3-dense": False,
    "mamba-dense": False,
    "jamba-dense": True,
    "deepseek2-moe": False,
    "rwkv7-head64-dense": True,
}


def sampler(seed=0, **chain) -> Sampler:
    return Sampler(SamplingParams(seed=seed, **chain), PROMPT)


def by_the_host(context: Context, samplers: list[Sampler], n: int) -> list[list[int]]:
    """The tokens of n steps of as many sequences, all of which hold the prompt: [n + 1, n_seq]."""
    rows = range(len(samplers))
    for seq in rows:
        context.decode(Batch(token=PROMPT, seq_id=[seq] * len(PROMPT)))
        out = samplers[seq].sample(context.logits())
        samplers[seq].first = out
    tokens = [[s.first for s in samplers]]
    for _ in range(n):
        context.decode(Batch(token=tokens[-1], seq_id=rows, logits=[True] * len(rows)))
        tokens.append([s.sample(context.logits(i)) for i, s in enumerate(samplers)])
    return tokens


def begun(context: Context, samplers: list[Sampler]) -> list[int]:
    """The first token of each sequence, chosen in the graph of the prompt."""
    out = []
    for seq, each in enumerate(samplers):
        batch = Batch(token=PROMPT, seq_id=[seq] * len(PROMPT))
        assert context.decode(batch, samplers=[each]) == 0
        out.append(context.sampled())
    return out


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("n_seq", [1, 3])
def test_a_step_chooses_what_the_hosts_chain_chooses(load_tiny, chain, n_seq):
    lm = load_tiny("llama-gqa-dense")
    context = lm.context(n_ctx=n_seq * 64, n_seq_max=n_seq)
    want = by_the_host(context, [sampler(seq, **CHAINS[chain]) for seq in range(n_seq)], 10)
    context.memory.clear()
    samplers = [sampler(seq, **CHAINS[chain]) for seq in range(n_seq)]
    tokens = [begun(context, samplers)]
    for _ in range(10):
        batch = Batch(token=tokens[-1], seq_id=range(n_seq), logits=[True] * n_seq)
        assert context.decode(batch, samplers=samplers) == 0
        tokens.append([context.sampled(i) for i in range(n_seq)])
    assert tokens == want
    with pytest.raises(IndexError, match="were not asked for"):
        context.logits()


@pytest.mark.parametrize("chain", ["default", "penalties"])
def test_of_some_rows_each_is_chosen_by_its_own_sampler(load_tiny, chain):
    """As many rows as the graph has, so none is gathered; two sequences of four want a token."""
    lm = load_tiny("llama-gqa-dense")
    tokens = [5, 17, 29, 41]
    judge = lm.context(n_ctx=4 * 64, n_seq_max=4)
    judge.decode(Batch(token=tokens, seq_id=range(4), logits=[True] * 4))
    samplers = [[sampler(seq, **CHAINS[chain]) for seq in (1, 3)] for _ in range(2)]
    want = [s.sample(judge.logits(i)) for s, i in zip(samplers[0], (1, 3), strict=True)]
    context = lm.context(n_ctx=4 * 64, n_seq_max=4)
    batch = Batch(token=tokens, seq_id=range(4), logits=[False, True, False, True])
    assert context.decode(batch, samplers=samplers[1]) == 0
    assert [context.sampled(1), context.sampled(3)] == want
    assert [s.state() for s in samplers[1]] == [s.state() for s in samplers[0]]


@pytest.mark.parametrize(("name", "unified"), MEMORIES.items())
def test_a_loop_chooses_what_single_steps_choose_and_leaves_what_they_leave(
    load_tiny, name, unified
):
    """In every memory; what is held afterwards goes on as what single steps left."""
    compare_with_single_steps(
        lambda: load_tiny(name).context(n_ctx=3 * 64, n_seq_max=3, kv_unified=unified)
    )


@pytest.mark.parametrize("unified", [False, True], ids=["streams", "unified"])
def test_a_loop_overwrites_what_a_window_has_left_behind(tmp_path, monkeypatch, unified):
    """A window of 4 tokens in blocks of 4 cells: a later step's cell is an earlier step's past."""
    monkeypatch.setattr(plan, "BLOCK", 4)
    changes = {"gemma3.attention.sliding_window": 4}
    path = write_tiny(read_spec("gemma3-dense"), tmp_path / "model.gguf", kv=changes)
    settings = Settings(home=tmp_path)
    lm = load(path, exact=True, n_ubatch=3, flash_attn=False, settings=settings)
    made = [lm.context(n_ctx=3 * 64, n_seq_max=3, kv_unified=unified) for _ in range(2)]
    assert made[0].store.caches[1].spec.stream_size < len(PROMPT) + 23
    compare_with_single_steps(iter(made).__next__)


def compare_with_single_steps(make: Callable[[], Context]) -> None:
    contexts = [make() for _ in range(2)]
    chain = {"temp": 1.5, "repeat_penalty": 1.2}
    want = by_the_host(contexts[0], [sampler(seq, **chain) for seq in range(3)], 23)
    context, samplers = contexts[1], [sampler(seq, **chain) for seq in range(3)]
    tokens = [begun(context, samplers)]
    for n in (7, 1, 15):
        batch = Batch(token=tokens[-1], seq_id=range(3))
        status, chosen = context.decode_loop(batch, samplers, n)
        assert status == 0 and chosen.shape == (n, 3)
        tokens += chosen.tolist()
    assert tokens == want
    assert context.memory.lengths == contexts[0].memory.lengths == (len(PROMPT) + 23,) * 3
    last = Batch(token=[5, 6, 7], seq_id=range(3), logits=[True] * 3)
    for each in contexts:
        assert each.decode(last) == 0
    got, judge = (each.all_logits() for each in reversed(contexts))
    np.testing.assert_allclose(got, judge, atol=1e-4 * judge.std())


@pytest.mark.parametrize("name", ["llama-gqa-dense", "gemma3-dense", "jamba-dense"])
def test_a_loop_ends_with_the_first_end_and_the_rest_is_as_if_never_reserved(load_tiny, name):
    lm = load_tiny(name)
    context = lm.context(n_ctx=2 * 64, n_seq_max=2)
    chain = {"temp": 1.5}
    want = by_the_host(context, [sampler(seq, **chain) for seq in range(2)], 12)
    ends = [want[5][1]]
    first = next(i for i in range(1, 13) if ends[0] in want[i])
    context.memory.clear()
    samplers = [sampler(seq, **chain) for seq in range(2)]
    tokens = [begun(context, samplers)]
    batch = Batch(token=tokens[0], seq_id=range(2))
    status, chosen = context.decode_loop(batch, samplers, 12, ends=ends)
    assert status == 0 and chosen.tolist() == want[1 : first + 1]
    assert context.memory.lengths == (len(PROMPT) + first,) * 2
    while len(tokens := tokens + chosen.tolist()) <= 12:  # on, past the end
        batch = Batch(token=tokens[-1], seq_id=range(2))
        status, chosen = context.decode_loop(batch, samplers, 13 - len(tokens))
        assert status == 0
    assert tokens == want


def test_seeds_and_settings_are_data_and_the_kind_is_a_field(load_tiny):
    context = load_tiny("llama-gqa-dense").context(n_ctx=256)
    context.decode(Batch(token=PROMPT))
    for n, settings in enumerate(
        ({}, {"temp": 1.1}, {"seed": 1 << 63}, {"top_k": 7, "top_p": 0.5})
    ):
        context.decode_loop(Batch(token=[1]), [sampler(**settings)], 2 + n)
        assert context.perf().n_built == 2
    context.decode_loop(Batch(token=[1]), [sampler(temp=0.0)], 2)
    assert context.perf().n_built == 3 and context.perf().rebuilt_by["sampler"] == 2
    assert context.perf().n_eval == 2 + 3 + 4 + 5 + 2


def test_a_loop_takes_the_room_that_there_is(load_tiny):
    context = load_tiny("llama-gqa-dense").context(n_ctx=32)
    context.decode(Batch(token=[3] * 20))
    each = sampler(temp=0.0)
    status, chosen = context.decode_loop(Batch(token=[1]), [each], 1000)
    assert status == 0 and 8 <= len(chosen) <= 12
    while context.memory.n_past() < 32:
        assert context.decode_loop(Batch(token=[1]), [each], LOOP_STEPS)[0] == 0
    status, chosen = context.decode_loop(Batch(token=[1]), [each], 4)
    assert status == 1 and chosen.shape == (0, 1) and context.memory.n_past() == 32


def test_a_loop_that_fails_is_forgotten_and_its_samplers_are_where_they_were(load_tiny):
    context = load_tiny("llama-gqa-dense").context(n_ctx=64)
    context.decode(Batch(token=PROMPT))
    each = sampler(temp=1.5)

    class Looped:  # what `decode_and_fail` calls
        graphs = context.graphs

        @staticmethod
        def decode(batch: Batch) -> None:
            context.decode_loop(batch, [each], 8)

    with pytest.raises(MinferError, match="was evaluated again"):
        decode_and_fail(Looped, Batch(token=[1]))
    assert context.memory.n_past() == len(PROMPT) and each.draws == 0
    again = sampler(temp=1.5)
    _, chosen = context.decode_loop(Batch(token=[1]), [each], 8)
    other = load_tiny("llama-gqa-dense").context(n_ctx=64)
    other.decode(Batch(token=PROMPT))
    assert chosen.tolist() == other.decode_loop(Batch(token=[1]), [again], 8)[1].tolist()


def test_a_loop_is_evaluated_again_with_what_it_chose(load_tiny):
    """After regions are lost, its tokens are part of what a sequence is made of."""
    context = load_tiny("llama-gqa-dense").context(n_ctx=64)
    context.decode(Batch(token=PROMPT))
    _, chosen = context.decode_loop(Batch(token=[1]), [sampler(temp=1.5)], 8)
    fed = [*PROMPT, 1, *chosen[:-1, 0].tolist()]
    assert context.history.tokens(0) == fed
    with pytest.raises(MinferError, match="was evaluated again"):
        decode_and_fail(context, Batch(token=[9]))
    context.decode(Batch(token=[9]))
    fresh = load_tiny("llama-gqa-dense").context(n_ctx=64)
    fresh.decode(Batch(token=[*fed, 9]))
    np.testing.assert_allclose(context.logits(), fresh.logits(), atol=1e-4 * fresh.logits().std())


@pytest.mark.parametrize(
    ("batch", "samplers", "message"),
    [
        (Batch(token=[1]), [], "0 samplers for the 1 outputs"),
        (Batch(token=[1, 2], seq_id=[0, 1]), [{}], "1 samplers for the 2 outputs"),
        (Batch(token=[1, 2], seq_id=[0, 1]), [{}, {"temp": 0.0}], "several kinds"),
        (Batch(token=[1]), [{"mirostat": 2}], "only the host can do"),
        (Batch(token=[1, 2], seq_id=[0, 0]), [{}, {}], "one output of a sequence"),
        (Batch(token=[1], seq_id=[(0, 1)]), [{}], "which no other shares"),
        (Batch(embd=np.zeros((1, 256), np.float32)), [{}], "begins with tokens"),
    ],
)
def test_what_a_loop_refuses(load_tiny, batch, samplers, message):
    context = load_tiny("llama-gqa-dense").context(n_ctx=64, n_seq_max=2, kv_unified=True)
    with pytest.raises((UsageError, BatchError), match=message):
        context.decode_loop(batch, [sampler(**chain) for chain in samplers], 4)
    assert context.memory.lengths == (0, 0)


def test_two_sequences_do_not_share_a_sampler(load_tiny):
    context = load_tiny("llama-gqa-dense").context(n_ctx=64, n_seq_max=2)
    each = sampler()
    with pytest.raises(UsageError, match="each needs one of its own"):
        context.decode_loop(Batch(token=[1, 2], seq_id=[0, 1]), [each, each], 4)


@pytest.mark.parametrize("ends", [[-1], [128], [True], [1.0], range(17)])
def test_ends_that_are_no_tokens_are_refused(load_tiny, ends):
    context = load_tiny("llama-gqa-dense").context(n_ctx=64)
    with pytest.raises(UsageError, match=r"ends? a loop"):
        context.decode_loop(Batch(token=[1]), [sampler()], 4, ends=ends)
    with pytest.raises(UsageError, match="n_steps"):
        context.decode_loop(Batch(token=[1]), [sampler()], 0)


def test_a_context_of_embeddings_chooses_no_tokens(load_tiny):
    context = load_tiny("llama-gqa-dense").context(n_ctx=64, embeddings=True)
    with pytest.raises(UsageError, match="embeddings"):
        context.decode(Batch(token=[1]), samplers=[sampler()])
