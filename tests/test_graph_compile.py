"""Compilation of a step: donation, and the check that a builder is a pure function."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.errors import MinferError
from minfer_jax.graph.compile import compile_step, verify_structural
from minfer_jax.graph.params import CParams, GraphParams, GType

PARAMS = GraphParams(n_tokens=2, n_out=1, gtype=GType.PREFILL, cparams=CParams(n_ctx=64))
F32 = jax.ShapeDtypeStruct((8,), jnp.float32)
I32 = jax.ShapeDtypeStruct((5, 2), jnp.int32)
ARGS = ((F32,), (F32,), I32, I32)


def pure():
    def step(params, weights, kv, rows, out_rows):
        new = kv[0].at[rows[0]].set(weights[0][:2])
        return jnp.sum(weights[0]) * params.n_tokens, (new,)

    return step


def test_runs_and_donates_only_the_kv():
    graph = compile_step(pure, PARAMS, ARGS)
    weights, kv = (jnp.arange(8.0, dtype=jnp.float32),), (jnp.zeros(8, jnp.float32),)
    rows = np.array([[1, 3], [0, 0], [0, 0], [0, 0], [0, 0]], np.int32)
    logits, new = graph.run(weights, kv, rows, rows)
    assert float(logits) == 28.0 * 2
    np.testing.assert_array_equal(new[0], [0, 0, 0, 1, 0, 0, 0, 0])
    assert kv[0].is_deleted() and not weights[0].is_deleted()
    assert graph.trace_seconds > 0 and graph.compile_seconds > 0


def test_a_pure_builder_passes():
    verify_structural(pure, PARAMS, ARGS)


def test_a_builder_that_reads_outside_state_is_caught():
    calls = itertools.count()

    def impure():
        def step(params, weights, kv, rows, out_rows):
            logits = weights[0]
            for _ in range(next(calls)):
                logits = logits * 2.0
            return logits, kv

        return step

    with pytest.raises(MinferError, match="not a function of its params: equation"):
        verify_structural(impure, PARAMS, ARGS)


def test_a_builder_with_another_constant_is_caught():
    numbers = itertools.count()

    def impure():
        table = np.full(8, next(numbers), np.float32)

        def step(params, weights, kv, rows, out_rows):
            return weights[0] + jnp.asarray(table), kv

        return step

    with pytest.raises(MinferError, match="not a function of its params"):
        verify_structural(impure, PARAMS, ARGS)


def test_the_same_function_object_would_hide_it():
    """Why the check makes a new function for each trace: jax answers from its cache of jaxprs."""
    calls = itertools.count()

    def step(params, weights, kv, rows, out_rows):
        return weights[0] * float(next(calls)), kv

    verify_structural(lambda: step, PARAMS, ARGS)
