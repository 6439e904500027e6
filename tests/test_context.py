"""`Context.decode`: return codes, ubatches that do not change results, reuse, failures."""

import dataclasses
import gc
import signal
import sys
import weakref
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny_models import tensor_values

from minfer_jax.batch import Batch
from minfer_jax.context import Context
from minfer_jax.errors import BatchError, MinferError, UsageError
from minfer_jax.limits import check_memory
from minfer_jax.memory.plan import plan_memory
from minfer_jax.settings import Settings

RNG = np.random.default_rng(7)
TOKENS = RNG.integers(0, 128, 520).tolist()


def everything(context: Context, tokens: list[int]) -> np.ndarray:
    """All rows of logits of one batch in an emptied context."""
    context.memory.clear()
    assert context.decode(Batch(token=tokens, logits=[True] * len(tokens))) == 0
    return context.all_logits()


@pytest.mark.parametrize("name", ["llama-gqa-dense", "gemma3-dense"])
def test_how_a_prompt_is_cut_does_not_change_its_logits(load_tiny, name):
    want = everything(load_tiny(name).context(n_ctx=640), TOKENS)
    for n_ubatch in (1, 2, 7, 33):
        got = everything(load_tiny(name, n_ubatch=n_ubatch).context(n_ctx=640), TOKENS)
        assert np.abs(got - want).max() < 1e-4 * want.std(), n_ubatch
    context = load_tiny(name).context(n_ctx=640)
    for i, token in enumerate(TOKENS):
        assert context.decode(Batch(token=[token])) == 0
        assert np.abs(context.logits() - want[i]).max() < 1e-4 * want.std(), i


def test_logits_of_any_subset_of_rows(load_tiny):
    context = load_tiny("qwen3-dense", n_ubatch=8).context(n_ctx=64)
    tokens = TOKENS[:20]
    want = everything(context, tokens)
    context.memory.clear()
    wanted = [i in (0, 7, 8, 19) for i in range(20)]
    context.decode(Batch(token=tokens, logits=wanted))
    np.testing.assert_allclose(context.all_logits(), want[wanted], atol=1e-5 * want.std())
    np.testing.assert_array_equal(context.logits(8), context.all_logits()[2])
    np.testing.assert_array_equal(context.logits(-1), context.all_logits()[3])
    for i in (1, 20, -21):
        with pytest.raises(IndexError):
            context.logits(i)


@pytest.mark.parametrize("name", ["llama-gqa-dense", "mamba-dense", "jamba-dense", "gemma2-dense"])
def test_rows_given_as_embeddings(load_tiny, name):
    """Those of tokens, among tokens, have the tokens' logits."""
    lm = load_tiny(name, n_ubatch=8)
    n_embd = lm.model.hp.n_embd
    table = tensor_values("token_embd.weight", 128 * n_embd).reshape(128, n_embd)
    context = lm.context(n_ctx=64)
    want = everything(context, TOKENS[:30])
    context.memory.clear()
    context.decode(Batch(token=TOKENS[:5]))
    context.decode(Batch(embd=table[TOKENS[5:29]], logits=[True] * 24))
    np.testing.assert_allclose(context.all_logits(), want[5:29], atol=1e-4 * want.std())
    context.decode(Batch(token=TOKENS[29:30]))
    np.testing.assert_allclose(context.logits(), want[29], atol=1e-4 * want.std())


def test_no_room_is_1_and_changes_nothing(load_tiny):
    context = load_tiny("llama-dense").context(n_ctx=16)
    assert context.decode(Batch(token=TOKENS[:10])) == 0
    logits = context.logits()
    assert context.decode(Batch(token=TOKENS[:7])) == 1
    assert context.memory.n_past() == 10
    np.testing.assert_array_equal(context.logits(), logits)
    assert context.decode(Batch(token=TOKENS[10:16])) == 0  # exactly full
    assert context.memory.n_past() == context.n_ctx_seq


def test_a_bad_batch_changes_nothing(load_tiny):
    context = load_tiny("llama-dense").context(n_ctx=16)
    context.decode(Batch(token=[1, 2]))
    for bad in ([3, -1], [3, 128], [3, 2**31], [3, 1.5], []):
        with pytest.raises(BatchError):
            context.decode(Batch(token=bad))
    assert context.memory.n_past() == 2


def test_going_back_and_on_again(load_tiny):
    """What lies past the cursor is garbage that nobody reads."""
    context = load_tiny("gemma3-dense").context(n_ctx=128)
    want = everything(context, TOKENS[:60])
    context.decode(Batch(token=TOKENS[100:140]))
    context.memory.seq_rm(0, 50)
    context.decode(Batch(token=TOKENS[50:60], logits=[True] * 10))
    np.testing.assert_allclose(context.all_logits(), want[50:], atol=1e-4 * want.std())


def test_abort_between_ubatches_forgets_the_call(load_tiny):
    context = load_tiny("llama-dense", n_ubatch=8).context(n_ctx=64)
    context.decode(Batch(token=[1, 2, 3]))
    asked = iter([False, False, True])
    assert context.decode(Batch(token=TOKENS[:30]), abort=lambda: next(asked)) == 2
    assert context.memory.n_past() == 3
    with pytest.raises(IndexError):
        context.logits()
    assert context.decode(Batch(token=[4])) == 0


def test_a_failed_step_clears_the_context_and_says_so(load_tiny, monkeypatch):
    context = load_tiny("llama-dense").context(n_ctx=64)
    want = everything(context, TOKENS[:5])

    def fail(weights, regions, *inputs):
        for region in regions:
            region.delete()  # as a failing execution does
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    get = context.graphs.get

    def broken(params):
        entry = get(params)
        return dataclasses.replace(entry, compiled=dataclasses.replace(entry.compiled, run=fail))

    with monkeypatch.context() as patch:
        patch.setattr(context.graphs, "get", broken)
        with pytest.raises(MinferError, match=r"RESOURCE_EXHAUSTED.*; the context was cleared"):
            context.decode(Batch(token=[9]))
    assert context.memory.n_past() == 0
    np.testing.assert_array_equal(everything(context, TOKENS[:5]), want)


def test_an_interrupt_after_the_call_keeps_the_earlier_tokens(load_tiny, monkeypatch):
    context = load_tiny("llama-dense").context(n_ctx=64)
    want = everything(context, TOKENS[:6])
    context.memory.seq_rm(0, 5)
    get = context.graphs.get

    class Interrupted:
        def block_until_ready(self):
            raise KeyboardInterrupt

    def interrupted(params):
        entry = get(params)

        def run(*args):
            return Interrupted(), entry.compiled.run(*args)[1]

        return dataclasses.replace(entry, compiled=dataclasses.replace(entry.compiled, run=run))

    with monkeypatch.context() as patch:
        patch.setattr(context.graphs, "get", interrupted)
        with pytest.raises(KeyboardInterrupt):
            context.decode(Batch(token=[9]))
    assert context.memory.n_past() == 5
    context.decode(Batch(token=TOKENS[5:6]))
    np.testing.assert_allclose(context.logits(), want[5], atol=1e-5 * want.std())


def test_an_interrupt_during_the_call_is_held_back_until_the_regions_are_bound(
    load_tiny, monkeypatch
):
    context = load_tiny("llama-dense").context(n_ctx=64)
    want = everything(context, TOKENS[:6])
    context.memory.seq_rm(0, 5)
    get = context.graphs.get

    def interrupted(params):
        entry = get(params)

        def run(*args):
            result = entry.compiled.run(*args)  # the donated regions are gone by now
            signal.raise_signal(signal.SIGINT)
            return result

        return dataclasses.replace(entry, compiled=dataclasses.replace(entry.compiled, run=run))

    with monkeypatch.context() as patch:
        patch.setattr(context.graphs, "get", interrupted)
        with pytest.raises(KeyboardInterrupt):
            context.decode(Batch(token=[9]))
    assert context.memory.n_past() == 5
    assert not any(region.is_deleted() for region in context.store.regions())
    context.decode(Batch(token=TOKENS[5:6]))
    np.testing.assert_allclose(context.logits(), want[5], atol=1e-5 * want.std())


def test_an_interrupt_by_another_handler_loses_the_regions_and_the_context_goes_on(
    load_tiny, monkeypatch
):
    context = load_tiny("llama-dense").context(n_ctx=64)
    want = everything(context, TOKENS[:6])
    get = context.graphs.get

    def interrupted(params):
        entry = get(params)

        def run(*args):
            entry.compiled.run(*args)
            raise KeyboardInterrupt

        return dataclasses.replace(entry, compiled=dataclasses.replace(entry.compiled, run=run))

    with monkeypatch.context() as patch:
        patch.setattr(context.graphs, "get", interrupted)
        with pytest.raises(KeyboardInterrupt):
            context.decode(Batch(token=[9]))
    assert context.memory.n_past() == 0
    np.testing.assert_array_equal(everything(context, TOKENS[:6]), want)


def test_a_table_of_graphs_ends_with_its_last_context(load_tiny):
    lm = load_tiny("llama-dense")
    first, second = lm.context(n_ctx=1000), lm.context(n_ctx=1000)
    first.decode(Batch(token=[1]))
    executable = weakref.ref(first.graphs.entries[0].compiled.run)
    del first
    second.decode(Batch(token=[1]))
    assert second.graphs.counters.reused == 1
    gc.collect()
    assert executable() is not None
    del second
    gc.collect()
    assert executable() is None


def test_contexts_of_nearly_equal_size_share_their_graphs(load_tiny):
    lm = load_tiny("llama-dense")
    first, second = lm.context(n_ctx=70), lm.context(n_ctx=80)
    first.decode(Batch(token=[1]))
    second.decode(Batch(token=[1]))
    assert first.graphs is second.graphs
    assert (first.graphs.counters.built, first.graphs.counters.reused) == (1, 1)


def test_logits_that_nobody_asked_for(load_tiny):
    context = load_tiny("llama-dense").context(n_ctx=64)
    context.decode(Batch(token=[1, 2], logits=[False, False]))
    assert context.all_logits().shape == (0, 128)


def test_every_prompt_length_builds_no_more_graphs_than_there_are_buckets(load_tiny):
    context = load_tiny("llama-gqa-dense", exact=False).context(n_ctx=640)
    before = context.graphs.counters.built
    for n in range(1, 601):
        context.memory.clear()
        assert context.decode(Batch(token=TOKENS[:1] * n)) == 0
    assert {e.params.n_tokens for e in context.graphs.entries} == {1, 32, 128, 512}
    assert context.graphs.counters.built - before == 4
    assert context.graphs.counters.evicted == 0


def test_a_hundred_tokens_take_two_graphs_and_a_second_prompt_none(load_tiny):
    context = load_tiny("llama-gqa-dense", exact=False).context(n_ctx=317)
    context.decode(Batch(token=TOKENS[:20]))
    for token in TOKENS[:100]:
        context.decode(Batch(token=[token]))
    counters = context.graphs.counters
    assert (counters.built, counters.reused) == (2, 99)
    context.memory.clear()
    context.decode(Batch(token=TOKENS[:31]))
    assert (counters.built, counters.reused) == (2, 100)
    perf = context.perf()
    assert (perf.n_p_eval, perf.n_eval) == (51, 100)
    assert perf.build_seconds > 0 and perf.eval_seconds > 0 and perf.p_eval_seconds > 0


FLIPS = {
    "n_ctx": {"n_ctx": 300},
    "flash_attn": {"flash_attn": False},
    "exact": {"exact": True},
    "fuse_qkv": {"fuse_qkv": False},
    "fuse_ffn": {"fuse_ffn": False},
}


@pytest.mark.parametrize("field", FLIPS)
def test_flipping_a_field_is_a_rebuild(load_tiny, field, tmp_path):
    lm = load_tiny("qwen2-gqa-dense", exact=False)
    options = {"n_ctx": 64, "exact": False, "flash_attn": True, **FLIPS[field]}
    settings = {k: options.pop(k) for k in list(options) if k.startswith("fuse")}
    lm.context(n_ctx=64).decode(Batch(token=[1]))
    other = Context(lm.model, **options, settings=Settings(home=tmp_path, **settings))
    built, reused = other.graphs.counters.built, other.graphs.counters.reused
    other.decode(Batch(token=[1]))
    assert (other.graphs.counters.built, other.graphs.counters.reused) == (built + 1, reused)
    if field in ("flash_attn", "fuse_qkv", "fuse_ffn"):  # the others have a table of their own
        assert other.graphs.counters.rebuilt_by[field] == 1


def test_what_a_ubatch_or_a_context_decides_is_a_rebuild(load_tiny):
    """Scattered cells, embeddings as input, embeddings as output."""
    lm = load_tiny("qwen2-gqa-dense", exact=False)
    context = lm.context(n_ctx=64)
    context.decode(Batch(token=TOKENS[:8]))
    context.decode(Batch(token=[1]))
    before = context.perf().rebuilt_by.copy()
    assert context.memory.seq_rm(0, 2, 3)
    context.decode(Batch(token=[1]))
    assert context.perf().rebuilt_by - before == {"kv_map": 1}
    context.decode(Batch(token=[1]))
    assert (context.perf().n_built, context.perf().n_reused) == (3, 1)
    context.memory.clear()
    embd = np.ones((1, lm.model.hp.n_embd), np.float32)
    context.decode(Batch(embd=embd))
    assert context.perf().rebuilt_by["embd_input"] == 1
    other = lm.context(n_ctx=64, embeddings=True)
    assert other.graphs is context.graphs
    other.decode(Batch(token=[1]))
    assert other.perf().rebuilt_by == {"embeddings": 1}


def test_new_weights_are_a_rebuild(load_tiny):
    lm = load_tiny("qwen2-gqa-dense", exact=False)
    context = lm.context(n_ctx=64)
    context.decode(Batch(token=[1]))
    lm.model.weights_version += 1
    context.decode(Batch(token=[1]))
    assert context.graphs.counters.rebuilt_by["weights_version"] == 1


def test_ids_and_positions_and_contexts_are_a_reuse(load_tiny):
    lm = load_tiny("qwen2-gqa-dense", exact=False)
    first, second = lm.context(n_ctx=64), lm.context(n_ctx=64)
    assert first.graphs is second.graphs
    first.decode(Batch(token=[1]))
    entry = first.graphs.entries[0]
    for context, token in ((first, 2), (first, 3), (second, 1)):
        context.decode(Batch(token=[token]))
        assert context.graphs.entries[0] is entry
    assert first.graphs.counters.built == 1


def test_contexts_do_not_see_each_other(load_tiny):
    lm = load_tiny("llama-gqa-dense")
    want = everything(lm.context(n_ctx=64), TOKENS[:12])
    a, b = lm.context(n_ctx=64), lm.context(n_ctx=64)
    for token in TOKENS[:12]:
        a.decode(Batch(token=[token]))
        b.decode(Batch(token=[127 - token]))
    np.testing.assert_allclose(a.logits(), want[-1], atol=1e-4 * want.std())


def test_numbers_out_of_range_are_refused(load_tiny, tmp_path):
    model, settings = load_tiny("llama-dense").model, Settings(home=tmp_path)
    for options in ({"n_ctx": 0}, {"n_ctx": -1}, {"n_ctx": 2**31}, {"n_ctx": True}):
        with pytest.raises(UsageError, match="n_ctx is"):
            Context(model, **options, settings=settings)
    with pytest.raises(UsageError, match="n_ubatch is 0"):
        Context(model, n_ctx=64, n_ubatch=0, settings=settings)


@pytest.mark.skipif(sys.platform == "win32", reason="asks the system by sysconf")
def test_what_the_machine_cannot_hold_is_refused(load_tiny):
    cpu = jax.devices("cpu")[0]
    gpu = SimpleNamespace(id=0, platform="gpu", device_kind="")
    hp = load_tiny("llama-dense").model.hp
    plan = plan_memory(hp, n_ctx=2**50 // plan_memory(hp, n_ctx=64).bytes_per_cell)
    with pytest.raises(UsageError, match=r"the context 1048576\.0 GiB for what it remembers"):
        check_memory(plan, 0, cpu)
    with pytest.raises(UsageError, match=r"the weights need 1048576\.0 GiB"):
        check_memory(plan_memory(hp, n_ctx=1), 2**50, cpu)
    check_memory(plan, 2**50, gpu)  # its memory is not this machine's
    check_memory(plan_memory(hp, n_ctx=64), 2**20, cpu)


def test_timing_line(load_tiny, capsys):
    context = load_tiny("llama-dense", timing=True).context(n_ctx=64)
    context.decode(Batch(token=[1, 2, 3]))
    assert capsys.readouterr().err.startswith("ubatch: 3 of 32 rows, graph ")


def test_verify_graph_and_no_reuse(load_tiny):
    lm = load_tiny("qwen3-dense", verify_graph=True, reuse_disabled=True)
    context = lm.context(n_ctx=64)
    context.decode(Batch(token=[1]))
    context.decode(Batch(token=[1]))
    assert context.graphs.counters.built == 2
