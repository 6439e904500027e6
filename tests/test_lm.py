"""The Python surface on the demo model, and on tiny ones where no text is needed."""

import gc
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from steps import step_of
from tiny_models import golden

import minfer_jax as mj
from minfer_jax.generate import Generation
from minfer_jax.lm import LanguageModel, load
from minfer_jax.sampling.grammar import grammar_spec
from minfer_jax.settings import Settings
from minfer_jax.tokenizer import from_metadata

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def lm(smollm2_path, tmp_path_factory) -> LanguageModel:
    return load(smollm2_path, n_ctx=256, settings=Settings(home=tmp_path_factory.mktemp("home")))


def test_promised_names_and_defaults():
    load_defaults = {k: p.default for k, p in inspect.signature(load).parameters.items()}
    assert load_defaults["n_ctx"] == 2048 and load_defaults["exact"] is False
    defaults = {
        k: p.default for k, p in inspect.signature(LanguageModel.generate).parameters.items()
    }
    assert defaults["n"] == 64 and defaults["template"] is False
    assert {"load", "tokenizer", "MinferError"} <= set(mj.__all__)
    assert all(hasattr(mj, name) for name in mj.__all__)


def test_generate(lm):
    result = lm.generate(PROMPT, n=5)
    assert result.text == " Paris.\n\nThe"
    assert lm.tokenizer.decode(result.ids) == result.text
    assert result.finish_reason == "length"
    assert (result.stats.n_prompt, result.stats.n_generated, result.stats.n_decoded) == (5, 5, 4)


def test_answers_through_the_template(lm):
    result = lm.generate("What is the capital of Japan?", n=32, template=True)
    assert result.text == "The capital of Japan is Tokyo."
    assert result.finish_reason == "stop"


def test_a_second_call_starts_afresh(lm):
    assert lm.generate(PROMPT, n=5).ids == lm.generate(PROMPT, n=5).ids


def test_streamed_text_is_the_generated_text(lm):
    out = Generation()
    pieces = list(lm.stream(PROMPT, n=12, temp=0.9, seed=5, into=out))
    result = lm.generate(PROMPT, n=12, temp=0.9, seed=5)
    assert "".join(pieces) == result.text and len(pieces) > 1
    assert out.ids == result.ids and out.seed == result.seed == 5


def test_a_stream_ends_loudly_when_another_call_takes_the_context(lm):
    first = lm.stream(PROMPT, n=5)
    assert next(first) == " Paris"
    lm.logits([1, 2, 3])
    with pytest.raises(mj.MinferError, match="one stream at a time"):
        next(first)


def test_stop_string(lm):
    result = lm.generate(PROMPT, n=20, stop=["\n\n"])
    assert (result.text, result.finish_reason) == (" Paris.", "stop")


def test_a_drawn_seed_reproduces(lm):
    first = lm.generate(PROMPT, n=8, temp=1.5, seed=-1)
    assert lm.generate(PROMPT, n=8, temp=1.5, seed=first.seed).ids == first.ids


HOT = {"temp": 1.5, "n": 8}


@pytest.mark.parametrize("seed", [42, 0, 2**64 - 1])
def test_s04_the_same_seed_gives_the_same_tokens(lm, seed):
    first = lm.generate(PROMPT, seed=seed, **HOT)
    assert first.seed == seed
    assert lm.generate(PROMPT, seed=seed, **HOT).ids == first.ids


def test_s04_seeds_differ_and_the_default_is_42(lm):
    ids = {seed: tuple(lm.generate(PROMPT, seed=seed, **HOT).ids) for seed in (0, 42, 43, 2**32)}
    assert len(set(ids.values())) == 4
    assert tuple(lm.generate(PROMPT, **HOT).ids) == ids[42]


def test_s04_minus_one_draws_a_seed_each_time_and_tells_it(lm):
    first, second = (lm.generate(PROMPT, seed=-1, **HOT) for _ in range(2))
    assert first.seed != second.seed and first.ids != second.ids
    assert 0 <= first.seed < 2**64


def test_s10_log_probabilities_at_temperature_0(lm):
    """Of the raw logits, at full precision, sorted, the chosen token among them."""
    result = lm.generate(PROMPT, n=3, logprobs=3)
    assert [entry.id for entry in result.logprobs] == result.ids
    context, tokens = lm.context(n_ctx=256), lm.prompt_ids(PROMPT)
    for entry in result.logprobs:
        context.decode(mj.Batch(token=tokens))
        row, tokens = context.logits().astype(np.float64), [entry.id]
        wanted = row - np.logaddexp.reduce(row)
        best = np.argsort(-row, kind="stable")[:3].tolist()
        assert [i for i, *_ in entry.top] == best and entry.id == best[0]
        assert [value for *_, value in entry.top] == pytest.approx(wanted[best].tolist(), abs=1e-9)
        assert entry.logprob == entry.top[0].logprob
        assert entry.text == lm.tokenizer.decode([entry.id])
    assert "".join(entry.text for entry in result.logprobs) == result.text


def test_log_probabilities_do_not_depend_on_the_samplers(lm):
    cold = lm.generate(PROMPT, n=1, logprobs=5).logprobs[0]
    hot = lm.generate(PROMPT, n=1, logprobs=5, temp=3.0, top_k=0, seed=3).logprobs[0]
    assert hot.top[:5] == cold.top
    assert hot.id in [entry.id for entry in hot.top]
    assert lm.generate(PROMPT, n=1).logprobs is None


def test_a_regular_expression(lm):
    result = lm.generate(PROMPT, n=20, regex=" [A-Z]{3}")
    assert re.fullmatch(" [A-Z]{3}", result.text) and result.finish_reason == "stop"


def test_a_grammar_in_gbnf_and_in_lark(lm):
    for asked in ({"grammar": 'root ::= " Rome" | " Berlin"'}, {"lark": 'start: " Rome"'}):
        result = lm.generate(PROMPT, n=20, **asked)
        assert result.text in (" Rome", " Berlin") and result.finish_reason == "stop"


def test_json(lm):
    schema = {
        "type": "object",
        "properties": {"capital": {"enum": ["Rome", "Paris"]}, "year": {"type": "integer"}},
        "required": ["capital", "year"],
        "additionalProperties": False,
    }
    for asked in (schema, json.dumps(schema)):
        result = lm.generate(PROMPT, n=64, json_schema=asked, temp=1.0)
        found = json.loads(result.text)
        assert found.keys() == {"capital", "year"} and found["capital"] in ("Rome", "Paris")
        assert result.finish_reason == "stop"


def test_any_json_object_as_far_as_it_goes(lm):
    assert lm.generate(PROMPT, n=4, json_object=True).text.lstrip().startswith("{")
    spec = grammar_spec(json_object=True)
    assert lm.generate(PROMPT, n=4, grammar=spec).ids == (
        lm.generate(PROMPT, n=4, json_object=True).ids
    )


def test_a_grammar_does_not_last(lm):
    """It is of one request, and starts anew with each."""
    plain = lm.generate(PROMPT, n=5).text
    first = lm.generate(PROMPT, n=20, regex=" [a-z]{5}").text
    assert lm.generate(PROMPT, n=5).text == plain
    assert lm.generate(PROMPT, n=20, regex=" [a-z]{5}").text == first


def test_a_dead_end_stops_loudly_after_a_valid_beginning(lm):
    """The grammar wants one token, which is ruled out."""
    pieces = lm.stream(PROMPT, n=20, grammar='root ::= " ab" <[5]>', logit_bias={5: -np.inf})
    got = []
    with pytest.raises(mj.SamplingError):
        got.extend(pieces)
    assert "".join(got) == " ab"


def test_ignore_eos_and_bias(lm):
    question = "What is the capital of Japan?"
    result = lm.generate(question, n=20, template=True, ignore_eos=True)
    assert (result.finish_reason, result.stats.n_generated) == ("length", 20)
    assert not set(result.ids) & lm.tokenizer.eog
    paris = lm.generate(PROMPT, n=1).ids[0]
    assert lm.generate(PROMPT, n=1, logit_bias={paris: -np.inf}).ids != [paris]
    assert lm.generate(PROMPT, n=2, logit_bias=[(5, 1e3)]).ids == [5, 5]


def test_dry_ends_a_repetition(lm):
    prompt = "one two three four one two three four one two three four one"
    repeated = lm.generate(prompt, n=6).text
    assert repeated.startswith(" two three four")
    assert lm.generate(prompt, n=6, dry_multiplier=5.0).text != repeated


def test_a_plain_generation_needs_nothing_of_grammars(smollm2_path, tmp_path):
    code = (
        "import sys; from pathlib import Path; from minfer_jax.lm import load\n"
        "from minfer_jax.settings import Settings\n"
        "lm = load(sys.argv[1], n_ctx=64, settings=Settings(home=Path(sys.argv[2])))\n"
        "lm.generate('Hi', n=1, temp=0.8, ignore_eos=True, logprobs=1)\n"
        "print('llguidance' in sys.modules, '_grammars' in vars(lm))"
    )
    command = [sys.executable, "-c", code, str(smollm2_path), str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "False False\n"


@pytest.mark.parametrize("in_graph", [False, True], ids=["host", "graph"])
def test_hundred_tokens_build_one_graph_for_prefill_and_one_for_decode(
    smollm2_path, tmp_path, in_graph
):
    lm = load(smollm2_path, n_ctx=160, settings=Settings(home=tmp_path))
    result = lm.generate("Once upon a time there was a", n=100, in_graph=in_graph)
    assert result.stats.n_generated == 100
    reused = lm.counters.reused
    assert lm.counters.built == 2 and (in_graph or reused == 98)
    lm.generate("The second prompt is in the same bucket", n=2, in_graph=in_graph)
    assert (lm.counters.built, lm.counters.reused) == (2, reused + 2)


def test_a_prefill_graph_makes_no_float_copy_of_the_layers(lm):
    """4 MB; accumulators of all layers at once would be 22 MB, their weights as floats 416 MB."""
    lm.generate(PROMPT, n=1)
    (entry,) = [e for e in lm.graphs.entries if e.params.n_tokens == 32 and e.params.n_out == 1]
    assert entry.compiled.run.memory_analysis().temp_size_in_bytes < 10e6


def test_layers_of_equal_shape_are_traced_once(smollm2_path, tmp_path):
    """Through XLA: 30 layers of QKV, output, gate and up, down; the head, in two parts; the last
    layer's FFN again, for one row instead of 32; two products in attention.
    """
    lm = load(smollm2_path, n_ctx=256, settings=Settings(home=tmp_path, kernels="xla"))
    make_step, params, args = step_of(lm.model, 32)
    jaxpr = jax.make_jaxpr(make_step(), static_argnums=0)(params, *args)
    assert str(jaxpr).count("dot_general[") == 4 + 2 + 2 + 2


def test_logits_are_not_held_a_second_time(load_tiny):
    lm = load_tiny("qwen3-dense")

    def held() -> int:
        gc.collect()
        return sum(array.shape == (32, 128) for array in jax.live_arrays())

    before = held()
    assert lm.logits([1, 2, 3]).shape == (3, 128)
    assert held() == before


def test_sampling_parameters_are_data(lm):
    """Seed, temperature and the rest shape no graph; in the graph, only the kind of the chain."""
    lm.generate(PROMPT, n=3, in_graph=False)
    built = lm.counters.built
    lm.generate(
        PROMPT, n=3, temp=0.7, seed=9, top_k=5, repeat_penalty=1.2, mirostat=2, in_graph=False
    )
    assert lm.counters.built == built
    lm.generate(PROMPT, n=3, temp=0.8)
    built = lm.counters.built
    for chain in ({"temp": 1.0}, {"top_k": 5, "top_p": 1.0}, {"min_p": 0.0, "seed": 1 << 60}):
        lm.generate(PROMPT, n=3, **{"temp": 0.7, **chain})
    assert lm.counters.built == built


TOY = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "H", "i", "Hi"],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -2.0, -2.0, -1.0],
    "tokenizer.ggml.add_space_prefix": False,
}
SILENT = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("source", [SILENT, "{{ bos_token }}" + SILENT], ids=["silent", "printing"])
def test_c01_exactly_one_bos_and_no_eos(load_tiny, source, flag):
    metadata = {**TOY, "tokenizer.chat_template": source, "tokenizer.ggml.add_eos_token": True}
    if flag is not None:
        metadata["tokenizer.ggml.add_bos_token"] = flag
    lm = load_tiny("llama-dense")
    lm.__dict__["tokenizer"] = from_metadata(metadata)
    wanted = flag is not False  # an SPM model wants one unless its file says otherwise
    printed = source != SILENT
    assert lm.prompt_ids("Hi", template=True) == ([1, 5] if wanted or printed else [5])
    assert lm.prompt_ids("Hi") == ([1, 5] if wanted else [5])
    assert lm.prompt_ids("<s>Hi") == [1, 5]


def test_ids_may_be_given_for_text(lm):
    ids = lm.tokenizer.encode(PROMPT, add_special=True, parse_special=True)
    assert lm.generate(ids, n=5).ids == lm.generate(PROMPT, n=5).ids


def test_logits_agree_with_greedy_choice(lm):
    ids = lm.prompt_ids(PROMPT)
    logits = lm.logits(ids)
    assert logits.shape == (len(ids), 49152) and logits.dtype == np.float32
    assert lm.generate(PROMPT, n=1).ids == [int(logits[-1].argmax())]


def test_prompts_that_do_not_fit(lm):
    ids = [5] * 256
    with pytest.raises(mj.ContextFullError, match=r"256 tokens .* room for 255"):
        lm.generate(ids)
    assert lm.logits(ids[:1]).shape[0] == 1
    with pytest.raises(mj.ContextFullError, match="257 tokens do not fit into a context of 256"):
        lm.logits([5] * 257)


def test_bad_requests_are_refused_before_any_compute(lm):
    evaluated = lm.counters.reused + lm.counters.built
    for call, error in [
        (lambda: lm.generate(""), mj.UsageError),
        (lambda: lm.generate(PROMPT, n=-2), mj.UsageError),
        (lambda: lm.generate(PROMPT, temp=float("nan")), mj.UsageError),
        (lambda: lm.generate(PROMPT, tmep=0.5), mj.UsageError),
        (lambda: lm.generate(PROMPT, stop=[""]), mj.UsageError),
        (lambda: lm.generate(PROMPT, logprobs=-1), mj.UsageError),
        (lambda: lm.generate(PROMPT, logprobs=True), mj.UsageError),
        (lambda: lm.generate(PROMPT, samplers=["sharpen"]), mj.UsageError),
        (lambda: lm.generate(PROMPT, logit_bias={49152: 1.0}), mj.UsageError),
        (lambda: lm.generate(PROMPT, regex="("), mj.GrammarError),
        (lambda: lm.generate(PROMPT, regex="a", json_object=True), mj.UsageError),
        (lambda: lm.generate(PROMPT, grammar="root = 1"), mj.GrammarError),
        (lambda: lm.generate(PROMPT, json_schema={"type": "strange"}), mj.GrammarError),
        (lambda: lm.generate(PROMPT, json_schema={"$ref": "https://x.org/"}), mj.GrammarError),
        (lambda: lm.generate(PROMPT, stop=""), mj.UsageError),
        (lambda: lm.generate(PROMPT, system="x"), mj.TemplateError),
        (lambda: lm.generate(b"bytes"), mj.UsageError),
        (lambda: lm.generate(None), mj.UsageError),
        (lambda: lm.generate(PROMPT, stop=5), mj.UsageError),
        (lambda: load(lm.path, flash_attn="off"), mj.UsageError),
        (lambda: load(lm.path, exact=1), mj.UsageError),
        (lambda: lm.generate([49152]), mj.BatchError),
        (lambda: lm.generate([-1]), mj.BatchError),
        (lambda: lm.generate([-1]), mj.BatchError),
        (lambda: lm.logits([]), mj.BatchError),
    ]:
        with pytest.raises(error):
            call()
    assert lm.counters.reused + lm.counters.built == evaluated


@pytest.mark.parametrize("bad", [2**40, "a", 1.5, None, True, [1], np.uint64(2**63), -(2**70)])
def test_prompts_of_what_are_no_ids(lm, bad):
    with pytest.raises(mj.BatchError, match=r"token 1 of the prompt is .*; allowed: integers"):
        lm.generate([5, bad], n=1)
    assert lm.prompt_ids(np.array([5, 6], np.uint16)) == [5, 6]


def test_context_is_independent_of_the_scratch_context(lm):
    from minfer_jax.batch import Batch

    context = lm.context(n_ctx=256)
    ids = lm.prompt_ids(PROMPT)
    context.decode(Batch(token=ids))
    lm.generate("Something else entirely", n=3)
    context.decode(Batch(token=lm.generate(PROMPT, n=1).ids))
    assert context.memory.n_past() == len(ids) + 1
    want = lm.generate(PROMPT, n=2).ids[1]
    assert int(context.logits().argmax()) == want


def test_n_ctx_0_is_all_the_model_was_trained_for(load_tiny):
    assert load_tiny("llama-dense", n_ctx=0).n_ctx == 256


def test_a_model_without_a_tokenizer_still_has_logits(load_tiny):
    lm = load_tiny("qwen3-dense")
    tokens, want = golden("qwen3-dense")
    assert np.abs(lm.logits(tokens) - want).max() < 1e-3 * want.std()
    with pytest.raises(mj.TokenizerError, match="'test'"):
        lm.generate("text")


def test_rebuild_trace(load_tiny, capsys):
    load_tiny("llama-dense", rebuild_trace=True).logits([1, 2, 3])
    assert "built because of first: n_tokens=32 n_out=16 gtype=prefill" in capsys.readouterr().err


def test_a_second_model_of_the_file_finds_its_graphs_loaded(smollm2_path, tmp_path):
    """Both kinds are read ahead while it is packed; nothing is traced or compiled."""
    ids = []
    for _ in range(2):
        lm = load(smollm2_path, n_ctx=160, settings=Settings(home=tmp_path))
        ahead = {file.path for file in lm.model._ahead.files}
        ids.append(lm.generate(PROMPT, n=3).ids)
    files = set(tmp_path.rglob("*.graph"))
    assert len(files) == 2 and ahead == files and lm.model._ahead.files == set()
    c = lm.counters
    assert (c.built, c.disk_hits, c.disk_misses, c.trace_seconds) == (2, 2, 0, 0.0)
    assert ids[0] == ids[1]


def test_only_graphs_of_the_form_in_use_are_read_ahead(tiny_path, tmp_path):
    """Those of another form may call kernels that this process does not have."""
    path = tiny_path("llama-gqa-dense")
    ahead = []
    for kernels in ("auto", "xla", "xla"):
        lm = load(path, n_ctx=64, settings=Settings(home=tmp_path, kernels=kernels))
        ahead.append(lm.model._ahead.files)
        lm.logits([1, 2, 3])
    assert [len(files) for files in ahead] == [0, 0, 1]


THREADS = """
import sys
from contextlib import suppress
from pathlib import Path
import minfer_jax.lm
from minfer_jax.device import threads
from minfer_jax.settings import Settings
if sys.argv[2] == "started":
    import jax
    jax.devices()
minfer_jax.lm.load(sys.argv[1], n_ctx=64, settings=Settings(home=Path(sys.argv[3])))
names = []
for task in Path("/proc/self/task").iterdir():
    with suppress(OSError):  # ended meanwhile
        names.append((task / "comm").read_text())
print(threads(), sum(name.startswith("tf_XLAEigen") for name in names))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
@pytest.mark.parametrize("started", ["started", "not yet"])
@pytest.mark.parametrize(
    ("env", "n"),
    [
        ({}, None),
        ({"PJRT_NPROC": "3"}, 3),
        ({"PJRT_NPROC": "three", "NPROC": "5"}, 5),
        ({"PJRT_NPROC": "-1", "NPROC": "5"}, 1),
        ({"PJRT_NPROC": "99999999999"}, None),
    ],
    ids=str,
)
def test_the_environment_has_its_number_of_threads(tiny_path, tmp_path, env, n, started):
    """jax's pool is what `threads` says, which is part of the names of graphs on disk."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("PJRT_NPROC", "NPROC")}
    done = subprocess.run(
        [sys.executable, "-c", THREADS, str(tiny_path("llama-dense")), started, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**inherited, **env},
        timeout=60,
    )
    n = n or len(os.sched_getaffinity(0))
    assert done.stdout.split() == [str(n), str(n)], done.stderr


def test_another_geometry_or_structure_is_another_graph(tiny_path, tmp_path):
    path = tmp_path / "model.gguf"

    def misses(name="llama-dense", *, settings=None, **options) -> int:
        """Graphs that were compiled for one call, of a model that always has the same path."""
        shutil.copy(tiny_path(name), path)
        options = {"n_ctx": 64, "exact": True, **options}
        lm = load(path, settings=settings or Settings(home=tmp_path), **options)
        lm.logits([1, 2, 3])
        return lm.counters.disk_misses

    assert misses() == 1 and misses() == 0
    assert misses(n_ctx=300) == 1
    assert misses(n_ubatch=8) == 1
    assert misses(exact=False) == 1
    assert misses(flash_attn=False) == 1
    assert misses(settings=Settings(home=tmp_path, fuse_qkv=False)) == 1
    assert misses(settings=Settings(home=tmp_path, verify_graph=True)) == 0
    assert misses("qwen3-dense") == 1
    assert misses() == 0


def test_importing_the_package_imports_neither_jax_nor_numpy():
    code = "import sys, minfer_jax; sys.exit(any(m in sys.modules for m in ('jax', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


MEASURE = """
import re, sys, jax
def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
import minfer_jax.lm
jax.block_until_ready(jax.numpy.zeros(1))
before = status("VmRSS")
lm = minfer_jax.lm.load(sys.argv[1], n_ctx=256)
print(status("VmHWM") - before, lm.model.weights.nbytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_while_loading(gemma3_path, tmp_path):
    """Under 1.3 times the file plus the packed weights, over what the process held before."""
    command = [sys.executable, "-c", MEASURE, str(gemma3_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    peak, packed = map(int, result.stdout.split())
    assert packed <= gemma3_path.stat().st_size
    assert packed < peak < 1.3 * gemma3_path.stat().st_size + packed


@pytest.mark.parametrize(
    ("text", "kept"), [("{{ messages }}", True), ("rwkv-world", False), ("", False), (None, False)]
)
def test_a_name_is_no_chat_template(text, kept):
    """It would be rendered as it is, and the prompt forgotten."""
    tok = SimpleNamespace(chat_template=text, bos=None, eos=None)
    template = LanguageModel.chat_template.func(SimpleNamespace(tokenizer=tok))
    assert (template is not None) is kept
