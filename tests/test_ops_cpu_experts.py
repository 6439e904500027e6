"""Native products of experts: bit for bit those of each expert's matrix alone with each row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_blocks import random_blocks

from minfer_jax.gguf import BLOCK_FORMATS, GGMLType
from minfer_jax.ops.cpu.library import library
from minfer_jax.ops.cpu.tiled import TiledTensor, experts, linear

N_EXPERT, ROWS, N_IN = 5, 48, 512
TYPES = [pytest.param(type_, id=type_.name) for type_ in BLOCK_FORMATS]

ask = jax.jit(experts, static_argnames=("n_expert", "stride", "gate"))
multiply = jax.jit(linear, static_argnames=("gate",))


def tiled(type_, rows=N_EXPERT * ROWS, n_in=N_IN, seed=0):
    kernels = library()
    assert kernels is not None
    out = np.empty(rows // 16 * kernels.tile_bytes(type_, n_in), np.uint8)
    kernels.pack([random_blocks(type_, rows, n_in, seed)], type_, n_in, out)
    return TiledTensor(jnp.asarray(out), type_, (rows, n_in))


def activations(n, n_in=N_IN):
    return np.random.default_rng(1).normal(size=(n, n_in)).astype(np.float32)


def check(x, ids, parts, stride, gate=None):
    """`parts`: expert 0's matrices within tensors of all experts, and where they begin there."""
    first = [w.rows(start, start + rows) for w, start, rows in parts]
    y = np.asarray(ask(x, ids, first, N_EXPERT, stride, gate=gate))
    assert y.dtype == np.float32 and y.shape == (len(ids), first[0].shape[0])
    share = len(ids) // len(x)
    for i, e in enumerate(ids):
        if not 0 <= e < N_EXPERT:
            assert not y[i].any()
            continue
        own = [w.rows(e * stride + start, e * stride + start + rows) for w, start, rows in parts]
        alone = multiply(x[i // share : i // share + 1], own, gate=gate)
        np.testing.assert_array_equal(y[i], np.asarray(alone)[0])


@pytest.mark.parametrize("type_", TYPES)
def test_every_format(kernels, type_):
    ids = np.array([3, 0, 3, 4], np.int32)
    check(activations(4), ids, [(tiled(type_), 0, ROWS)], ROWS)


@pytest.mark.parametrize("type_", [GGMLType.Q4_K, GGMLType.F16])
@pytest.mark.parametrize("n", [1, 2, 9, 40, 200])
def test_any_number_of_rows_of_an_expert(kernels, type_, n):
    """One expert gets few rows and another one many, which are multiplied in another way."""
    ids = np.random.default_rng(n).choice([1, 1, 1, 1, 3, 4], n).astype(np.int32)
    check(activations(n), ids, [(tiled(type_), 0, ROWS)], ROWS)


@pytest.mark.parametrize("types", [("Q4_K", "Q4_K"), ("Q6_K", "F32"), ("BF16", "Q8_0")])
@pytest.mark.parametrize("n", [1, 30])
@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_gates_of_two_tensors(kernels, types, n, gate):
    parts = [(tiled(GGMLType[name], seed=i), 0, ROWS) for i, name in enumerate(types)]
    ids = np.random.default_rng(n).integers(0, N_EXPERT, 2 * n).astype(np.int32)
    check(activations(n), ids, parts, ROWS, gate)


def test_gates_in_one_tensor(kernels):
    w = tiled(GGMLType.Q5_0, 2 * N_EXPERT * ROWS)
    ids = np.array([2, 0, 4, 1, 2, 2], np.int32)
    check(activations(3), ids, [(w, 0, ROWS), (w, ROWS, ROWS)], 2 * ROWS, "silu")


def test_a_tensor_that_does_not_begin_its_array(kernels):
    w = tiled(GGMLType.Q8_0, 32 + N_EXPERT * ROWS)
    check(
        activations(2),
        np.array([4, 0], np.int32),
        [(w.rows(32, 32 + N_EXPERT * ROWS), 0, ROWS)],
        ROWS,
    )


def test_the_last_tile_of_an_expert_may_be_cut(kernels):
    """Experts begin with a tile each, of which the last rows may be left out."""
    check(activations(2), np.array([4, 1], np.int32), [(tiled(GGMLType.Q8_0), 0, 37)], ROWS)


@pytest.mark.parametrize("stranger", [N_EXPERT, -1, 2**31 - 1, -(2**31)])
def test_an_id_of_no_expert_is_answered_with_zeros(kernels, stranger):
    ids = np.array([stranger, 2, stranger, 2, 0, stranger], np.int32)
    check(activations(3), ids, [(tiled(GGMLType.Q4_0), 0, ROWS)], ROWS)
    check(activations(1), ids[:1], [(tiled(GGMLType.Q4_0), 0, ROWS)], ROWS)


def test_ids_of_no_expert_are_answered_alike(kernels):
    ids = np.array([N_EXPERT, -1, 2, 4, N_EXPERT, -7, 1, N_EXPERT + 3], np.int32)
    check(activations(4), ids, [(tiled(GGMLType.Q4_0), 0, ROWS)], ROWS)


@pytest.mark.parametrize("n", [1, 40])
def test_other_experts_are_not_read(kernels, n):
    """Not even multiplied with zero: theirs are all NaN."""
    w = tiled(GGMLType.F32)
    floats = np.asarray(w.tiles).view(np.float32).reshape(N_EXPERT, -1).copy()
    floats[[0, 1, 3]] = np.nan
    poisoned = TiledTensor(jnp.asarray(floats.reshape(-1).view(np.uint8)), w.type, w.shape)
    ids = np.random.default_rng(n).choice([2, 4], n).astype(np.int32)
    found = ask(activations(n), ids, [poisoned.rows(0, ROWS)], N_EXPERT, ROWS)
    expected = ask(activations(n), ids, [w.rows(0, ROWS)], N_EXPERT, ROWS)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, expected)


def test_nan_activations_reach_their_own_row_only(kernels):
    x = activations(3)
    x[1, 7] = np.nan
    y = np.asarray(
        ask(x, np.array([2, 2, 2], np.int32), [tiled(GGMLType.Q4_K).rows(0, ROWS)], 5, ROWS)
    )
    assert np.isnan(y).all(axis=1).tolist() == [False, True, False]
    assert np.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize(("n_expert", "stride"), [(N_EXPERT + 1, ROWS), (N_EXPERT, ROWS + 16)])
def test_experts_past_the_end_of_an_array_are_refused(kernels, n_expert, stride):
    first = [tiled(GGMLType.Q8_0).rows(0, ROWS)]
    with pytest.raises(jax.errors.JaxRuntimeError, match="experts past the end"):
        ask(activations(1), np.zeros(1, np.int32), first, n_expert, stride).block_until_ready()


def test_ids_that_rows_cannot_share_are_refused(kernels):
    first = [tiled(GGMLType.Q8_0).rows(0, ROWS)]
    with pytest.raises(jax.errors.JaxRuntimeError, match="do not fit each other"):
        ask(activations(2), np.zeros(3, np.int32), first, N_EXPERT, ROWS).block_until_ready()
