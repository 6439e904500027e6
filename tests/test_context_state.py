"""`state_save` and `state_load`: the continuation is that of the context that was saved."""

import functools
import json
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_models import write_tiny

from minfer_jax.batch import Batch
from minfer_jax.errors import MinferError, StateError, UsageError
from minfer_jax.lm import load
from minfer_jax.memory import state
from minfer_jax.sampling import Sampler, SamplingParams
from minfer_jax.settings import Settings

RNG = np.random.default_rng(23)
TOKENS = RNG.integers(0, 128, 400).tolist()
KV_TYPES = ["f32", "f16", "bf16", "q8_0", "q4_0"]
KINDS = ["llama-gqa-dense", "gemma3-dense", "jamba-dense"]
"""Ordinary attention, a sliding window, hybrid."""
MORE = ["mamba-dense", "rwkv7-head64-dense", "falcon-h1-dense", "deepseek2-moe"]
"""Twice recurrent, attention and a state in one layer, a latent cache."""


def slow(*names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def tiny(load_tiny):
    """`load_tiny`, whose models stay with their graphs."""
    return functools.cache(load_tiny)


def feed(context, tokens, seq=0):
    assert context.decode(Batch(token=tokens, seq_id=[seq] * len(tokens))) == 0


def continued(context, n=8, seq=0, sampler=None):
    """The next n tokens, and the logits that they were chosen by; the first ones are there."""
    ids, rows = [], []
    for _ in range(n):
        logits = context.logits()
        ids.append(int(logits.argmax()) if sampler is None else sampler.sample(logits))
        rows.append(logits)
        feed(context, ids[-1:], seq)
    return ids, np.array(rows)


def follow(context, ids, seq=0):
    """Logits after each of the tokens."""
    rows = []
    for token in ids:
        feed(context, [token], seq)
        rows.append(context.logits())
    return np.array(rows)


def close(got, want):
    return np.abs(got - want).max() < 1e-4 * want.std()


def check_equal(got, want):
    assert got[0] == want[0]
    np.testing.assert_array_equal(got[1], want[1])


# --- K06 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*KINDS, *slow(*MORE)])
@pytest.mark.parametrize("seq", [None, 0], ids=["whole", "sequence"])
def test_k06_a_new_context_goes_on_bit_for_bit(tiny, tmp_path, name, seq):
    lm = tiny(name)
    context, new = lm.context(n_ctx=64), lm.context(n_ctx=64)
    feed(context, TOKENS[:20])
    path = tmp_path / "state"
    data = context.state_save(seq, path)
    assert path.read_bytes() == data
    new.state_load(path, seq)
    assert new.memory.lengths == (20,)
    want = continued(context)
    check_equal(continued(new), want)
    new.state_load(data, seq)  # over what is there
    check_equal(continued(new), want)
    assert context.graphs.counters.built == 2  # a prompt, a step: a load builds none


@pytest.mark.parametrize("kind", KV_TYPES)
@pytest.mark.parametrize("name", ["llama-gqa-dense", *slow("deepseek2-moe")])
def test_k06_every_type_of_k_and_v(tiny, name, kind):
    lm = tiny(name)
    context, new = (lm.context(n_ctx=64, kv_types=(kind, kind)) for _ in range(2))
    feed(context, TOKENS[:20])
    new.state_load(context.state_save(0), 0)
    check_equal(continued(new), continued(context))


@pytest.mark.parametrize(
    "chain",
    [
        {"temp": 1.0, "repeat_penalty": 1.3},
        {"temp": 1.0, "mirostat": 2},
        {"dry_multiplier": 2.0, "dry_sequence_breakers": ()},
    ],
)
def test_k06_a_seeded_sampler(tiny, tmp_path, chain):
    """In the middle of a generation, with its sampler's state in the same file."""
    lm = tiny("qwen3-dense")
    context, new = lm.context(n_ctx=64), lm.context(n_ctx=64)
    feed(context, TOKENS[:20])
    params = SamplingParams(seed=-1, **chain)
    sampler, restored = Sampler(params, TOKENS[:20]), Sampler(params)
    continued(context, 5, sampler=sampler)
    context.state_save(path=tmp_path / "state", beside=sampler.state())
    restored.restore(new.state_load(tmp_path / "state"))
    assert restored.seed == sampler.seed
    check_equal(continued(new, sampler=restored), continued(context, sampler=sampler))


@pytest.mark.parametrize("seq", [None, 0], ids=["whole", "sequence"])
@pytest.mark.parametrize("n", [40, 300])
def test_k06_past_the_window(tiny, n, seq):
    """The window cache has 256 cells; with 300 tokens they have been written twice."""
    lm = tiny("gemma3-dense", n_ubatch=8)
    context, new = lm.context(n_ctx=512), lm.context(n_ctx=512)
    assert [cache.spec.n_cells for cache in context.store.caches] == [512, 256]
    feed(context, TOKENS[:n])
    new.state_load(context.state_save(seq), seq)
    assert new.memory.seq_pos_min(0) == context.memory.seq_pos_min(0) == max(0, n - 256)
    check_equal(continued(new), continued(context))
    other = lm.context(n_ctx=1024, n_seq_max=2)
    other.state_load(context.state_save(0), 1)
    want = follow(context, TOKENS[310:316])
    assert close(follow(other, TOKENS[310:316], 1), want)


@pytest.mark.parametrize("name", [*KINDS, *slow(*MORE)])
def test_k06_no_tokens(tiny, name):
    lm = tiny(name)
    context, new = (lm.context(n_ctx=64, n_seq_max=2) for _ in range(2))
    feed(new, TOKENS[:5], 0)
    feed(new, TOKENS[:5], 1)
    new.state_load(context.state_save(0), 0)
    assert new.memory.lengths == (0, 5)
    with pytest.raises(IndexError):
        new.logits()
    new.state_load(context.state_save())
    assert new.memory.lengths == (0, 0)
    feed(new, TOKENS[:9])
    feed(context, TOKENS[:9])
    assert close(new.logits(), context.logits())


# --- other contexts -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [KINDS[0], *slow(*KINDS[1:], *MORE)])
@pytest.mark.parametrize("unified", [False, True])
def test_a_sequence_moves_to_another_context(tiny, name, unified):
    """Other cells, among other sequences, with another size, cells shared or not."""
    lm = tiny(name)
    context = lm.context(n_ctx=96, n_seq_max=3, kv_unified=unified)
    other = lm.context(n_ctx=90, n_seq_max=3, kv_unified=not unified)
    feed(context, TOKENS[100:120], 0)
    feed(context, TOKENS[:20], 1)
    feed(other, TOKENS[200:215], 0)
    feed(other, TOKENS[300:310], 1)
    other.state_load(context.state_save(1), 1)
    np.testing.assert_array_equal(other.logits(), context.logits())
    assert other.memory.lengths == (15, 20, 0)
    alone = lm.context(n_ctx=64)
    feed(alone, TOKENS[200:215])
    want, kept = follow(context, TOKENS[20:26], 1), follow(alone, TOKENS[215:218])
    assert close(follow(other, TOKENS[20:26], 1), want)
    assert close(follow(other, TOKENS[215:218], 0), kept)


def test_other_numbers_of_sequences_and_rows(tiny):
    lm = tiny("llama-gqa-dense")
    context = lm.context(n_ctx=120, n_seq_max=3, kv_unified=True)
    other = lm.context(n_ctx=600, n_seq_max=2, n_ubatch=7)
    for seq in (0, 1):
        feed(context, TOKENS[100 * seq : 100 * seq + 40], seq)
    other.state_load(context.state_save())
    for seq in (1, 0):
        more = TOKENS[300 : 310 + seq]
        feed(context, more, seq)
        feed(other, more, seq)
        assert close(other.logits(), context.logits())


@pytest.mark.parametrize("name", ["llama-gqa-dense", "gemma3-dense"])
def test_a_sequence_fills_holes(tiny, name):
    lm = tiny(name)
    context, other = lm.context(n_ctx=64), lm.context(n_ctx=64, n_seq_max=3, kv_unified=True)
    for start in range(0, 40, 8):  # two sequences, in turn, of which one goes
        for seq in (0, 1):
            feed(other, TOKENS[200 + start : 206 + start], seq)
    assert other.memory.seq_rm(0)
    feed(context, TOKENS[:33])
    data = context.state_save(0)
    other.state_load(data, 2)
    assert other.memory.lengths == (0, 30, 33)
    want = follow(context, TOKENS[33:34])
    assert close(follow(other, TOKENS[33:34], 2), want)
    assert other.memory.seq_rm(2, 30)  # of 64 cells, 60 are in use...
    held, data = other.state_save(), context.state_save(0)
    with pytest.raises(StateError, match="does not fit: it holds 34 tokens, and 4 of 64 cells"):
        other.state_load(data, 0)
    assert other.state_save() == held
    other.state_load(data, 2)  # ...and 30 of them by what this replaces
    assert other.memory.lengths == (0, 30, 34)


@pytest.mark.parametrize("name", [KINDS[0], *slow(*KINDS[1:], *MORE)])
@pytest.mark.parametrize("unified", [False, True])
def test_a_whole_context_with_forks(tiny, name, unified):
    lm = tiny(name)
    context, new = (lm.context(n_ctx=192, n_seq_max=3, kv_unified=unified) for _ in range(2))
    feed(context, TOKENS[:20])
    assert context.memory.seq_cp(0, 2)
    batch = Batch(
        token=[*TOKENS[20:23], *TOKENS[50:55]],
        seq_id=[0] * 3 + [2] * 5,
        logits=[False, True, True, False, False, True, False, True],
    )
    assert context.decode(batch) == 0
    feed(new, TOKENS[300:320], 1)
    new.state_load(context.state_save())
    assert new.memory.lengths == (23, 0, 25)
    np.testing.assert_array_equal(new.all_logits(), context.all_logits())
    np.testing.assert_array_equal(new.logits(2), context.logits(2))
    for i in (0, 8):
        with pytest.raises(IndexError):
            new.logits(i)
    for seq in (0, 2, 1):
        more = TOKENS[70 : 74 + seq]
        np.testing.assert_array_equal(follow(new, more, seq), follow(context, more, seq))
    other = lm.context(n_ctx=240, n_seq_max=3, kv_unified=not unified)
    other.state_load(context.state_save())
    for seq in (0, 2):
        assert close(follow(other, TOKENS[90:93], seq), follow(context, TOKENS[90:93], seq))


def test_what_does_not_fit_changes_nothing(tiny):
    lm = tiny("llama-gqa-dense")
    context, small = lm.context(n_ctx=64, n_seq_max=2), lm.context(n_ctx=16)
    feed(context, TOKENS[:17])
    feed(small, TOKENS[100:110])
    held, logits = small.state_save(), small.logits()
    for data, seq, why in (
        (context.state_save(0), 0, "does not fit: it holds 17 tokens, and 16 of 16 cells"),
        (context.state_save(), None, "does not fit"),
        (context.state_save(), 0, "a whole context"),
        (context.state_save(0), None, "say which one"),
    ):
        with pytest.raises(StateError, match=why):
            small.state_load(data, seq)
        assert small.state_save() == held
        np.testing.assert_array_equal(small.logits(), logits)
    feed(context, [1], 1)
    context.memory.seq_rm(0)
    with pytest.raises(StateError, match="holds a sequence 1; this context has sequences 0 to 0"):
        small.state_load(context.state_save())
    assert small.state_save() == held
    assert small.memory.lengths == (10,)


def test_the_window_and_swa_full(tiny):
    lm = tiny("gemma3-dense", n_ubatch=8)
    context, full = lm.context(n_ctx=512), lm.context(n_ctx=512, swa_full=True)
    feed(context, TOKENS[:256])
    full.state_load(context.state_save(0), 0)  # nothing is forgotten yet
    np.testing.assert_array_equal(full.logits(), context.logits())
    assert close(follow(full, TOKENS[256:300]), follow(context, TOKENS[256:300]))
    assert full.memory.seq_pos_min(0) == 0 and full.memory.seq_rm(0, 100)
    held = full.state_save()
    for data, seq in ((context.state_save(0), 0), (context.state_save(), None)):
        with pytest.raises(StateError, match="sliding-window layers have forgotten tokens"):
            full.state_load(data, seq)
        assert full.state_save() == held
    # The other way round it is always enough.
    feed(full, TOKENS[100:300])
    context.state_load(full.state_save(0), 0)
    assert context.memory.seq_pos_min(0) == 300 + 1 - 32
    assert close(follow(context, TOKENS[300:340]), follow(full, TOKENS[300:340]))


def test_pending_shifts_are_applied_before(tiny):
    lm = tiny("llama-gqa-dense")
    context, new = lm.context(n_ctx=64), lm.context(n_ctx=64)
    feed(context, TOKENS[:30])
    assert context.memory.seq_rm(0, 5, 10) and context.memory.seq_add(0, 10, -1, -5)
    new.state_load(context.state_save(0), 0)
    assert new.memory.lengths == (25,)
    np.testing.assert_array_equal(follow(new, TOKENS[30:36]), follow(context, TOKENS[30:36]))


# --- outputs ------------------------------------------------------------------------------------


def has_output(context, data, seq=0):
    context.state_load(data, seq)
    try:
        context.logits()
    except IndexError:
        return False
    return True


def test_the_logits_of_a_sequence_are_saved_while_they_are_its_last(tiny):
    lm = tiny("llama-gqa-dense")
    context, new = (lm.context(n_ctx=128, n_seq_max=3, kv_unified=True) for _ in range(2))
    batch = Batch(token=TOKENS[:9], seq_id=[0, 1, 2] * 3, logits=[1, 1, 1, 0, 0, 0, 1, 1, 0])
    assert context.decode(batch) == 0
    memory, logits = context.memory, [context.logits(i) for i in (6, 7)]
    for seq in (0, 1):
        assert has_output(new, context.state_save(seq))
        np.testing.assert_array_equal(new.logits(), logits[seq])
        assert len(new.all_logits()) == 1
    assert not has_output(new, context.state_save(2))  # not asked for
    memory.seq_rm(0, 3)  # nothing
    assert has_output(new, context.state_save(0))
    memory.seq_cp(1, 2)
    assert has_output(new, context.state_save(2))
    np.testing.assert_array_equal(new.logits(), logits[1])
    memory.seq_rm(1, 2)
    assert not has_output(new, context.state_save(1))
    memory.seq_cp(2, 1, 0, 2)
    assert not has_output(new, context.state_save(1))
    memory.seq_cp(1, 0)
    assert not has_output(new, context.state_save(0))
    memory.seq_cp(2, 0)
    assert memory.seq_rm(1) and memory.seq_rm(2)
    assert has_output(new, context.state_save(0))
    memory.seq_add(0, 0, -1, 3)
    assert not has_output(new, context.state_save(0))
    feed(context, [1], 0)
    assert has_output(new, context.state_save(0))
    feed(context, [1], 1)
    assert not has_output(new, context.state_save(0))
    feed(context, [1], 0)
    assert has_output(new, context.state_save(0))
    again = new.state_save(0)  # as loaded
    assert has_output(context, again, 2)
    assert not has_output(new, context.state_save(0))  # whose own are gone since


def test_an_aborted_batch_leaves_no_outputs(tiny):
    lm = tiny("llama-gqa-dense")
    context, new = lm.context(n_ctx=64), lm.context(n_ctx=64)
    feed(context, TOKENS[:9])
    assert context.decode(Batch(token=[1]), abort=lambda: True) == 2
    for seq in (None, 0):
        assert not has_output(new, context.state_save(seq), seq)
        assert new.memory.lengths == (9,)


def test_embeddings_are_outputs_too(tiny):
    lm = tiny("llama-gqa-dense")
    maker, other = lm.context(n_ctx=64, embeddings=True), lm.context(n_ctx=64)
    feed(maker, TOKENS[:9])
    new = lm.context(n_ctx=64, embeddings=True)
    new.state_load(maker.state_save())
    np.testing.assert_array_equal(new.embeddings(), maker.embeddings())
    feed(other, TOKENS[:3])
    other.state_load(maker.state_save(0), 0)  # has no use for them
    assert len(other.all_logits()) == 0
    feed(maker, TOKENS[9:10])
    feed(other, TOKENS[9:10])
    assert other.logits().shape == (128,)


def test_histories_are_restored(tiny, monkeypatch):
    """A step that fails makes the context evaluate again what was loaded."""
    lm = tiny("llama-gqa-dense")
    context, new = lm.context(n_ctx=64), lm.context(n_ctx=64, n_seq_max=2)
    feed(context, TOKENS[:20])
    new.state_load(context.state_save(0), 1)
    assert new.history.tokens(1) == TOKENS[:20]
    context.memory.seq_rm(0, 5, 8)
    new.state_load(context.state_save(0), 0)
    assert new.history.tokens(0) is None
    context.memory.clear()
    new.state_load(context.state_save(0), 0)
    assert new.history.tokens(0) == []


# --- foreign states, files, failures ------------------------------------------------------------


def test_foreign_states(tiny):
    lm = tiny("llama-gqa-dense")
    context = lm.context(n_ctx=64)
    feed(context, TOKENS[:5])
    held = context.state_save()
    half = lm.context(n_ctx=64, kv_types=("f16", "f16"))
    for foreign, why in (
        (tiny("llama-dense").context(n_ctx=64).state_save(), "with another model"),
        (tiny("mamba-dense").context(n_ctx=64).state_save(), "with another model"),
        (half.state_save(), r"of types \['f16', 'f16'\]; this context has \['f32', 'f32'\]"),
        (held[:-1], "cut off"),
        (b"", "not a state"),
        (bytearray(held[:-1] + b"?"), "damaged"),
    ):
        with pytest.raises(StateError, match=why):
            context.state_load(foreign)
        assert context.state_save() == held
    # A model that keeps no keys has none of a type.
    mamba = tiny("mamba-dense")
    mamba.context(n_ctx=64).state_load(mamba.context(n_ctx=9, kv_types=("f16", "f16")).state_save())


def test_the_same_model_by_another_path_and_loaded_otherwise(tiny):
    want = tiny("llama-gqa-dense").context(n_ctx=64)
    feed(want, TOKENS[:5])
    other = tiny("llama-gqa-dense", fuse_qkv=False, n_ubatch=3).context(n_ctx=64)
    other.state_load(want.state_save())
    assert close(follow(other, TOKENS[5:9]), follow(want, TOKENS[5:9]))


def test_a_full_disk_leaves_the_old_file_and_the_context(tiny, tmp_path, monkeypatch):
    context = tiny("llama-gqa-dense").context(n_ctx=64)
    feed(context, TOKENS[:5])
    path = tmp_path / "state"
    old = context.state_save(path=path)
    feed(context, TOKENS[5:6])

    def fail(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("minfer_jax.memory.state_format.os.fsync", fail)
        with pytest.raises(StateError, match="could not be written: No space left on device"):
            context.state_save(path=path)
    assert path.read_bytes() == old
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
    context.state_load(str(path))
    assert context.memory.lengths == (5,)
    with pytest.raises(StateError, match="could not be read: No such file"):
        context.state_load(tmp_path / "none")
    with pytest.raises(StateError, match="could not be written: No such file"):
        context.state_save(0, tmp_path / "none" / "state")
    assert context.memory.lengths == (5,)


@pytest.mark.parametrize("seq", [-1, 2, 1.0, "0", True])
def test_a_sequence_that_is_not_there(tiny, seq):
    context = tiny("llama-gqa-dense").context(n_ctx=64, n_seq_max=2)
    data = context.state_save(0)
    with pytest.raises(UsageError, match=r"seq is .*; allowed: 0 to 1"):
        context.state_save(seq)
    with pytest.raises(UsageError, match=r"seq is .*; allowed: 0 to 1"):
        context.state_load(data, seq)


def test_what_is_neither_bytes_nor_a_path(tiny):
    context = tiny("llama-gqa-dense").context(n_ctx=64)
    for bad in (None, 5, [1]):
        with pytest.raises(UsageError, match="a state is bytes or a path"):
            context.state_load(bad)
    with pytest.raises(UsageError, match="path is 5, not a path"):
        context.state_save(0, 5)
    context.state_load(memoryview(context.state_save()))


def test_one_caller_at_a_time(tiny, monkeypatch):
    context = tiny("llama-gqa-dense").context(n_ctx=64)
    feed(context, TOKENS[:5])
    data = context.state_save()
    inside, done = threading.Event(), threading.Event()

    def abort():
        inside.set()
        return not done.wait(60)

    batch = Batch(token=TOKENS[5:7])
    other = threading.Thread(target=lambda: context.decode(batch, abort=abort))
    other.start()
    assert inside.wait(60)
    for call in (context.state_save, lambda: context.state_load(data)):
        with pytest.raises(UsageError, match="in use by another call"):
            call()
    done.set()
    other.join()
    assert context.memory.lengths == (7,)


def test_a_load_that_the_device_fails(tiny, monkeypatch):
    lm = tiny("llama-gqa-dense")
    context, new = lm.context(n_ctx=64), lm.context(n_ctx=64)
    feed(context, TOKENS[:5])
    feed(new, TOKENS[10:15])
    held = new.state_save()

    def fail(regions, *_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    def fail_late(regions, *_):
        for region in regions:
            region.delete()  # as an execution does that they were donated to
        fail(regions)

    with monkeypatch.context() as patch:
        patch.setattr(state, "put_cells", fail)
        with pytest.raises(MinferError, match="a load failed: RESOURCE_EXHAUSTED"):
            new.state_load(context.state_save())
        assert new.state_save() == held
        patch.setattr(state, "put_cells", fail_late)
        with pytest.raises(MinferError, match=r"a load failed: .*; the context was cleared"):
            new.state_load(context.state_save())
    assert new.memory.lengths == (0,) and new.lost == (0,)
    new.state_load(context.state_save())
    np.testing.assert_array_equal(follow(new, TOKENS[5:8]), follow(context, TOKENS[5:8]))


def test_an_encoder_remembers_nothing(tmp_path):
    spec = json.loads((Path(__file__).parent / "data/encoders/bert-dense.json").read_text())
    path = write_tiny(spec, tmp_path / "bert.gguf")
    lm = load(path, n_ctx=64, exact=True, settings=Settings(home=tmp_path))
    context, new = lm.context(n_ctx=64), lm.context(n_ctx=64)
    context.decode(Batch(token=TOKENS[:5], logits=[True] * 5))
    new.state_load(context.state_save())
    np.testing.assert_array_equal(new.embeddings(), context.embeddings())
    new.state_load(context.state_save(0), 0)
    np.testing.assert_array_equal(new.embeddings(), context.embeddings()[4:])
