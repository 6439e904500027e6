"""`generate`: the loop over a scripted context and tokenizer, and over a tiny real model."""

from types import SimpleNamespace

import numpy as np
import pytest

from minfer_jax.batch import Batch
from minfer_jax.errors import ContextFullError, UsageError
from minfer_jax.generate import Generation, generate
from minfer_jax.sampling import Sampler, SamplingParams

END, OTHER_END = 0, 1
N_VOCAB = 64
PROMPT = [60, 61, 62]


class Clock:
    """Stands for the module `time`; a context moves it."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


class ScriptedContext:
    """After its k-th decode the logits choose the k-th token of a script.

    A decode takes `seconds` on the clock; the first of a size takes `build` more for its graph.
    """

    def __init__(self, script, n_ctx=64, n_past=0, clock=None, seconds=0.5, build=2.0):
        self.script = script
        self.n_ctx = self.n_ctx_seq = self.n_batch = n_ctx
        self.held = n_past
        self.memory = self
        self._perf = SimpleNamespace(build_seconds=7.0)
        self.decoded = []
        self._clock, self._seconds, self._build = clock or Clock(), seconds, build

    def n_past(self):
        return self.held

    def perf(self):
        return self._perf

    def seq_rm(self, seq, p0):
        assert seq == 0 and p0 <= self.held
        self.held = p0

    def decode(self, batch, *, abort=None):
        assert batch.logits is None
        if len(batch.token) > self.n_ctx - self.held:
            return 1
        if abort is not None and abort():
            return 2
        if len(batch.token) not in map(len, self.decoded):
            self._perf.build_seconds += self._build
            self._clock.now += self._build
        self._clock.now += self._seconds
        self.decoded.append(list(batch.token))
        self.held += len(batch.token)
        return 0

    def logits(self):
        row = np.zeros(N_VOCAB, np.float32)
        row[self.script[len(self.decoded) - 1]] = 1
        return row


class ScriptedTokenizer:
    eog = frozenset([END, OTHER_END])

    def __init__(self, pieces):
        self.pieces = pieces

    def piece(self, token_id, special=True):
        assert special is False
        assert token_id not in self.eog
        return self.pieces[token_id]


class Run:
    """A generation of scripted pieces, run to its end. A piece of None is an end token."""

    def __init__(self, pieces, prompt=PROMPT, *, n_predict=-1, stop=(), end=END, **options):
        abort = options.pop("abort", lambda: False)
        pieces = [p.encode() if isinstance(p, str) else p for p in pieces]
        ids = range(2, 2 + len(pieces))
        script = [end if p is None else i for i, p in zip(ids, pieces, strict=True)]
        self.context = ScriptedContext(script, **options)
        self.out = Generation()
        self.chunks = list(
            generate(
                self.context,
                ScriptedTokenizer(dict(zip(ids, pieces, strict=True))),
                prompt,
                Sampler(SamplingParams(temp=0.0, seed=5)),
                n_predict=n_predict,
                stop=stop,
                abort=abort,
                into=self.out,
            )
        )

    @property
    def text(self):
        return "".join(self.chunks)

    @property
    def reason(self):
        return self.out.finish_reason

    @property
    def forwards(self):
        """How many tokens each forward pass took."""
        return [len(tokens) for tokens in self.context.decoded]


# The three gates


@pytest.mark.parametrize("end", [END, OTHER_END])
def test_v08_an_end_token_stops_is_not_printed_and_costs_no_forward(end):
    run = Run(["a", "b", None, "c"], end=end)
    assert (run.chunks, run.reason, run.out.ids) == (["a", "b"], "stop", [2, 3])
    assert run.context.decoded == [PROMPT, [2], [3]]


def test_an_end_token_at_once():
    run = Run([None])
    assert (run.chunks, run.reason, run.out.ids) == ([], "stop", [])
    assert run.context.decoded == [PROMPT]


def test_v08_an_end_token_as_the_last_token_allowed_is_a_stop():
    run = Run(["a", "b", None], n_predict=3)
    assert (run.text, run.reason, run.forwards) == ("ab", "stop", [3, 1, 1])


def test_v08_a_stop_string_stops_and_costs_no_forward():
    run = Run(["alpha", " beta", " gamma", " delta"], stop=["beta gamma"])
    assert (run.chunks, run.reason) == (["alpha", " "], "stop")
    # The token that completes it was generated, but never evaluated.
    assert run.out.ids == [2, 3, 4]
    assert run.context.decoded == [PROMPT, [2], [3]]


@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        ([" Alice", "!", "\n", "x"], ["\n", "Alice:"], " Alice!"),
        (["a", "a", "a", "b", "x"], ["aab"], "a"),
        (["###", "x"], ["###"], ""),
        (["x##y", "z"], ["##"], "x"),
        (["go ", "THE", " END", "x"], ["END", "THE END"], "go "),
    ],
)
def test_v01_text_ends_before_a_stop_string(pieces, stop, text):
    run = Run(pieces, stop=stop)
    assert (run.text, run.reason) == (text, "stop")


def test_v08_a_stop_string_in_the_last_token_allowed_is_a_stop():
    run = Run(["a", "##", "b"], stop=["##"], n_predict=2)
    assert (run.text, run.reason, run.forwards) == ("a", "stop", [3, 1])


@pytest.mark.parametrize(
    ("pieces", "n_predict", "reason"),
    [(["x", "#", None], -1, "stop"), (["x", "#", "y"], 2, "length")],
    ids=["end token", "budget"],
)
def test_v01_held_text_comes_out_if_no_stop_came(pieces, n_predict, reason):
    run = Run(pieces, n_predict=n_predict, stop=["##"])
    assert (run.chunks, run.reason) == (["x", "#"], reason)


@pytest.mark.parametrize("stop", [[""], ["a", ""]])
def test_v01_an_empty_stop_string_is_refused_before_any_compute(stop):
    context = ScriptedContext([2])
    sampler = Sampler(SamplingParams())
    with pytest.raises(UsageError, match="a stop string is empty"):
        generate(context, ScriptedTokenizer({}), PROMPT, sampler, n_predict=1, stop=stop)
    assert context.decoded == []


@pytest.mark.parametrize(
    ("n_predict", "text", "forwards"),
    [(0, "", [3]), (1, "a", [3]), (2, "ab", [3, 1]), (4, "abcd", [3, 1, 1, 1])],
)
def test_v05_the_budget(n_predict, text, forwards):
    run = Run(["a", "b", "c", "d", "e"], n_predict=n_predict)
    assert (run.text, run.reason, run.forwards) == (text, "length", forwards)
    assert len(run.out.ids) == n_predict


def test_v05_minus_one_is_until_the_context_is_full():
    # 13 fit after the prompt; what the last of them leads to needs no place.
    run = Run(list("abcdefghijklmnopq"), n_ctx=16)
    assert (run.text, run.reason) == ("abcdefghijklmn", "length")
    assert run.forwards == [3] + [1] * 13
    assert run.context.held == 16


def test_v05_less_than_minus_one_is_refused():
    context = ScriptedContext([2])
    sampler = Sampler(SamplingParams())
    with pytest.raises(UsageError, match="n_predict is -2"):
        generate(context, ScriptedTokenizer({}), PROMPT, sampler, n_predict=-2)
    assert context.decoded == []


# The prompt and the context


@pytest.mark.parametrize("n_predict", [1, 5])
@pytest.mark.parametrize(("n", "room"), [(1, 16), (7, 10), (8, 9), (9, 8), (15, 2)])
def test_k10_a_prompt_that_fits_gives_at_least_one_token(n, room, n_predict):
    run = Run(["x"] * 20, prompt=[60] * n, n_ctx=16, n_predict=n_predict)
    generated = min(n_predict, room)
    assert (run.text, run.reason) == ("x" * generated, "length")
    assert run.forwards == [n] + [1] * (generated - 1)


@pytest.mark.parametrize("n", [16, 17])
@pytest.mark.parametrize("n_predict", [1, 5])
def test_k10_a_prompt_that_does_not_fit_is_refused_before_any_decode(n, n_predict):
    context = ScriptedContext([2], n_ctx=16)
    sampler = Sampler(SamplingParams())
    with pytest.raises(ContextFullError, match=rf"\b{n} tokens.*\bn_ctx is 16\b"):
        generate(context, ScriptedTokenizer({}), [60] * n, sampler, n_predict=n_predict)
    assert context.decoded == []


def test_k10_what_the_context_holds_counts():
    assert Run(["x"] * 5, prompt=[60] * 5, n_ctx=16, n_past=10).text == "xx"
    context = ScriptedContext([2], n_ctx=16, n_past=10)
    sampler = Sampler(SamplingParams())
    with pytest.raises(ContextFullError, match=r"6 tokens.* room for 5 after the 10 it holds"):
        generate(context, ScriptedTokenizer({}), [60] * 6, sampler, n_predict=1)
    assert context.decoded == []


def test_v07_an_empty_prompt_is_refused_before_any_decode():
    context = ScriptedContext([2])
    with pytest.raises(UsageError, match="the prompt is empty"):
        generate(context, ScriptedTokenizer({}), [], Sampler(SamplingParams()), n_predict=1)
    assert context.decoded == []


def test_nothing_is_computed_before_the_first_piece_is_asked_for():
    context = ScriptedContext([2, END])
    sampler = Sampler(SamplingParams(temp=0.0))
    pieces = generate(context, ScriptedTokenizer({2: b"a"}), PROMPT, sampler, n_predict=9)
    assert context.decoded == []
    assert next(pieces) == "a"
    # Text goes out before the forward pass that follows it.
    assert context.decoded == [PROMPT]
    assert list(pieces) == []
    assert context.decoded == [PROMPT, [2]]


# Abort


def asked(times):
    """False that many times, then True."""
    answers = iter([False] * times)
    return lambda: next(answers, True)


def test_abort_before_the_prompt():
    run = Run(["a", "b"], abort=asked(0))
    assert (run.chunks, run.reason, run.forwards) == ([], "abort", [])


def test_abort_lets_held_text_go():
    run = Run(["x", "#", "y"], stop=["##"], abort=asked(2))
    assert (run.chunks, run.reason) == (["x", "#"], "abort")
    assert run.context.decoded == [PROMPT, [2]]
    assert run.out.ids == [2, 3]


# Characters


@pytest.mark.parametrize(
    ("pieces", "chunks"),
    [
        ([b"\xf0\x9f", b"\x98", b"\x80", None], ["😀"]),
        ([b"\xe6\xad", b"\xaa", None], ["歪"]),
        ([b" \xf0\x9f", b"\x98\x80!", None], [" ", "😀!"]),
        ([b" \xf0\x9f", None], [" ", "\ufffd"]),
        ([b"a", b"\xff", b"b", None], ["a", "\ufffd", "b"]),
        ([b"", b"a", b"", None], ["a"]),
    ],
)
def test_v02_characters_over_several_tokens(pieces, chunks):
    assert Run(pieces).chunks == chunks
    # Held back by a stop string as well.
    assert Run(pieces, stop=["😀😀", "歪x"]).text == "".join(chunks)


def test_v02_a_stop_string_in_a_cut_character():
    run = Run([b"a\xf0\x9f", b"\x98\x80b", "c"], stop=["😀"])
    assert (run.chunks, run.reason) == (["a"], "stop")


# The account of it


def test_counts_and_times(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("minfer_jax.generate.time", clock)
    run = Run(list("abcd"), n_predict=4, clock=clock)
    stats = run.out.stats
    assert (stats.n_prompt, stats.n_generated, stats.n_decoded) == (3, 4, 3)
    # Four passes of half a second; the first of 3 rows and of 1 build a graph in 2 seconds each.
    assert (stats.prefill_s, stats.decode_s, stats.build_s) == (0.5, 1.5, 4.0)
    assert stats.ttft_s == 2.5
    assert (stats.prefill_tps, stats.decode_tps) == (6.0, 2.0)
    assert run.out.seed == 5


def test_the_token_that_ends_it_is_not_counted(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("minfer_jax.generate.time", clock)
    stats = Run(["a", "b", None], clock=clock).out.stats
    assert (stats.n_generated, stats.n_decoded, stats.decode_s) == (2, 2, 1.0)
    stats = Run([None], clock=clock).out.stats
    assert (stats.n_prompt, stats.n_generated, stats.n_decoded, stats.ttft_s) == (3, 0, 0, 0.0)
    assert (stats.prefill_tps, stats.decode_tps) == (6.0, 0.0)


def test_the_sampler_sees_each_token_it_chose():
    # Equal logits throughout: a penalty makes greedy take every token once.
    context = ScriptedContext([2] * 9)
    context.logits = lambda: np.zeros(6, np.float32)
    sampler = Sampler(SamplingParams(temp=0.0, presence_penalty=1.0), [0, 1])
    tokenizer = ScriptedTokenizer({i: b"%d" % i for i in range(2, 6)})
    assert "".join(generate(context, tokenizer, PROMPT, sampler, n_predict=4)) == "2345"


# A real model


class Digits:
    """Any id is its number and a space; none ends a generation unless told."""

    def __init__(self, eog=()):
        self.eog = frozenset(eog)

    def piece(self, token_id, special=True):
        return b"%d " % token_id


TINY_PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def tiny(load_tiny):
    return load_tiny("llama-dense", n_ctx=40)


@pytest.fixture(scope="module")
def tiny_ids(tiny):
    """Greedy tokens by the whole sequence's logits, computed anew for each."""
    ids = list(TINY_PROMPT)
    for _ in range(12):
        ids.append(int(tiny.logits(ids)[-1].argmax()))
    return ids[len(TINY_PROMPT) :]


def run_tiny(tiny, prompt=TINY_PROMPT, eog=(), context=None, **options):
    out = Generation()
    context = context or tiny.context(n_ctx=40)
    sampler = Sampler(SamplingParams(temp=0.0))
    text = "".join(generate(context, Digits(eog), prompt, sampler, into=out, **options))
    return text, out, context


def test_greedy_is_the_argmax_of_the_whole_sequences_logits(tiny, tiny_ids):
    assert len(set(tiny_ids)) > 2
    text, out, context = run_tiny(tiny, n_predict=12)
    assert out.ids == tiny_ids
    assert text == "".join(f"{i} " for i in tiny_ids)
    assert (context.perf().n_p_eval, context.perf().n_eval) == (8, 11)
    assert context.memory.n_past() == 8 + 11
    assert out.stats.build_s == context.perf().build_seconds


def test_a_continued_context_goes_on_where_it_was(tiny, tiny_ids):
    _, _, context = run_tiny(tiny, n_predict=5)
    _, out, _ = run_tiny(tiny, prompt=[tiny_ids[4]], context=context, n_predict=7)
    assert out.ids == tiny_ids[5:]


def test_an_end_token_of_a_real_model(tiny, tiny_ids):
    end = tiny_ids[5]
    _, out, context = run_tiny(tiny, eog=[end], n_predict=12)
    n = tiny_ids.index(end)
    assert (out.ids, out.finish_reason) == (tiny_ids[:n], "stop")
    assert (context.perf().n_p_eval, context.perf().n_eval) == (8, n)


def test_a_real_context_is_filled_to_its_end(tiny, tiny_ids):
    _, out, context = run_tiny(tiny, context=tiny.context(n_ctx=16), n_predict=-1)
    assert (out.ids, out.finish_reason) == (tiny_ids[:9], "length")
    assert context.memory.n_past() == context.n_ctx_seq
    assert context.decode(Batch(token=[1])) == 1
