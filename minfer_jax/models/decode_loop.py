"""Several decode steps in one graph: each is fed with the tokens that the one before it chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from minfer_jax.graph.inputs import Rows, StepInputs
from minfer_jax.sampling.in_graph import SampleInputs, SamplerKind, advance, choose

Forward = Callable[[Sequence[Array], StepInputs], tuple[Array, Sequence[Array]]]
"""(regions, inputs of one step) -> (logits float32 [n, n_vocab], regions)"""

_TOKEN, _SEQ = Rows._fields.index("token"), Rows._fields.index("seq")


def decode_loop(
    forward: Forward, kind: SamplerKind, regions: Sequence[Array], inputs: StepInputs
) -> tuple[Array, tuple[Array, ...]]:
    """The tokens chosen, int32 [steps + 1, n] whose last row is the number of steps; the regions.

    It ends after the step in which any row's token is an end, or could not be chosen (-1), so that
    all sequences have gone equally far and all that follows is still to be decided.
    """
    loop = inputs.loop
    assert loop is not None
    rows, maps = jnp.asarray(inputs.rows), tuple(jnp.asarray(m) for m in inputs.maps)
    steps, _, n = rows.shape
    real = rows[0, _SEQ] >= np.int32(0)

    def more(carry: tuple) -> Array:
        step, ended = carry[:2]
        return (step < loop.limit) & ~ended

    def body(carry: tuple) -> tuple:
        step, _, token, regions, sample, chosen = carry
        own = lax.dynamic_index_in_dim(rows, step, keepdims=False).at[_TOKEN].set(token)
        here = tuple(lax.dynamic_index_in_dim(m, step, keepdims=False) for m in maps)
        logits, regions = forward(regions, inputs._replace(rows=own, maps=here))
        new = choose(logits, kind, sample)
        at_end = jnp.any(new[:, None] == loop.ends[None, :], axis=1) | (new < np.int32(0))
        chosen = lax.dynamic_update_index_in_dim(chosen, new, step, 0)
        ended = jnp.any(at_end & real)
        fed = jnp.maximum(new, np.int32(0))  # padding goes on, whatever came of it
        return step + np.int32(1), ended, fed, tuple(regions), advance(sample, kind, new), chosen

    sample = SampleInputs(*(jnp.asarray(x) for x in inputs.sample))
    chosen = jnp.full((steps + 1, n), -1, jnp.int32)
    start = (jnp.int32(0), jnp.bool_(False), rows[0, _TOKEN], tuple(regions), sample, chosen)
    step, _, _, regions, _, chosen = lax.while_loop(more, body, start)
    return chosen.at[steps].set(step), tuple(regions)
