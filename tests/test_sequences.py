"""Operations on sequences: arguments, and what is left of a sequence in one-layer models."""

import numpy as np
import pytest
from dense_llama import DenseLlama, Entry, write_one_layer
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from minfer_jax.batch import Batch
from minfer_jax.errors import UsageError
from minfer_jax.lm import LanguageModel, load
from minfer_jax.settings import Settings

TOKENS = np.random.default_rng(5).integers(0, 128, 200).tolist()
DENSE = DenseLlama()


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory) -> LanguageModel:
    folder = tmp_path_factory.mktemp("one-layer")
    path = write_one_layer(folder / "model.gguf")
    return load(path, n_ctx=64, exact=True, n_ubatch=4, settings=Settings(home=folder))


def close(got, want, limit=1e-4):
    return np.abs(got - want).max() < limit * want.std()


# --- arguments ----------------------------------------------------------------------------------


def test_sequences_and_positions_are_integers_within_bounds(load_tiny):
    context = load_tiny("llama-dense").context(n_ctx=64, n_seq_max=2)
    memory = context.memory
    assert len(memory) == 2 and memory.can_shift
    for seq in (-2, 2, 2**70):
        with pytest.raises(UsageError, match=r"the sequence is .*; allowed: -1 to 1"):
            memory.seq_rm(seq)
        with pytest.raises(UsageError, match=r"the sequence is .*; allowed: 0 to 1"):
            memory.seq_cp(0, seq)
    for seq in (True, 1.0, None, "0"):
        for call in (memory.seq_rm, memory.seq_keep, memory.n_past, memory.seq_pos_min):
            with pytest.raises(UsageError, match=r"the sequence is .*, not an integer"):
                call(seq)
    for bad in (1.5, True, None, 2**31, "1", -(2**40)):
        with pytest.raises(UsageError, match="p0 is"):
            memory.seq_rm(0, bad)
        with pytest.raises(UsageError, match="p1 is"):
            memory.seq_cp(0, 1, 0, bad)
        with pytest.raises(UsageError, match="delta is"):
            memory.seq_add(0, 0, -1, bad)
    for bad in (0, -1, 1.5, True, None, 2**31):
        with pytest.raises(UsageError, match="the divisor is"):
            memory.seq_div(0, 0, -1, bad)


def test_positions_end_somewhere(load_tiny):
    context = load_tiny("llama-dense").context(n_ctx=64)
    context.decode(Batch(token=[1, 2, 3]))
    with pytest.raises(UsageError, match=r"leads past position 2147483647"):
        context.memory.seq_add(0, 0, -1, 2**31 - 2)
    assert context.memory.seq_add(0, 0, -1, 2**31 - 3)
    assert context.memory.seq_pos_max(0) == 2**31 - 1
    assert context.memory.seq_add(0, 0, -1, -(2**31 - 3)) and context.memory.n_past() == 3


@pytest.mark.parametrize("kv_unified", [True, False])
def test_what_an_empty_range_does(load_tiny, kv_unified):
    """Nothing, in any operation."""
    context = load_tiny("llama-dense").context(n_ctx=64, n_seq_max=2, kv_unified=kv_unified)
    context.decode(Batch(token=TOKENS[:8], seq_id=[0] * 5 + [1] * 3))
    memory = context.memory
    for p0, p1 in ((3, 3), (4, 1), (9, 12), (0, 0)):
        assert memory.seq_rm(0, p0, p1)
        assert memory.seq_add(0, p0, p1, 5) and memory.seq_div(0, p0, p1, 2)
        if p0 >= p1:
            assert memory.seq_cp(0, 1, p0, p1)
    assert memory.lengths == (5, 3)
    assert context.history.tokens(0) == TOKENS[:5]  # still a plain list
    assert memory.seq_cp(0, 1, 9, 12) and memory.lengths == (5, 0)  # which holds nothing there


def test_tokens_that_are_shared_keep_their_positions(load_tiny):
    context = load_tiny("llama-dense").context(n_ctx=64, n_seq_max=2, kv_unified=True)
    context.decode(Batch(token=TOKENS[:6]))
    context.memory.seq_cp(0, 1, 0, 3)
    for call in (
        lambda: context.memory.seq_add(0, 0, -1, 1),
        lambda: context.memory.seq_add(1, 2, 3, 1),
        lambda: context.memory.seq_div(0, 2, 9, 2),
    ):
        with pytest.raises(UsageError, match="are shared with another sequence"):
            call()
    assert context.memory.lengths == (6, 3)
    assert context.memory.seq_add(0, 3, -1, 4)
    assert context.memory.lengths == (10, 3)


# --- what is left, in one layer -----------------------------------------------------------------


def held_by(context, seq=0) -> list[int]:
    return sorted(context.store.caches[0].positions(seq).tolist())


def test_the_dense_model_is_the_model(one_layer):
    """Without holes: `DENSE` against llama.cpp's goldens by way of `logits`."""
    got = one_layer.logits(TOKENS[:9])
    for n in (1, 5, 9):
        assert close(got[n - 1], DENSE.logits(list(enumerate(TOKENS[:n]))), 2e-5)


@pytest.mark.parametrize("kv_unified", [True, False])
def test_a_removal_in_the_middle(one_layer, kv_unified):
    context = one_layer.context(n_ctx=64, n_seq_max=2, kv_unified=kv_unified)
    context.decode(Batch(token=TOKENS[:20]))
    assert context.memory.seq_rm(0, 5, 12) and context.memory.seq_rm(0, 0, 2)
    assert (context.memory.seq_pos_min(0), context.memory.seq_pos_max(0)) == (2, 19)
    held = [(p, t) for p, t in enumerate(TOKENS[:20]) if p in range(2, 5) or p >= 12]
    for i in range(20, 30):
        assert context.decode(Batch(token=[TOKENS[i]], pos=[i])) == 0
        held.append((i, TOKENS[i]))
        assert close(context.logits(), DENSE.logits(held))


@pytest.mark.parametrize("kv_unified", [True, False])
def test_a_copy_from_the_middle(one_layer, kv_unified):
    context = one_layer.context(n_ctx=80, n_seq_max=2, kv_unified=kv_unified)
    context.decode(Batch(token=[1, 2], seq_id=[1, 1]))
    context.decode(Batch(token=TOKENS[:20]))
    assert context.memory.seq_cp(0, 1, 7, 15)
    assert (context.memory.seq_pos_min(1), context.memory.seq_pos_max(1)) == (7, 14)
    context.decode(Batch(token=[99], seq_id=[1]))
    held = [(p, TOKENS[p]) for p in range(7, 15)]
    assert close(context.logits(), DENSE.logits([*held, (15, 99)]))
    context.decode(Batch(token=[98]))
    assert close(context.logits(), DENSE.logits([*enumerate(TOKENS[:20]), (20, 98)]))


def test_dividing_positions(one_layer):
    """As in self-extend: groups of tokens share a position."""
    context = one_layer.context(n_ctx=64)
    context.decode(Batch(token=TOKENS[:16]))
    assert context.memory.seq_div(0, 0, 12, 3) and context.memory.seq_add(0, 12, -1, -8)
    at = [p // 3 if p < 12 else p - 8 for p in range(16)]
    assert held_by(context) == sorted(at) and context.memory.n_past() == 8
    context.decode(Batch(token=[77, 78], logits=[True, True]))
    held = [*zip(at, TOKENS, strict=False), (8, 77)]
    rows = context.all_logits()
    assert close(rows[0], DENSE.logits(held))
    assert close(rows[1], DENSE.logits([*held, (9, 78)]))


def test_tokens_whose_position_would_be_negative_are_forgotten(one_layer):
    context = one_layer.context(n_ctx=64)
    context.decode(Batch(token=TOKENS[:8]))
    assert context.memory.seq_add(0, 0, -1, -5)
    assert held_by(context) == [0, 1, 2]
    context.decode(Batch(token=[9]))
    held = [(p - 5, TOKENS[p]) for p in range(5, 8)]
    assert close(context.logits(), DENSE.logits([*held, (3, 9)]))
    assert context.memory.seq_add(0, 0, -1, -99) and context.memory.n_past() == 0
    context.decode(Batch(token=TOKENS[:2]))
    assert close(context.logits(), DENSE.logits(list(enumerate(TOKENS[:2]))))


def test_defragmenting_changes_where_tokens_lie_and_nothing_else(one_layer):
    context = one_layer.context(n_ctx=64, n_seq_max=3, kv_unified=True)
    for i in range(8):
        context.decode(Batch(token=[TOKENS[i], TOKENS[50 + i]], seq_id=[0, 1]))
    context.memory.seq_rm(0, 2, 4)
    context.memory.seq_add(1, 3, -1, 2)
    context.memory.seq_cp(0, 2)
    built = context.graphs.counters.built
    assert context.memory.defrag() and not context.memory.defrag()
    cells = context.store.caches[0].streams[0]
    assert (cells.pos[:14] >= 0).all() and (cells.pos[14:] < 0).all()
    held = [[], [], []]
    held[0] = [(p, TOKENS[p]) for p in (0, 1, 4, 5, 6, 7)]
    held[1] = [(p if p < 3 else p + 2, TOKENS[50 + p]) for p in range(8)]
    held[2] = held[0]
    for seq in range(3):
        end = held[seq][-1][0] + 1
        assert context.decode(Batch(token=[9], seq_id=[seq])) == 0
        assert close(context.logits(), DENSE.logits([*held[seq], (end, 9)])), seq
    assert context.graphs.counters.built - built <= 2


def test_a_straight_sequence_needs_no_map_again_after_defragmenting(one_layer):
    context = one_layer.context(n_ctx=64, n_seq_max=2, kv_unified=True)
    for i in range(6):
        context.decode(Batch(token=[i, i], seq_id=[0, 1]))
    context.memory.seq_rm(1)
    assert context.memory.defrag()
    context.decode(Batch(token=[9]))
    assert not context.graphs.entries[0].params.cparams.kv_map
    assert context.decode(Batch(token=[1] * 57)) == 0
    assert context.decode(Batch(token=[1])) == 1


class Moves(RuleBasedStateMachine):
    """Any operation on three sequences; what each holds is a list of (position, token, id).

    Judged by the dense model, which keeps what each token, by its id, has stored in every layer.
    """

    lm: LanguageModel  # set by the test
    kv_unified: bool
    N_SEQ, N_CTX = 3, 48
    seq = st.integers(0, N_SEQ - 1)
    pos = st.integers(-1, 18)
    token = st.integers(0, 127)

    @initialize(tokens=st.lists(token, min_size=12, max_size=12))
    def start(self, tokens):
        self.context = self.lm.context(
            n_ctx=self.N_CTX, n_seq_max=self.N_SEQ, kv_unified=self.kv_unified
        )
        self.memory = self.context.memory
        self.held: list[list[tuple[int, int, int]]] = [[] for _ in range(self.N_SEQ)]
        self.n = 0
        self.entries: dict[int, Entry] = {}
        self.decode([(0, t) for t in tokens[:8]] + [(1, t) for t in tokens[8:]])

    def end(self, seq):
        return max((p for p, _, _ in self.held[seq]), default=-1) + 1

    @rule(rows=st.lists(st.tuples(seq, token), min_size=1, max_size=7))
    def decode(self, rows):
        seqs, tokens = zip(*rows, strict=True)
        size = self.N_CTX // self.N_SEQ
        fits = all(len(h) + seqs.count(s) <= size for s, h in enumerate(self.held))
        if self.kv_unified:
            used = len({i for h in self.held for _, _, i in h})
            fits = used + len(rows) <= self.N_CTX
        assert self.context.decode(Batch(token=tokens, seq_id=seqs)) == (0 if fits else 1)
        if not fits:
            return
        for seq, token in rows:
            want = self.feed(seq, token)
        assert close(self.context.logits(), want)

    def feed(self, seq, token):
        """One more token of a sequence: its logits."""
        self.n += 1
        held = [(p, self.entries[i]) for p, _, i in self.held[seq]]
        at, n_layer = self.end(seq), self.lm.model.hp.n_layer
        self.entries[self.n], logits = DENSE.feed(held, at, token, n_layer)
        self.held[seq].append((at, token, self.n))
        return logits

    @rule(seq=seq, p0=pos, p1=pos)
    def remove(self, seq, p0, p1):
        assert self.memory.seq_rm(seq, p0, p1)
        self.held[seq] = [x for x in self.held[seq] if not within(x[0], p0, p1)]

    @rule(source=seq, to=seq, p0=pos, p1=pos)
    def copy(self, source, to, p0, p1):
        assert self.memory.seq_cp(source, to, p0, p1)
        if source == to or max(p0, 0) >= (p1 if p1 >= 0 else 99):
            return
        part = [x for x in self.held[source] if within(x[0], p0, p1)]
        if not self.kv_unified:
            names = range(self.n + 1, self.n + 1 + len(part))
            self.entries |= {n: self.entries[i] for n, (_, _, i) in zip(names, part, strict=True)}
            part = [(p, t, n) for n, (p, t, _) in zip(names, part, strict=True)]
            self.n += len(part)
        self.held[to] = part

    @rule(seq=seq, p0=pos, p1=pos, delta=st.integers(-8, 8))
    def add(self, seq, p0, p1, delta):
        self.move(seq, p0, p1, lambda p: p + delta, lambda: self.memory.seq_add(seq, p0, p1, delta))

    @rule(seq=seq, p0=pos, p1=pos, d=st.integers(1, 3))
    def divide(self, seq, p0, p1, d):
        self.move(seq, p0, p1, lambda p: p // d, lambda: self.memory.seq_div(seq, p0, p1, d))

    def move(self, seq, p0, p1, to, call):
        others = {i for s, h in enumerate(self.held) if s != seq for _, _, i in h}
        shared = any(within(p, p0, p1) and i in others for p, _, i in self.held[seq])
        new = [(to(p) if within(p, p0, p1) else p, t, i) for p, t, i in self.held[seq]]
        if shared and new != self.held[seq]:
            with pytest.raises(UsageError, match="shared"):
                call()
            return
        if shared:
            return
        assert call()
        self.held[seq] = [x for x in new if x[0] >= 0]

    @rule()
    def defrag(self):
        self.memory.defrag()

    @rule(seq=seq)
    def clear(self, seq):
        assert self.memory.seq_rm(seq)
        self.held[seq] = []

    def teardown(self):
        if not hasattr(self, "context"):
            return
        ends = tuple(self.end(s) for s in range(self.N_SEQ))
        assert self.memory.lengths == ends
        for seq, held in enumerate(self.held):
            assert self.memory.seq_pos_min(seq) == min((p for p, _, _ in held), default=-1)
            if held and self.context.decode(Batch(token=[seq], seq_id=[seq])) == 0:
                assert close(self.context.logits(), self.feed(seq, seq)), seq


def within(p: int, p0: int, p1: int) -> bool:
    return p >= p0 and (p1 < 0 or p < p1)


@pytest.mark.slow
@pytest.mark.parametrize("kv_unified", [True, False])
@pytest.mark.parametrize("n_layer", [1, 2])
def test_random_moves(one_layer, load_tiny, n_layer, kv_unified):
    lm = one_layer if n_layer == 1 else load_tiny("llama-gqa-dense", n_ubatch=4)
    Moves.lm, Moves.kv_unified = lm, kv_unified
    run_state_machine_as_test(
        Moves,
        settings=settings(
            max_examples=100,
            stateful_step_count=14,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


# --- shifts of whole sequences, in every family -------------------------------------------------

SHIFTED = [
    "llama-dense",
    "llama-yarn-dense",
    "llama-linear-dense",
    "qwen2-dense",
    "qwen3-dense",
    "gemma2-dense",
    "gemma3-dense",
    "cohere2-dense",
    "deepseek2-moe",
    "granitehybrid-dense",
    "falcon-h1-dense",
    "mamba-dense",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIFTED)
def test_a_sequence_that_moves_as_a_whole_goes_on_as_if_it_had_not(load_tiny, name):
    """Heads are rotated relative to each other: of each style, scaling, and part of a key."""
    lm = load_tiny(name)
    want = lm.logits(TOKENS[:24])
    context = lm.context(n_ctx=64)
    context.decode(Batch(token=TOKENS[:20]))
    memory = context.memory
    assert memory.seq_add(0, 0, -1, 9) and memory.seq_add(0, 0, -1, 30)
    context.decode(Batch(token=TOKENS[20:22]))
    assert memory.seq_add(0, 0, -1, -39)
    assert memory.n_past() == 22
    context.decode(Batch(token=TOKENS[22:24], logits=[True, True]))
    assert close(context.all_logits(), want[22:])
