"""Choosing tokens in the graph: what a batch's samplers are to a step, and a loop's steps.

The host's side of `sampling.in_graph`, for `Context`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np

from minfer_jax.batch import DECODE_BUCKETS, CheckedBatch, Ubatch, split_simple
from minfer_jax.errors import BatchError, UsageError
from minfer_jax.graph.inputs import LOOP_ENDS, LOOP_STEPS, LoopInputs, StepInputs
from minfer_jax.sampling import Sampler
from minfer_jax.sampling.in_graph import SampleInputs, accept, blank_inputs, inputs_of, kind_of


class Chooser:
    """The samplers of a batch's outputs, all of one kind."""

    def __init__(self, batch: CheckedBatch, samplers: Sequence[Sampler], n_vocab: int) -> None:
        """Raises `UsageError` unless there is one for each output, each can run in the graph, and
        all are of one kind; `BatchError` if two outputs belong to one sequence."""
        rows = np.flatnonzero(batch.wanted).tolist()
        if len(samplers) != len(rows):
            raise UsageError(f"{len(samplers)} samplers for the {len(rows)} outputs of the batch")
        if len(set(map(id, samplers))) < len(samplers):
            raise UsageError("a sampler stands for two sequences: each needs one of its own")
        seqs = [seq for i in rows for seq in batch.seqs[i]]
        if len(set(seqs)) < len(seqs):
            raise BatchError("tokens are chosen in the graph for one output of a sequence at most")
        kinds = {
            kind_of(s.params, n_vocab=n_vocab, constrained=s.constraint is not None)
            for s in samplers
        }
        if None in kinds:
            raise UsageError("a sampler has a step that only the host can do: see `kind_of`")
        if len(kinds) != 1:
            raise UsageError("the samplers of a batch are of several kinds: see `kind_of`")
        (kind,) = kinds
        assert kind is not None
        self.kind = kind
        self._samplers = dict(zip(rows, samplers, strict=True))

    def inputs(self, index: Iterable[int], rows: Sequence[int], n: int) -> SampleInputs:
        """What a graph of `n` outputs is fed, whose `rows` are the batch's rows `index`; nobody
        reads what it chooses in others."""
        own = inputs_of([self._samplers[i] for i in index], self.kind)
        inputs = blank_inputs(self.kind, n)
        for part, given in zip(inputs, own, strict=True):
            part[list(rows)] = given
        return inputs

    def accept(self, tokens: np.ndarray) -> None:
        """Tokens int32 [steps, n] were chosen, of each row in turn; nothing is behind a -1."""
        for step in tokens.tolist():
            for sampler, token in zip(self._samplers.values(), step, strict=True):
                if token >= 0:
                    accept(sampler, self.kind, token)


def loop_steps(batch: CheckedBatch, n_steps: int, n_ubatch: int) -> list[Ubatch]:
    """The ubatches of a loop: the batch, and then its rows one position further each time.

    Raises `BatchError` for a batch that is no decode step, or too large for a loop.
    """
    if batch.embd is not None:
        raise BatchError("a decode loop begins with tokens, not with embeddings")
    if any(len(row) > 1 for row in batch.seqs) or len(set(batch.seqs)) < len(batch):
        raise BatchError("a decode loop takes one row of each sequence, which no other shares")
    most = min(DECODE_BUCKETS[-1], n_ubatch)
    if len(batch) > most:
        raise BatchError(f"a decode loop takes {most} sequences at most")
    all_wanted = replace(batch, wanted=np.ones(len(batch), bool))
    (first,) = split_simple(all_wanted, most)
    return [replace(first, pos=first.pos + np.int32(i)) for i in range(n_steps)]


def loop_inputs(fed: Sequence[StepInputs], sample: SampleInputs, ends: np.ndarray) -> StepInputs:
    """What a loop is fed: its steps' rows and maps behind one another, with room for LOOP_STEPS."""
    first = fed[0]
    limit = np.asarray(len(fed), np.int32)
    return StepInputs(
        _stacked([step.rows for step in fed]),
        first.out_rows,
        tuple(_stacked(maps) for maps in zip(*(step.maps for step in fed), strict=True)),
        None,
        sample,
        LoopInputs(limit, ends),
    )


def _stacked(arrays: Sequence[np.ndarray]) -> np.ndarray:
    out = np.zeros((LOOP_STEPS, *arrays[0].shape), arrays[0].dtype)
    for i, array in enumerate(arrays):
        out[i] = array
    return out


def loop_ends(ends: Collection[int], n_vocab: int) -> np.ndarray:
    """The tokens that end a loop: int32 [LOOP_ENDS]."""
    if len(ends) > LOOP_ENDS:
        raise UsageError(f"{len(ends)} tokens that end a loop; allowed: {LOOP_ENDS} at most")
    out = np.full(LOOP_ENDS, -1, np.int32)
    for i, token in enumerate(ends):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < n_vocab:
            raise UsageError(f"a token that ends a loop is {token!r}; allowed: 0 to {n_vocab - 1}")
        out[i] = token
    return out
