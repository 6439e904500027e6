"""From logits to token ids inside a graph: what a request's chain is to one.

The *kind* of a chain is topology, a static field of a graph; its parameters, its window of recent
tokens and its random numbers are data, one row an output. Pure functions; the host's `Sampler`
stays the owner of what a request remembers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from minfer_jax.errors import UsageError
from minfer_jax.sampling import traced
from minfer_jax.sampling.params import SamplingParams
from minfer_jax.sampling.philox import philox_key
from minfer_jax.sampling.sampler import Sampler
from minfer_jax.sampling.traced import Candidates

_USUAL = ("top_k", "top_p", "min_p", "temperature")
_STEPS = frozenset(("logit_bias", "penalties", "top_k", "top_p", "min_p", "temperature"))
_FLOATS = ("temp", "top_p", "log_min_p", "repeat", "frequency", "presence")
_INTS = ("top_k", "last_n", "key_low", "key_high", "draw")
_DRAW = _INTS.index("draw")
_WIDTHS = (64, 256, 1024)
_WINDOWS = (64, 256, 1024)
_BIASES = (16, 256)
_END_TOKENS = 64  # room for the end tokens of any vocabulary
_HEADS = (256, 2048)  # candidates that top-p looks at before it sorts a vocabulary


@dataclass(frozen=True)
class SamplerKind:
    """Which chain a graph holds. All fields are topology; whoever shares a kind shares a graph."""

    steps: tuple[str, ...]
    """Of logit_bias, penalties, top_k, top_p, min_p, temperature: those that may do something."""
    greedy: bool
    """The highest is taken after the steps; otherwise one is drawn."""
    width: int
    """Candidates that top-k can keep; 0 without it."""
    window: int
    """Room for recent tokens."""
    n_bias: int
    """Room for biases."""


class SampleInputs(NamedTuple):
    """What a graph is fed of n chains of one kind, a row an output."""

    floats: Array | np.ndarray
    """float32 [n, 6]: temperature, top-p, log of min-p, penalties (repeat, frequency, presence)"""
    ints: Array | np.ndarray
    """int32 [n, 5]: top-k, length of the window, the key's low and high word, the draw's number"""
    window: Array | np.ndarray
    """int32 [n, window]: recent tokens, the oldest first, filled up in front with -1"""
    bias_ids: Array | np.ndarray
    """int32 [n, n_bias]: filled up with -1"""
    bias: Array | np.ndarray
    """float32 [n, n_bias]"""


def kind_of(params: SamplingParams, *, n_vocab: int, constrained: bool) -> SamplerKind | None:
    """The kind of these parameters' chain, or None: only the host can do it.

    `constrained`: a grammar or a schema has to be asked before each token.
    """
    p, steps = params, _usual(params)
    if constrained or p.min_keep > 1 or not _STEPS.issuperset(steps):
        return None
    if any(token >= n_vocab for token, _ in p.logit_bias):
        return None  # the host has a line for it
    width = _room(min(p.top_k, n_vocab), _WIDTHS) if "top_k" in steps else 0
    window = _room(p.repeat_last_n, _WINDOWS) if "penalties" in steps else 0
    biases = len(p.logit_bias) + (_END_TOKENS if p.ignore_eos else 0)
    n_bias = _room(biases, _BIASES) if "logit_bias" in steps else 0
    if width is None or window is None or n_bias is None:
        return None
    return SamplerKind(steps, p.greedy, width, window, n_bias)


def _usual(p: SamplingParams) -> tuple[str, ...]:
    """The steps; of a chain in the usual order also cuts that are off and then do nothing, so that
    a top-p of 1 or a temperature of 1 needs no graph of its own."""
    steps = p.steps
    if p.greedy:
        return steps
    first = tuple(step for step in steps if step in ("logit_bias", "penalties"))
    wanted = {*steps, "min_p", "temperature", *(["top_p"] if "top_k" in steps else [])}
    usual = tuple(step for step in _USUAL if step in wanted)
    as_usual = steps == (*first, *(step for step in usual if step in steps))
    return (*first, *usual) if as_usual else steps


def _room(count: int, rooms: tuple[int, ...]) -> int | None:
    """The smallest of `rooms` for `count`; None if there is none, or no bound (-1)."""
    return next((room for room in rooms if 0 <= count <= room), None)


def blank_inputs(kind: SamplerKind, n: int) -> SampleInputs:
    """Inputs of n rows that nobody reads: their shapes and types. Arrays of numpy."""
    return SampleInputs(
        np.zeros((n, len(_FLOATS)), np.float32),
        np.zeros((n, len(_INTS)), np.int32),
        np.full((n, kind.window), -1, np.int32),
        np.full((n, kind.n_bias), -1, np.int32),
        np.zeros((n, kind.n_bias), np.float32),
    )


def inputs_of(samplers: Sequence[Sampler], kind: SamplerKind) -> SampleInputs:
    """What the graph is fed of these samplers, all of `kind`, in this order. Arrays of numpy.

    Raises `UsageError` for more biases than the kind has room for.
    """
    inputs = blank_inputs(kind, len(samplers))
    for i, sampler in enumerate(samplers):
        inputs.floats[i], inputs.ints[i] = _floats(sampler.params), _ints(sampler)
        recent = sampler.window(kind.window) if kind.window else []
        inputs.window[i, kind.window - len(recent) :] = recent
        biases = sampler.bias if kind.n_bias else {}
        if len(biases) > kind.n_bias:
            raise UsageError(f"{len(biases)} tokens have a bias; allowed here: {kind.n_bias}")
        inputs.bias_ids[i, : len(biases)] = list(biases)
        inputs.bias[i, : len(biases)] = list(biases.values())
    return inputs


def _floats(p: SamplingParams) -> tuple[float, ...]:
    on = p.steps  # of those that are off, what does nothing
    log_min_p = math.log(p.min_p) if "min_p" in on and p.min_p > 0.0 else -math.inf
    temp = p.temp if "temperature" in on else 1.0
    top_p = p.top_p if "top_p" in on else 1.0
    return temp, top_p, log_min_p, p.repeat_penalty, p.frequency_penalty, p.presence_penalty


def _ints(sampler: Sampler) -> np.ndarray:
    key, p = philox_key(sampler.seed), sampler.params
    words = np.array([*key, (sampler.draws + 1) & 0xFFFFFFFF], np.uint32).view(np.int32)
    return np.array([p.top_k, p.repeat_last_n, *words], np.int32)


def choose(logits: Array, kind: SamplerKind, inputs: SampleInputs) -> Array:
    """Tokens int32 [n] from logits float32 [n, n_vocab].

    -1 where a logit is not a number or nothing is left to choose from.
    """
    if kind.greedy and not kind.steps:
        return traced.greedy(logits)[:, 0]
    everything, usable = traced.checked(logits)
    token = _run(kind.steps, everything, _Row(kind, inputs, logits.shape[1]))
    return jnp.where(usable, token, traced.NONE)[:, 0]


def advance(inputs: SampleInputs, kind: SamplerKind, ids: Array) -> SampleInputs:
    """The inputs of the next step, after `ids` int32 [n] were chosen."""
    ints, window = jnp.asarray(inputs.ints), jnp.asarray(inputs.window)
    if not kind.greedy:
        ints = ints.at[:, _DRAW].add(np.int32(1))
    if kind.window:
        window = jnp.concatenate([window[:, 1:], ids[:, None]], axis=1)
    return inputs._replace(ints=ints, window=window)


def accept(sampler: Sampler, kind: SamplerKind, token: int) -> None:
    """Tell the host's sampler of a token that the graph chose."""
    sampler.accept(token)
    if not kind.greedy:
        sampler.draws += 1


class _Row:
    """What a row's steps read of the inputs."""

    def __init__(self, kind: SamplerKind, inputs: SampleInputs, n_vocab: int) -> None:
        self.kind, self.inputs, self.n_vocab = kind, inputs, n_vocab

    def column(self, name: str) -> Array:
        """One of `_FLOATS` or `_INTS`: [n, 1]."""
        names, values = (
            (_INTS, self.inputs.ints) if name in _INTS else (_FLOATS, self.inputs.floats)
        )
        i = names.index(name)
        return jnp.asarray(values)[:, i : i + 1]

    def window(self) -> Array:
        """Recent tokens, -1 where the window is shorter than its room."""
        age = np.arange(self.kind.window, 0, -1, dtype=np.int32)[None, :]
        return jnp.where(
            age <= self.column("last_n"), jnp.asarray(self.inputs.window), np.int32(-1)
        )

    def uniform(self) -> Array:
        words = (self.column(name) for name in ("key_low", "key_high", "draw"))
        return traced.uniform(*(lax.bitcast_convert_type(word, jnp.uint32) for word in words))


def _run(steps: tuple[str, ...], c: Candidates, row: _Row) -> Array:
    """Tokens [n, 1] after these steps."""
    if not steps:
        return traced.best(c) if row.kind.greedy else traced.draw(c, row.uniform())
    step, rest = steps[0], steps[1:]
    if step == "top_p":
        return _nucleus(rest, c, row)
    return _run(rest, _step(step, c, row), row)


def _step(step: str, c: Candidates, row: _Row) -> Candidates:
    match step:
        case "logit_bias":
            bias_ids, bias = jnp.asarray(row.inputs.bias_ids), jnp.asarray(row.inputs.bias)
            return traced.logit_bias(c, bias_ids, bias)
        case "penalties":
            names = ("repeat", "frequency", "presence")
            strengths = {name: row.column(name) for name in names}
            return traced.penalties(c, row.window(), row.n_vocab, **strengths)
        case "top_k":
            return traced.top_k(c, row.column("top_k"), row.kind.width)
        case "min_p":
            return traced.min_p(c, row.column("log_min_p"))
        case _:
            return traced.temperature(c, row.column("temp"))


def _nucleus(rest: tuple[str, ...], c: Candidates, row: _Row) -> Array:
    """Top-p and then `rest`. Of a whole vocabulary, a head of it is enough in almost all cases."""
    p = row.column("top_p")
    if c.ids is not None:
        return _run(rest, traced.top_p(traced.in_order(c), p)[0], row)
    total = traced.row_sum(c.weights())

    def within(heads: Sequence[int]) -> Array:
        head, reached = traced.top_p(traced.head(c, heads[0]), p, total)
        if heads[0] >= row.n_vocab:
            return _run(rest, head, row)
        enough = jnp.all(reached)
        return lax.cond(enough, lambda: _run(rest, head, row), lambda: within(heads[1:]))

    return within((*_HEADS, row.n_vocab))
