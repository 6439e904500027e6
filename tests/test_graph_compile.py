"""Compilation of a step: donation, and the check that a builder is a pure function."""

import itertools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.errors import MinferError
from minfer_jax.graph import disk
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


def place(root: Path) -> disk.GraphFile:
    file = disk.graph_file(root, Path("m.gguf"), "prefill", jax.devices()[0], (PARAMS,))
    assert file is not None
    return file


def untraceable():
    raise AssertionError("traced, although it is on the disk")


def test_a_graph_out_of_its_file_is_neither_traced_nor_compiled_and_donates(tmp_path):
    first = compile_step(pure, PARAMS, ARGS, place(tmp_path))
    assert (first.disk_hits, first.disk_misses) == (0, 1) and first.trace_seconds > 0
    again = compile_step(untraceable, PARAMS, ARGS, place(tmp_path))
    assert (again.disk_hits, again.disk_misses, again.trace_seconds) == (1, 0, 0.0)
    weights = (jnp.arange(8.0, dtype=jnp.float32),)
    rows = np.array([[1, 3], [0, 0], [0, 0], [0, 0], [0, 0]], np.int32)
    kv = (jnp.zeros(8, jnp.float32),)
    where = kv[0].unsafe_buffer_pointer()
    logits, new = again.run(weights, kv, rows, rows)
    assert float(logits) == 28.0 * 2
    np.testing.assert_array_equal(new[0], [0, 0, 0, 1, 0, 0, 0, 0])
    assert kv[0].is_deleted() and not weights[0].is_deleted()
    assert new[0].unsafe_buffer_pointer() == where
    assert again.run.as_text() and again.run.memory_analysis().alias_size_in_bytes == 32


def test_without_a_folder_every_graph_is_compiled():
    graph = compile_step(pure, PARAMS, ARGS)
    assert (graph.disk_hits, graph.disk_misses) == (0, 0)


CACHED_BY_JAX = """
import sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1]).parent))
import jax, numpy as np
import test_graph_compile as t
graph = t.compile_step(t.pure, t.PARAMS, t.ARGS, t.place(Path(sys.argv[2])))
print(graph.disk_hits, t.disk.jax_hits() > 0)
f32, i32 = np.zeros(8, np.float32), np.zeros((5, 2), np.int32)
graph.run((f32,), (f32,), i32, i32)[0].block_until_ready()
"""


def test_what_jax_loads_from_a_cache_of_its_own_is_not_written_again(tmp_path):
    """It would load, and then lack functions."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "theirs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def run(folder: str) -> tuple[str, bool]:
        command = [sys.executable, "-c", CACHED_BY_JAX, __file__, str(tmp_path / folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return done.stdout.strip(), any((tmp_path / folder).rglob("*.graph"))

    assert run("one") == ("0 False", True)
    assert run("two") == ("0 True", False)
    assert run("one") == ("1 False", True)


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
