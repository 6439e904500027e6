"""A context's state as bytes, and back: what `memory.state` is given of a context and gives it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from minfer_jax.device import device_errors
from minfer_jax.memory.state import collect, model_digest, prepare, record
from minfer_jax.memory.state_format import ModelForm, SavedOutputs, decode, encode, model_form

if TYPE_CHECKING:
    from minfer_jax.context import Context


def save(context: Context, seq: int | None, beside: Any) -> bytes:
    """All that a context remembers, or one sequence, and what else its caller wants kept."""
    context.apply_shifts()
    made = context.outputs
    index = np.array(made.index, np.int32)
    outputs = SavedOutputs(made.n_batch, index, made.all(), context.embeddings_only)
    with device_errors("a state could not be saved"):
        state = replace(collect(context.store, context.history, outputs, seq), beside=beside)
        return encode(state, _form(context))


def load(context: Context, data: bytes | bytearray | memoryview, seq: int | None) -> Any:
    """Replace what a context remembers, or one sequence; returns what was saved beside it. Raises
    `StateError`, and nothing has changed, for what is damaged, foreign or too large."""
    state = decode(data, _form(context))
    prepared = prepare(context.store, state, seq)
    with context.changing_regions("a load"):
        context.store.adopt(prepared.write())
        record(context.history, state, seq)
        _take_outputs(context, state.outputs)
    return state.beside


def _form(context: Context) -> ModelForm:
    hp, weights = context.model.hp, context.model.weights
    digest = model_digest(hp, weights.view(weights.leaves))
    return model_form(context.store.plan, digest, n_vocab=hp.n_vocab, n_embd=hp.n_embd)


def _take_outputs(context: Context, saved: SavedOutputs) -> None:
    context.forget_outputs()
    if saved.embeddings == context.embeddings_only:
        rows = saved.rows.astype(np.float32)  # a copy: what was loaded from may go away
        context.outputs.add(saved.index.tolist(), rows, range(len(rows)))
        context.outputs.n_batch = saved.n_batch
