"""Several sequences in one context: each as if it were alone in a fresh one."""

import dataclasses
import threading
from collections.abc import Callable

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
from tiny_models import read_spec, write_tiny

from minfer_jax.batch import Batch
from minfer_jax.context import Context
from minfer_jax.errors import BatchError, MinferError, StateError, UsageError
from minfer_jax.lm import LanguageModel, load
from minfer_jax.memory import memory, plan
from minfer_jax.settings import Settings

RNG = np.random.default_rng(11)
TOKENS = RNG.integers(0, 128, 200).tolist()
ARCHS = [
    "llama-gqa-dense",
    pytest.param("gemma3-dense", marks=pytest.mark.slow),
    pytest.param("qwen3-dense", marks=pytest.mark.slow),
]


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
        ends = context.memory.seq_pos_min(seq), context.memory.seq_pos_max(seq)
        assert ends == (0, len(part) - 1)


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
        at = [context.memory.seq_pos_max(s) + 1 for s in seqs]
        tokens = [TOKENS[s + p] for s, p in zip(seqs, at, strict=True)]
        batch = Batch(token=tokens, seq_id=seqs, pos=at, logits=[True] * n_seq)
        assert context.decode(batch) == 0
        for row, s, p in zip(context.all_logits(), seqs, at, strict=True):
            assert close(row, want[s][p], exact=exact), (s, p)
    assert context.perf().n_eval == 3 * n_seq


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
    context.memory.seq_cp(0, 1)
    context.memory.seq_cp(0, 3, 0, 15)
    assert [context.memory.seq_pos_max(s) for s in range(4)] == [19, 19, -1, 14]
    context.decode(Batch(token=TOKENS[90:95]))  # the source goes elsewhere
    batch = [*TOKENS[20:30], *TOKENS[15:30]]
    context.decode(Batch(token=batch, seq_id=[1] * 10 + [3] * 15, logits=[True] * 25))
    assert close(context.all_logits()[:10], want[20:])
    assert close(context.all_logits()[10:], want[15:])
    context.memory.seq_cp(2, 1)  # an empty one
    assert context.memory.seq_pos_max(1) == -1
    context.memory.seq_cp(0, 0, 0, 3)
    assert context.memory.seq_pos_max(0) == 24


def test_a_failed_copy_clears_the_context_and_says_so(load_tiny, monkeypatch):
    context = load_tiny("llama-dense").context(n_ctx=64, n_seq_max=2)
    context.decode(Batch(token=[1, 2, 3]))
    want = context.logits()

    def fail(regions, *_, **__):
        for region in regions:
            region.delete()  # as a failing execution does
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(memory, "copy_cells", fail)
        with pytest.raises(MinferError, match=r"RESOURCE_EXHAUSTED.*the context was cleared"):
            context.memory.seq_cp(0, 1)
    assert context.memory.lengths == (0, 0)
    with pytest.raises(IndexError):
        context.logits()
    assert context.decode(Batch(token=[1, 2, 3], seq_id=[1] * 3)) == 0
    assert close(context.logits(), want)


def test_a_copy_that_fails_with_its_regions_intact_changes_nothing(load_tiny, monkeypatch):
    context = load_tiny("llama-dense").context(n_ctx=64, n_seq_max=2)
    context.decode(Batch(token=[1, 2, 3]))
    context.decode(Batch(token=[4], seq_id=[1]))

    def fail(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: no program")

    with monkeypatch.context() as patch:
        patch.setattr(memory, "copy_cells", fail)
        with pytest.raises(MinferError, match="INTERNAL: no program"):
            context.memory.seq_cp(0, 1)
    assert context.memory.lengths == (3, 1) and context.lost == ()
    assert context.history.tokens(1) == [4]
    context.decode(Batch(token=[5], seq_id=[1]))
    assert close(context.logits(), alone(load_tiny("llama-dense"), [4, 5])[-1])


def test_rows_of_several_sequences(load_tiny):
    """A prompt that two share, then each goes its way; in states, too, which are one until then."""
    for name in ("llama-gqa-dense", "mamba-dense"):
        lm = load_tiny(name, n_ubatch=8)
        want = [alone(lm, [*TOKENS[:10], *TOKENS[20 + 5 * s :][:5]]) for s in range(2)]
        context = lm.context(n_ctx=64, n_seq_max=3, kv_unified=True)
        assert context.decode(Batch(token=TOKENS[:10], seq_id=[[0, 2]] * 10)) == 0
        assert context.memory.lengths == (10, 0, 10)
        assert all(cache.streams[0].used == 10 for cache in context.store.caches)
        assert close(context.logits(), want[0][9])
        for i in range(5):
            batch = Batch(token=[TOKENS[25 + i], TOKENS[20 + i]], seq_id=[2, 0], logits=[True] * 2)
            assert context.decode(batch) == 0
            rows = context.all_logits()
            assert close(rows[0], want[1][10 + i]) and close(rows[1], want[0][10 + i])
        with pytest.raises(BatchError, match="sequences 0 and 2, which do not hold the same"):
            context.decode(Batch(token=[1], seq_id=[[0, 2]]))
        assert context.memory.lengths == (15, 0, 15)


def test_rows_of_several_sequences_need_shared_cells(load_tiny):
    context = load_tiny("llama-dense").context(n_ctx=64, n_seq_max=2)
    with pytest.raises(BatchError, match="sequences 0 and 1, which keep their cells apart"):
        context.decode(Batch(token=[1], seq_id=[[0, 1]]))
    assert context.memory.lengths == (0, 0)


def test_keeping_one(load_tiny):
    context = load_tiny("llama-dense").context(n_ctx=96, n_seq_max=3)
    context.decode(Batch(token=[1, 2, 3, 4], seq_id=[0, 1, 2, 1]))
    context.memory.seq_keep(1)
    assert [context.memory.seq_pos_max(s) for s in range(3)] == [-1, 1, -1]
    assert [context.memory.seq_pos_min(s) for s in range(3)] == [-1, 0, -1]
    context.memory.clear()
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
        for call in (lambda: context.decode(Batch(token=[1])), context.memory.clear):
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
    context.memory.clear()


# --- random operations --------------------------------------------------------------------------


class Operations(RuleBasedStateMachine):
    """Random operations on four sequences; each goes on as a fresh context fed its tokens would.

    What a sequence holds is a list of (position, token). It is `plain` as long as it is what such a
    context would hold: nothing has been taken out of its middle or from its beginning.
    """

    make: Callable[[], Context]  # these are set by the test
    judge: Callable[[list[int]], np.ndarray]
    kind: str
    """`kv`, `iswa`, `recurrent` or `hybrid`: what can be gone back to."""
    N_SEQ, N_CTX = 4, 48
    sequence = st.integers(0, N_SEQ - 1)
    position = st.integers(-1, 16)
    token = st.integers(0, 127)

    @initialize(tokens=st.lists(token, min_size=14, max_size=14), n=st.integers(1, 11))
    def start(self, tokens, n):
        self.context = self.make()
        self.memory, self.store = self.context.memory, self.context.store
        self.held: list[list[tuple[int, int]]] = [[] for _ in range(self.N_SEQ)]
        self.plain = [True] * self.N_SEQ
        self.saved: tuple[bytes, list[tuple[int, int]], bool] | None = None
        self.run([((0,), t) for t in tokens[:n]])
        self.run([((1,), t) for t in tokens[n:]])

    # --- what is expected

    def end(self, seq: int) -> int:
        return max((p for p, _ in self.held[seq]), default=-1) + 1

    def set(self, seq: int, held: list[tuple[int, int]], plain: bool):
        self.held[seq], self.plain[seq] = held, plain or not held

    def room(self, seqs: list[tuple[int, ...]]) -> bool:
        """Whether rows of these sequences fit."""
        if self.kind == "recurrent":
            return True
        if self.store.unified:
            return self.store.caches[0].streams[0].used + len(seqs) <= self.N_CTX
        size = self.N_CTX // self.N_SEQ
        named = [seq for row in seqs for seq in row]
        return all(len(h) + named.count(s) <= size for s, h in enumerate(self.held))

    def alike(self, seq: int) -> tuple[int, ...]:
        """Sequences that hold the same as this one: they can share a row."""
        if not self.store.shareable:
            return (seq,)
        same = tuple(s for s in range(self.N_SEQ) if s == seq or self.store.alike(s, seq))
        assert all(self.held[s] == self.held[seq] for s in same)
        return same

    def compare(self, seq: int):
        """The last logits with those of a fresh context."""
        if self.plain[seq]:
            want = self.judge([t for _, t in self.held[seq]])
            assert close(self.context.logits(), want), seq

    # --- operations

    @rule(rows=st.lists(st.tuples(sequence, token), min_size=1, max_size=10))
    def decode(self, rows):
        self.run([((seq,), t) for seq, t in rows])

    @rule(seq=sequence, tokens=st.lists(token, min_size=1, max_size=7))
    def prefill(self, seq, tokens):
        self.run([((seq,), t) for t in tokens])

    @rule(seq=sequence, tokens=st.lists(token, min_size=1, max_size=3))
    def prefill_together(self, seq, tokens):
        """All sequences that hold the same."""
        together = self.alike(seq)
        self.run([(together, t) for t in tokens])

    @rule(seqs=st.permutations(range(N_SEQ)), n=st.integers(1, N_SEQ), token=token)
    def step(self, seqs, n, token):
        """A decode step of some sequences, twice."""
        for i in range(2):
            self.run([((seq,), (token + seq + i) % 128) for seq in seqs[:n]])

    @rule(rows=st.lists(st.tuples(sequence, token), min_size=2, max_size=10), n=st.integers(0, 4))
    def abort(self, rows, n):
        self.run([((seq,), t) for seq, t in rows], abort=n)

    def run(self, together: list[tuple[tuple[int, ...], int]], abort: int = 100):
        """Decode rows, unless they would make a longer sequence than there is a judge for."""
        if max(self.end(s) for s in range(self.N_SEQ)) + len(together) > self.N_CTX:
            return
        before = self.memory.lengths
        asked = iter(range(100))
        code = self.context.decode(
            Batch(token=[t for _, t in together], seq_id=[list(seqs) for seqs, _ in together]),
            abort=lambda: next(asked) >= abort,
        )
        if not self.room([seqs for seqs, _ in together]) and code == 1:
            assert self.memory.lengths == before
        elif code == 2:
            assert self.context.lost == () or self.kind == "iswa"
            for seq in self.context.lost:
                self.set(seq, [], True)
        else:
            assert code == 0
            for seqs, t in together:
                for seq in seqs:
                    self.held[seq].append((self.end(seq), t))
            self.compare(together[-1][0][0])

    @rule(seq=st.integers(-1, N_SEQ - 1), p0=position, p1=position)
    def remove(self, seq, p0, p1):
        self.forget(range(self.N_SEQ) if seq == -1 else [seq], p0, p1, seq)

    @rule(seq=sequence, n=st.integers(1, 4))
    def remove_tail(self, seq, n):
        self.forget([seq], max(0, self.end(seq) - n), -1, seq)

    @rule(seq=sequence, p0=position, n=st.integers(1, 4))
    def remove_middle(self, seq, p0, n):
        p0 = p0 % max(self.end(seq), 1)
        self.forget([seq], p0, p0 + n, seq)

    def forget(self, seqs, p0, p1, asked):
        kept = [[x for x in self.held[s] if not within(x[0], p0, p1)] for s in seqs]
        changes = [k != self.held[s] for s, k in zip(seqs, kept, strict=True)]
        ok = self.memory.seq_rm(asked, p0, p1)
        if self.kind == "kv":
            assert ok
        elif self.kind != "iswa" and ok and not self.store.plan.recurrent.n_snapshots:
            assert not any(k and c for k, c in zip(kept, changes, strict=True))
        if p0 <= 0 and p1 < 0:
            assert ok
        for s, k, changed in zip(seqs, kept, changes, strict=True):
            if ok and changed:
                self.set(s, k, self.plain[s] and k == self.held[s][: len(k)])

    @rule(source=sequence, to=sequence, p0=st.sampled_from([-1, 0, 0, 0, 3]), p1=position)
    def copy(self, source, to, p0, p1):
        part = [x for x in self.held[source] if within(x[0], p0, p1)]
        ok = self.memory.seq_cp(source, to, p0, p1)
        if source == to or max(p0, 0) >= (p1 if p1 >= 0 else 99):
            assert ok
            return
        whole = part == self.held[source]
        assert ok or (self.kind != "kv" and (not whole or p0 > 0))
        if self.kind in ("recurrent", "hybrid"):
            assert ok == whole or (p0 > 0)
        if ok:
            start = part == self.held[source][: len(part)]
            self.set(to, part, self.plain[source] and start)

    @rule(seq=sequence, delta=st.integers(-5, 5))
    def shift(self, seq, delta):
        """A whole sequence: rotations are relative, so it goes on as before."""
        lowest = min((p for p, _ in self.held[seq]), default=0)
        delta = max(delta, -lowest)
        if self.store.shared(seq, 0, 1 << 31):
            return
        assert self.memory.seq_add(seq, 0, -1, delta)
        self.held[seq] = [(p + delta, t) for p, t in self.held[seq]]

    @rule(seq=sequence, keep=st.booleans())
    def keep_or_defrag(self, seq, keep):
        (self.keep if keep else self.defrag)(seq)

    def keep(self, seq):
        self.memory.seq_keep(seq)
        for s in range(self.N_SEQ):
            if s != seq:
                self.set(s, [], True)

    def defrag(self, _):
        self.memory.defrag()

    @rule(seq=sequence)
    def save(self, seq):
        self.saved = self.context.state_save(seq), list(self.held[seq]), self.plain[seq]

    @rule(seq=sequence)
    def load(self, seq):
        if self.saved is None:
            return
        data, held, plain = self.saved
        try:
            self.context.state_load(data, seq)
        except StateError:
            assert self.store.caches and self.store.unified
            return
        self.set(seq, list(held), plain)

    @rule(seq=sequence, token=token)
    def fail(self, seq, token):
        """A step fails with the regions: what can be is evaluated again."""
        if not self.room([(seq,)]):
            return
        logs = {s: self.context.history.tokens(s) for s in range(self.N_SEQ) if self.held[s]}
        with pytest.raises(MinferError, match="out of memory"):
            decode_and_fail(self.context, Batch(token=[token], seq_id=[seq]))
        spoiled = {s for s, log in logs.items() if log is None}
        assert set(self.context.lost) >= spoiled
        if self.kind != "hybrid" or not self.store.unified:  # there, all may not fit at once
            assert set(self.context.lost) == spoiled
        for s in self.context.lost:
            self.set(s, [], True)

    def teardown(self):
        if not hasattr(self, "saved"):
            return
        assert self.memory.lengths == tuple(self.end(s) for s in range(self.N_SEQ))
        for seq in range(self.N_SEQ):
            if self.held[seq] and self.context.decode(Batch(token=[7], seq_id=[seq])) == 0:
                self.held[seq].append((self.end(seq), 7))
                self.compare(seq)
        self.memory.seq_rm(-1)
        assert all(cells.used == 0 for cache in self.store.caches for cells in cache.streams)


def within(p: int, p0: int, p1: int) -> bool:
    return p >= p0 and (p1 < 0 or p < p1)


def decode_and_fail(context: Context, batch: Batch):
    """Decode; the first step fails as a device does that is out of memory."""
    get, failed = context.graphs.get, []

    def broken(params):
        entry = get(params)

        def fail(weights, regions, *inputs):
            failed.append(True)
            for region in regions:
                region.delete()
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

        if failed:
            return entry
        return dataclasses.replace(entry, compiled=dataclasses.replace(entry.compiled, run=fail))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context.graphs, "get", broken)
        context.decode(batch)


def test_a_prefix_in_common_is_evaluated_and_stored_once_when_regions_are_lost(load_tiny):
    """Otherwise the two would not fit again."""
    lm = load_tiny("llama-gqa-dense")
    context = lm.context(n_ctx=48, n_seq_max=3, kv_unified=True)
    context.decode(Batch(token=TOKENS[:40]))
    context.memory.seq_cp(0, 2)
    context.decode(Batch(token=TOKENS[50:58], seq_id=[0] * 4 + [2] * 4))
    context.memory.seq_rm(2, 43)
    n_p_eval = context.perf().n_p_eval
    with pytest.raises(MinferError, match=r"what the context held was evaluated again$"):
        decode_and_fail(context, Batch(token=[1], seq_id=[1]))
    assert context.lost == () and context.memory.lengths == (44, 0, 43)
    assert context.store.caches[0].streams[0].used == 47
    assert context.perf().n_p_eval == n_p_eval + 47
    context.memory.seq_rm(0, 43)
    context.decode(Batch(token=[9, 8], seq_id=[2, 0], logits=[True, True]))
    for row, last in zip(
        context.all_logits(), ([*TOKENS[54:57], 9], [*TOKENS[50:53], 8]), strict=True
    ):
        assert close(row, alone(lm, [*TOKENS[:40], *last])[-1])


@pytest.fixture(scope="module")
def judge_of(load_tiny) -> Callable[[LanguageModel], Callable[[list[int]], np.ndarray]]:
    """Logits after the last token in a fresh sequence; always of as many rows, so of one graph."""

    def of(lm: LanguageModel) -> Callable[[list[int]], np.ndarray]:
        def logits(tokens: list[int]) -> np.ndarray:
            return lm.logits([*tokens, *[0] * (50 - len(tokens))])[len(tokens) - 1]

        return logits

    return of


def run(make, judge, kind: str, examples: int):
    Operations.make, Operations.judge, Operations.kind = (
        staticmethod(make),
        staticmethod(judge),
        kind,
    )
    run_state_machine_as_test(
        Operations,
        settings=settings(
            max_examples=examples,
            stateful_step_count=16,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "kv_unified", "n_ubatch", "n_snapshots", "examples"),
    [
        ("llama-gqa-dense", "kv", True, 5, 0, 120),
        ("llama-gqa-dense", "kv", False, 16, 0, 80),
        ("llama-gqa-dense", "kv", True, 1, 0, 30),
        ("mamba-dense", "recurrent", False, 6, 0, 40),
        ("rwkv7-head64-dense", "recurrent", False, 4, 2, 30),
        ("lfm2-dense", "hybrid", True, 5, 2, 60),
        ("jamba-dense", "hybrid", False, 3, 0, 40),
        ("deepseek2-moe", "kv", True, 5, 0, 25),
    ],
)
def test_random_operations(
    load_tiny, judge_of, name, kind, kv_unified, n_ubatch, n_snapshots, examples
):
    lm = load_tiny(name, n_ubatch=n_ubatch)
    judge = judge_of(load_tiny(name))

    def make():
        return lm.context(n_ctx=48, n_seq_max=4, kv_unified=kv_unified, n_snapshots=n_snapshots)

    run(make, judge, kind, examples)


@pytest.fixture(scope="module")
def small_window(tmp_path_factory) -> Callable[..., LanguageModel]:
    """Gemma 3 with a window of 4 tokens in one of its two layers."""
    folder = tmp_path_factory.mktemp("window")
    changes = {"gemma3.attention.sliding_window": 4}
    path = write_tiny(read_spec("gemma3-dense"), folder / "model.gguf", kv=changes)

    def lm(**options) -> LanguageModel:
        return load(path, n_ctx=64, exact=True, settings=Settings(home=folder), **options)

    return lm


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_unified", "n_ubatch", "examples"), [(True, 3, 90), (False, 2, 60), (True, 16, 30)]
)
def test_random_operations_with_a_window(
    small_window, judge_of, monkeypatch, kv_unified, n_ubatch, examples
):
    """Blocks of 4 cells, which the masked form can have, make the window roll in 48 cells."""
    lm, judge = small_window(n_ubatch=n_ubatch, flash_attn=False), judge_of(small_window())
    monkeypatch.setattr(plan, "BLOCK", 4)

    def make():
        context = lm.context(n_ctx=48, n_seq_max=4, kv_unified=kv_unified)
        assert context.store.caches[1].spec.window == 4
        return context

    run(make, judge, "iswa", examples)
