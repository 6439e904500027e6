"""`generate`: the loop over a scripted context and tokenizer, and over a tiny real model."""

from types import SimpleNamespace

import numpy as np
import pytest

from minfer_jax import generate as generate_module
from minfer_jax.batch import Batch
from minfer_jax.errors import ContextFullError, SamplingError, UsageError
from minfer_jax.generate import Generation
from minfer_jax.sampling import Sampler, SamplingParams

END, OTHER_END = 0, 1
N_VOCAB = 64
PROMPT = [60, 61, 62]


def generate(*args, in_graph=False, **options):
    """A scripted context has no graphs; real models choose in theirs, too, further below."""
    return generate_module.generate(*args, in_graph=in_graph, **options)


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
    n_vocab = N_VOCAB

    def __init__(self, pieces):
        self.pieces = pieces

    def piece(self, token_id, special=True):
        if special:  # as the log-probabilities spell tokens
            return self.pieces.get(token_id, b"<%d>" % token_id)
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


# Grammars


class ScriptedConstraint:
    """Allows one set of tokens after the other, and is complete after the last one.

    `events` holds what it was asked, in order.
    """

    def __init__(self, *sets):
        self.sets = list(sets)
        self.accepted = []
        self.events = []

    def prepare(self):
        self.events.append("prepare")

    def allowed(self):
        self.events.append("allowed")
        mask = np.zeros(N_VOCAB, bool)
        mask[list(self.sets[len(self.accepted)])] = True
        return mask

    def accept(self, token):
        assert token in self.sets[len(self.accepted)]
        self.accepted.append(token)

    @property
    def finished(self):
        return len(self.accepted) == len(self.sets)


def constrained(*sets, n_predict=-1, n_ctx=64):
    """Runs to the end; the context, the constraint, what was generated and the text."""
    constraint = ScriptedConstraint(*sets)
    context = ScriptedContext([2, 3, 4, 5, 6], n_ctx=n_ctx)
    decode = context.decode

    def recorded(batch, **options):
        constraint.events.append(f"decode {len(batch.token)}")
        return decode(batch, **options)

    context.decode = recorded
    sampler = Sampler(SamplingParams(temp=0.0), constraint=constraint)
    tokenizer = ScriptedTokenizer({i: b"%c" % (ord("a") + i) for i in range(2, 20)})
    out = Generation()
    pieces = generate(context, tokenizer, PROMPT, sampler, n_predict=n_predict, into=out)
    return SimpleNamespace(context=context, constraint=constraint, out=out, text="".join(pieces))


def test_only_what_the_grammar_allows_is_chosen():
    """The model would say cdefg."""
    run = constrained({2, 9}, {7, 8}, {4, END}, {END, OTHER_END})
    assert (run.text, run.out.finish_reason) == ("che", "stop")
    assert run.constraint.accepted == [*run.out.ids, END]


def test_a_complete_grammar_stops_without_an_end_token_and_without_a_forward():
    run = constrained({7}, {8})
    assert (run.text, run.out.ids, run.out.finish_reason) == ("hi", [7, 8], "stop")
    assert run.context.decoded == [PROMPT, [7]]


def test_a_grammar_that_only_its_mask_shows_to_be_complete():
    """The model has no end token to choose, and would be at a dead end."""

    class Late(ScriptedConstraint):
        @property
        def finished(self):
            return self.events[-1:] == ["prepare"] and super().finished

    constraint, context, out = Late({7}), ScriptedContext([2, 3]), Generation()
    sampler = Sampler(SamplingParams(temp=0.0), constraint=constraint)
    pieces = generate(context, ScriptedTokenizer({7: b"h"}), PROMPT, sampler, n_predict=9, into=out)
    assert ("".join(pieces), out.finish_reason) == ("h", "stop")
    assert context.decoded == [PROMPT, [7]]


def test_a_complete_grammar_as_the_context_is_full_is_a_stop():
    run = constrained({7}, {8}, n_ctx=4)
    assert (run.text, run.out.finish_reason) == ("hi", "stop")
    assert run.context.decoded == [PROMPT, [7]]


def test_a_grammar_of_nothing_stops_at_once():
    run = constrained()
    assert (run.text, run.out.finish_reason, run.context.decoded) == ("", "stop", [PROMPT])


@pytest.mark.parametrize(("n_predict", "reason"), [(0, "length"), (1, "length"), (2, "stop")])
def test_complete_with_the_last_token_allowed_is_a_stop(n_predict, reason):
    run = constrained({7}, {8}, n_predict=n_predict)
    assert (run.text, run.out.finish_reason) == ("hi"[:n_predict], reason)


def test_the_mask_is_prepared_beside_each_forward():
    run = constrained({7}, {8}, {9})
    assert run.constraint.events == [
        *("prepare", "decode 3", "allowed"),
        *("prepare", "decode 1", "allowed"),
        *("prepare", "decode 1", "allowed"),
    ]


def test_a_dead_end_is_loud_and_what_came_before_it_is_out():
    constraint = ScriptedConstraint({7}, set())
    context = ScriptedContext([2, 3])
    sampler = Sampler(SamplingParams(temp=0.0), constraint=constraint)
    out = Generation()
    pieces = generate(context, ScriptedTokenizer({7: b"h"}), PROMPT, sampler, n_predict=9, into=out)
    assert next(pieces) == "h"
    with pytest.raises(SamplingError):
        next(pieces)
    assert (out.ids, out.finish_reason) == ([7], None)


def test_a_dead_end_lets_held_text_go_first():
    """But no part of a character: U+FFFD is not what the grammar allowed."""
    sampler = Sampler(SamplingParams(temp=0.0), constraint=ScriptedConstraint({7}, {8}, set()))
    tokenizer = ScriptedTokenizer({7: b"x", 8: b"#\xf0\x9f"})
    context = ScriptedContext([2, 3, 4])
    pieces = generate(context, tokenizer, PROMPT, sampler, n_predict=9, stop=["#\U0001f600"])
    assert [next(pieces), next(pieces)] == ["x", "#"]
    with pytest.raises(SamplingError):
        next(pieces)


# Log-probabilities


@pytest.mark.parametrize("n", [0, 1, 3])
def test_s10_log_probabilities_at_temperature_0(n):
    """Logits are 0 but for one of 1: the script's."""
    context = ScriptedContext([2, 3, END])
    out = Generation()
    sampler = Sampler(SamplingParams(temp=0.0))
    tokenizer = ScriptedTokenizer({2: b"a", 3: b"\xf0\x9f"})
    pieces = generate(context, tokenizer, PROMPT, sampler, n_predict=9, logprobs=n, into=out)
    "".join(pieces)
    scale = np.log(np.e + N_VOCAB - 1)
    assert [(e.id, e.text) for e in out.logprobs] == [(2, "a"), (3, "\ufffd")]
    assert [e.logprob for e in out.logprobs] == pytest.approx([1 - scale] * 2, abs=1e-12)
    for entry, others in zip(out.logprobs, ([0, 1], [0, 1]), strict=True):
        assert [i for i, *_ in entry.top] == [entry.id, *others][: max(n, 1)]
        assert [value for *_, value in entry.top[1:]] == pytest.approx([-scale] * (n - 1))
    if n == 3:
        assert out.logprobs[0].top[1:] == [(0, "<0>", -scale), (1, "<1>", -scale)]


def test_log_probabilities_are_of_the_raw_logits():
    """A bias makes the choice, and the temperature is high."""
    params = SamplingParams(temp=0.0, logit_bias={5: 9.0})
    context, out = ScriptedContext([2, 3]), Generation()
    tokenizer = ScriptedTokenizer({5: b"x"})
    list(generate(context, tokenizer, PROMPT, Sampler(params), n_predict=1, logprobs=2, into=out))
    (entry,) = out.logprobs
    scale = np.log(np.e + N_VOCAB - 1)
    assert (entry.id, entry.logprob) == (5, pytest.approx(-scale))
    assert [i for i, *_ in entry.top] == [2, 0, 5]


def test_rows_of_logits_without_a_token_have_no_text():
    context, out = ScriptedContext([2, END]), Generation()
    tokenizer = ScriptedTokenizer({2: b"a"})
    tokenizer.n_vocab = N_VOCAB - 1
    sampler = Sampler(SamplingParams(temp=0.0))
    list(generate(context, tokenizer, PROMPT, sampler, n_predict=9, logprobs=64, into=out))
    assert [text for _, text, _ in out.logprobs[0].top][-2:] == ["<62>", ""]


def test_no_log_probabilities_unless_asked():
    assert Run(["a", None]).out.logprobs == []


@pytest.mark.parametrize("n", [-1, 1025, True, 1.5])
def test_a_bad_number_of_log_probabilities_is_refused_before_any_compute(n):
    context = ScriptedContext([2])
    sampler = Sampler(SamplingParams())
    with pytest.raises(UsageError, match="logprobs is"):
        generate(context, ScriptedTokenizer({}), PROMPT, sampler, n_predict=1, logprobs=n)
    assert context.decoded == []


# A real model


class Digits:
    """Any id is its number and a space; none ends a generation unless told."""

    n_vocab = 128

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


def run_tiny(tiny, prompt=TINY_PROMPT, eog=(), context=None, sampling=None, **options):
    out = Generation()
    context = context or tiny.context(n_ctx=40)
    sampler = Sampler(SamplingParams(**(sampling or {"temp": 0.0})), prompt)
    text = "".join(generate(context, Digits(eog), prompt, sampler, into=out, **options))
    return text, out, context


@pytest.mark.parametrize("in_graph", [False, True], ids=["host", "graph"])
def test_greedy_is_the_argmax_of_the_whole_sequences_logits(tiny, tiny_ids, in_graph):
    assert len(set(tiny_ids)) > 2
    text, out, context = run_tiny(tiny, n_predict=12, in_graph=in_graph)
    assert out.ids == tiny_ids
    assert text == "".join(f"{i} " for i in tiny_ids)
    assert (context.perf().n_p_eval, context.perf().n_eval) == (8, 11)
    assert context.memory.n_past() == 8 + 11
    assert out.stats.build_s == context.perf().build_seconds


@pytest.mark.parametrize("in_graph", [False, True], ids=["host", "graph"])
def test_a_continued_context_goes_on_where_it_was(tiny, tiny_ids, in_graph):
    _, _, context = run_tiny(tiny, n_predict=5, in_graph=in_graph)
    _, out, _ = run_tiny(
        tiny, prompt=[tiny_ids[4]], context=context, n_predict=7, in_graph=in_graph
    )
    assert out.ids == tiny_ids[5:]


def test_s04_requests_beside_each_other_draw_what_they_draw_alone(tiny):
    """Two generations in contexts of their own, a token of one and a token of the other."""

    def start(seed):
        sampler = Sampler(SamplingParams(temp=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=seed))
        context = tiny.context(n_ctx=40)
        return generate(context, Digits(), TINY_PROMPT, sampler, n_predict=12)

    alone = [list(start(seed)) for seed in (42, 0)]
    assert alone[0] != alone[1] and alone == [list(start(seed)) for seed in (42, 0)]
    beside = [list(pair) for pair in zip(*zip(start(42), start(0), strict=True), strict=True)]
    assert beside == alone


@pytest.mark.parametrize("in_graph", [False, True], ids=["host", "graph"])
def test_an_end_token_of_a_real_model(tiny, tiny_ids, in_graph):
    end = tiny_ids[5]
    _, out, context = run_tiny(tiny, eog=[end], n_predict=12, in_graph=in_graph)
    n = tiny_ids.index(end)
    assert (out.ids, out.finish_reason) == (tiny_ids[:n], "stop")
    assert (context.perf().n_p_eval, context.perf().n_eval) == (8, n)


@pytest.mark.parametrize("in_graph", [False, True], ids=["host", "graph"])
def test_a_real_context_is_filled_to_its_end(tiny, tiny_ids, in_graph):
    context = tiny.context(n_ctx=16)
    _, out, _ = run_tiny(tiny, context=context, n_predict=-1, in_graph=in_graph)
    assert (out.ids, out.finish_reason) == (tiny_ids[:9], "length")
    assert context.memory.n_past() == context.n_ctx_seq
    assert context.decode(Batch(token=[1])) == 1
