"""Several sequences in one context: each as if it were alone in a fresh one."""

import threading

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from minfer_jax.batch import Batch
from minfer_jax.errors import BatchError, MinferError, UsageError
from minfer_jax.memory import kv

RNG = np.random.default_rng(11)
TOKENS = RNG.integers(0, 128, 200).tolist()
ARCHS = ["llama-gqa-dense", "gemma3-dense", "qwen3-dense"]


def alone(lm, tokens):
    """Logits after every token, in a fresh context."""
    context = lm.context(n_ctx=640)
    assert context.decode(Batch(token=tokens, logits=[True] * len(tokens))) == 0
    return context.all_logits()


def close(got, want, *, exact=True):
    """In the fast mode another order of summation may round an activation the other way."""
    return np.abs(got - want).max() < (1e-4 if exact else 0.03) * want.std()


@pytest.mark.parametrize("name", ARCHS)
@pytest.mark.parametrize("n_ubatch", [512, 7])
def test_interleaved_prompts_have_the_logits_of_sequences_alone(load_tiny, name, n_ubatch):
    lm = load_tiny(name, n_ubatch=n_ubatch)
    context = lm.context(n_ctx=3 * 64, n_seq_max=3)
    parts = [TOKENS[:40], TOKENS[60:83], TOKENS[100:131]]
    order = RNG.permutation(np.repeat([0, 1, 2], [len(p) for p in parts])).tolist()
    left = [list(p) for p in parts]
    batch = Batch(token=[left[s].pop(0) for s in order], seq_id=order, logits=[True] * len(order))
    assert context.decode(batch) == 0
    logits = context.all_logits()
    for seq, part in enumerate(parts):
        assert close(logits[np.array(order) == seq], alone(lm, part))
        assert (context.seq_pos_min(seq), context.seq_pos_max(seq)) == (0, len(part) - 1)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", ARCHS)
@pytest.mark.parametrize("n_seq", [2, 5, 16, 18])
def test_a_decode_step_of_many_sequences(load_tiny, name, n_seq, exact):
    lm = load_tiny(name, exact=exact)
    context = lm.context(n_ctx=n_seq * 32, n_seq_max=n_seq)
    want = [alone(lm, TOKENS[i : i + 20]) for i in range(n_seq)]
    for seq in range(n_seq):  # of different lengths
        start = TOKENS[seq : seq + 10 + seq % 5]
        assert context.decode(Batch(token=start, seq_id=[seq] * len(start))) == 0
    for _ in range(3):
        seqs = RNG.permutation(n_seq).tolist()
        at = [context.seq_pos_max(s) + 1 for s in seqs]
        tokens = [TOKENS[s + p] for s, p in zip(seqs, at, strict=True)]
        batch = Batch(token=tokens, seq_id=seqs, pos=at, logits=[True] * n_seq)
        assert context.decode(batch) == 0
        for row, s, p in zip(context.all_logits(), seqs, at, strict=True):
            assert close(row, want[s][p], exact=exact), (s, p)
    assert context.perf.n_eval == 3 * n_seq


def test_steps_of_as_many_sequences_reuse_one_graph_whatever_their_ids(load_tiny):
    context = load_tiny("llama-dense").context(n_ctx=8 * 32, n_seq_max=8)
    for n in (3, 4, 2):
        for start in (0, 4):
            seqs = list(range(start, start + n))
            context.decode(Batch(token=[5] * n, seq_id=seqs, logits=[True] * n))
    assert context.graphs.counters.built == 1


@pytest.mark.parametrize("name", ARCHS)
def test_a_copy_goes_on_as_its_source_would(load_tiny, name):
    lm = load_tiny(name)
    want = alone(lm, TOKENS[:30])
    context = lm.context(n_ctx=4 * 40, n_seq_max=4)
    context.decode(Batch(token=TOKENS[50:60], seq_id=[1] * 10))
    context.decode(Batch(token=TOKENS[:20]))
    context.seq_cp(0, 1)
    context.seq_cp(0, 3, 0, 15)
    assert [context.seq_pos_max(s) for s in range(4)] == [19, 19, -1, 14]
    context.decode(Batch(token=TOKENS[90:95]))  # the source goes elsewhere
    batch = [*TOKENS[20:30], *TOKENS[15:30]]
    context.decode(Batch(token=batch, seq_id=[1] * 10 + [3] * 15, logits=[True] * 25))
    assert close(context.all_logits()[:10], want[20:])
    assert close(context.all_logits()[10:], want[15:])
    context.seq_cp(2, 1)  # an empty one
    assert context.seq_pos_max(1) == -1
    context.seq_cp(0, 0, 0, 3)
    assert context.seq_pos_max(0) == 24


def test_a_failed_copy_clears_the_context_and_says_so(load_tiny, monkeypatch):
    context = load_tiny("llama-dense").context(n_ctx=64, n_seq_max=2)
    context.decode(Batch(token=[1, 2, 3]))
    want = context.logits()

    def fail(regions, *_, **__):
        for region in regions:
            region.delete()  # as a failing execution does
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(kv, "_copy_cells", fail)
        with pytest.raises(MinferError, match="context was cleared: RESOURCE_EXHAUSTED"):
            context.seq_cp(0, 1)
    assert context.memory.lengths == (0, 0)
    with pytest.raises(IndexError):
        context.logits()
    assert context.decode(Batch(token=[1, 2, 3], seq_id=[1] * 3)) == 0
    assert close(context.logits(), want)


def test_a_copy_with_a_gap_is_refused(load_tiny):
    context = load_tiny("llama-dense").context(n_ctx=64, n_seq_max=2)
    context.decode(Batch(token=[1, 2, 3]))
    with pytest.raises(UsageError, match="a copy from position 1 would begin with a gap; use 0"):
        context.seq_cp(0, 1, 1)
    assert context.seq_pos_max(1) == -1


def test_k14_removing(load_tiny):
    """`seq_id` -1 means every sequence; odd ranges remove nothing."""
    context = load_tiny("llama-dense").context(n_ctx=64, n_seq_max=2)
    context.decode(Batch(token=TOKENS[:8]))
    context.seq_cp(0, 1, 0, 4)

    def held():
        return [context.seq_pos_max(s) for s in range(2)]

    assert context.seq_rm(0, 2, -1) and held() == [1, 3]
    for p0, p1 in ((3, 2), (2, 2), (9, 12), (7, -1), (9, 3)):
        assert context.seq_rm(1, p0, p1) and held() == [1, 3], (p0, p1)
    for p0, p1 in ((0, 2), (-5, 3), (1, 3)):  # would leave tokens behind
        assert not context.seq_rm(1, p0, p1) and held() == [1, 3], (p0, p1)
    assert not context.seq_rm(-1, 0, 3) and held() == [1, 3]
    assert context.seq_rm(1, 2, 100) and held() == [1, 1]
    assert context.seq_rm(-1, 0, -1) and held() == [-1, -1]
    for seq in (-2, 2, True, 1.0, 2**70):
        with pytest.raises(UsageError, match=r"the sequence is .*; allowed: -1 to 1"):
            context.seq_rm(seq)
        with pytest.raises(UsageError, match=r"the sequence is .*; allowed: 0 to 1"):
            context.seq_cp(0, seq)
    for bad in (1.5, True, None, 2**31, "1"):
        with pytest.raises(UsageError, match="p0 is"):
            context.seq_rm(0, bad)
        with pytest.raises(UsageError, match="p1 is"):
            context.seq_cp(0, 1, 0, bad)


def test_keeping_one(load_tiny):
    context = load_tiny("llama-dense").context(n_ctx=96, n_seq_max=3)
    context.decode(Batch(token=[1, 2, 3, 4], seq_id=[0, 1, 2, 1]))
    context.seq_keep(1)
    assert [context.seq_pos_max(s) for s in range(3)] == [-1, 1, -1]
    assert [context.seq_pos_min(s) for s in range(3)] == [-1, 0, -1]
    context.clear()
    assert context.memory.lengths == (0, 0, 0)


def test_no_room_for_one_sequence_is_1_and_changes_nothing(load_tiny):
    context = load_tiny("llama-dense").context(n_ctx=33, n_seq_max=2)  # 16 each
    assert context.decode(Batch(token=TOKENS[:16])) == 0
    for seqs in ([1, 1, 0], [0, 1, 1]):
        assert context.decode(Batch(token=[1, 2, 3], seq_id=seqs)) == 1
    assert context.memory.lengths == (16, 0)
    assert context.decode(Batch(token=[1, 2], seq_id=[1, 1])) == 0


def test_an_aborted_batch_is_forgotten_in_every_sequence(load_tiny):
    context = load_tiny("llama-dense", n_ubatch=4).context(n_ctx=64, n_seq_max=2)
    context.decode(Batch(token=[1, 2, 3], seq_id=[0, 1, 1]))
    asked = iter([False, False, True])
    batch = Batch(token=TOKENS[:12], seq_id=[0, 1] * 6)
    assert context.decode(batch, abort=lambda: next(asked)) == 2
    assert context.memory.lengths == (1, 2)


def test_a_bad_batch_changes_no_sequence(load_tiny):
    context = load_tiny("llama-dense").context(n_ctx=64, n_seq_max=2)
    context.decode(Batch(token=[1, 2], seq_id=[0, 1]))
    for fields in ({"seq_id": [0, 2]}, {"seq_id": [1, 1], "pos": [1, 3]}, {"pos": [0, 1]}):
        with pytest.raises(BatchError):
            context.decode(Batch(token=[3, 4], **fields))
    assert context.memory.lengths == (1, 1)


@pytest.mark.parametrize("n_seq_max", [0, -1, 65, True, 2.0])
def test_more_sequences_than_places_are_refused(load_tiny, n_seq_max):
    with pytest.raises(UsageError, match=r"n_seq_max is .*; allowed: 1 to 64"):
        load_tiny("llama-dense").context(n_ctx=64, n_seq_max=n_seq_max)


def test_a_second_caller_gets_an_error_and_the_first_goes_on(load_tiny):
    context = load_tiny("llama-dense", n_ubatch=4).context(n_ctx=64)
    failures = []

    def other():
        for call in (lambda: context.decode(Batch(token=[1])), context.clear):
            try:
                call()
            except UsageError as e:
                failures.append(str(e))

    def abort():
        if not failures:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        return False

    assert context.decode(Batch(token=TOKENS[:10]), abort=abort) == 0
    assert failures == ["the context is in use by another call: it takes one at a time"] * 2
    assert context.memory.lengths == (10,)
    context.clear()


class Sequences(RuleBasedStateMachine):
    """Random operations on four sequences; logits are those of a fresh context."""

    lm = None  # set by the test
    N_SEQ = 4
    sequence = st.integers(0, N_SEQ - 1)
    position = st.integers(-1, 14)

    @initialize()
    def start(self):
        self.context = self.lm.context(n_ctx=48, n_seq_max=self.N_SEQ)
        self.held = [[] for _ in range(self.N_SEQ)]

    @rule(rows=st.lists(st.tuples(sequence, st.integers(0, 127)), min_size=1, max_size=10))
    def decode(self, rows):
        seqs, tokens = zip(*rows, strict=True)
        fits = all(len(h) + seqs.count(s) <= 12 for s, h in enumerate(self.held))
        code = self.context.decode(Batch(token=tokens, seq_id=seqs))
        assert code == (0 if fits else 1)
        if fits:
            for seq, token in rows:
                self.held[seq].append(token)
            self.compare(seqs[-1])

    def compare(self, seq):
        fresh = self.lm.context(n_ctx=48)
        fresh.decode(Batch(token=self.held[seq]))
        assert close(self.context.logits(), fresh.logits())

    @rule(seq=st.integers(-1, N_SEQ - 1), p0=position, p1=position)
    def remove(self, seq, p0, p1):
        seqs = range(self.N_SEQ) if seq == -1 else [seq]
        kept = [
            [t for p, t in enumerate(h) if not (max(p0, 0) <= p and (p1 < 0 or p < p1))]
            for h in self.held
        ]
        prefix = all(kept[s] == self.held[s][: len(kept[s])] and self.tail(s, p0, p1) for s in seqs)
        assert self.context.seq_rm(seq, p0, p1) == prefix
        if prefix:
            for s in seqs:
                self.held[s] = kept[s]

    def tail(self, s, p0, p1):
        """Whether nothing is left behind what is removed."""
        n = len(self.held[s])
        return p1 < 0 or p1 >= n or max(p0, 0) >= min(p1, n)

    @rule(source=sequence, to=sequence, p1=position)
    def copy(self, source, to, p1):
        self.context.seq_cp(source, to, 0, p1)
        if source != to:
            self.held[to] = self.held[source][: p1 if p1 >= 0 else None]

    @rule(seq=sequence)
    def keep(self, seq):
        self.context.seq_keep(seq)
        self.held = [h if s == seq else [] for s, h in enumerate(self.held)]

    def teardown(self):
        if hasattr(self, "context"):
            assert self.context.memory.lengths == tuple(map(len, self.held))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-gqa-dense", "gemma3-dense"])
@pytest.mark.parametrize("n_ubatch", [1, 5, 16])
def test_random_operations(load_tiny, name, n_ubatch):
    Sequences.lm = load_tiny(name, n_ubatch=n_ubatch)
    checks = [HealthCheck.too_slow]
    run_state_machine_as_test(
        Sequences,
        settings=settings(
            max_examples=90, stateful_step_count=12, deadline=None, suppress_health_check=checks
        ),
    )
