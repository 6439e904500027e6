"""Products with packed weights against float64, and how little memory they take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from random_blocks import random_blocks

from minfer_jax.gguf import BLOCK_FORMATS, GGMLType, dequantize
from minfer_jax.ops import linear
from minfer_jax.ops.linear import matmul
from minfer_jax.ops.qtensor import QTensor

N_IN = 256
FORMATS = [pytest.param(type_, id=type_.name) for type_ in BLOCK_FORMATS]


def packed(type_, n_out, n_in=N_IN, seed=0):
    """Random blocks with scales near 1/100, and the float64 values they stand for."""
    raw = random_blocks(type_, n_out, n_in, seed)
    planes = {name: jnp.asarray(plane) for name, plane in BLOCK_FORMATS[type_].unpack(raw).items()}
    w = dequantize(raw, type_, n_in).astype(np.float64)
    assert np.isfinite(w).all() and w.std() > 1e-3
    return QTensor(planes, type_, (n_out, n_in)), w


def rows(n, n_in=N_IN):
    return np.random.default_rng(1).normal(size=(n, n_in)).astype(np.float32)


def compiled(exact=True, chunk=linear.CPU_CHUNK):
    return jax.jit(lambda x, w: matmul(x, w, exact=exact, chunk=chunk))


def check(x, w, values, *, exact=True, chunk=linear.CPU_CHUNK):
    out = compiled(exact, chunk)(x, w)
    assert out.dtype == jnp.float32 and out.shape == (len(x), w.shape[0])
    expected = x.astype(np.float64) @ values.T
    # Against the size of the terms: sums may cancel.
    size = np.abs(x).astype(np.float64) @ np.abs(values).T
    assert np.max(np.abs(np.asarray(out, np.float64) - expected) / size) < 1e-6


@pytest.mark.parametrize("type_", FORMATS)
def test_one_row(type_):
    check(rows(1), *packed(type_, 10))


@pytest.mark.parametrize("type_", FORMATS)
def test_many_rows_in_chunks_with_a_short_last_one(type_):
    check(rows(3), *packed(type_, 10), chunk=4 * N_IN)


@pytest.mark.parametrize("n_out", [1, 3, 4, 5, 7, 8, 9, 12])
def test_sizes_around_a_chunk_of_four(n_out):
    chunk = 4 * N_IN + 100
    w, values = packed(GGMLType.Q8_0, n_out)
    check(rows(2), w, values, chunk=chunk)
    jaxpr = jax.make_jaxpr(compiled(chunk=chunk))(rows(2), w)
    assert bool(list(equations(jaxpr, "while"))) == (n_out > 4)
    products = list(equations(jaxpr, "dot_general"))
    assert [eqn.outvars[0].aval.shape for eqn in products] == [(2, min(n_out, 4))]


def test_a_chunk_shorter_than_a_row_is_one_row():
    check(rows(2), *packed(GGMLType.Q4_0, 3), chunk=100)


def test_chunks_compute_what_one_product_does():
    w, _ = packed(GGMLType.Q4_K, 10)
    whole = compiled()(rows(3), w)
    chunked = compiled(chunk=4 * N_IN)(rows(3), w)
    np.testing.assert_allclose(chunked, whole, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("n", [1, 3])
def test_exact_asks_for_full_precision(n):
    w, values = packed(GGMLType.F16, 10)
    for exact, asked in ((True, jax.lax.Precision.HIGHEST), (False, jax.lax.Precision.DEFAULT)):
        jaxpr = jax.make_jaxpr(compiled(exact))(rows(n), w)
        (product,) = equations(jaxpr, "dot_general")
        precision = product.params["precision"]
        assert precision in (asked, (asked, asked)) or (not exact and precision is None)
    check(rows(n), w, values, exact=False)


@pytest.mark.parametrize("type_", [GGMLType.Q4_1, GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.Q6_K])
def test_no_product_holds_the_whole_weight_as_floats(type_):
    n_out, n_in = 4096, 1024
    as_floats = 4 * n_out * n_in
    fmt = BLOCK_FORMATS[type_]
    raw = np.empty((n_out, n_in // fmt.block * fmt.nbytes), np.uint8)
    planes = {k: jax.ShapeDtypeStruct(p.shape, p.dtype) for k, p in fmt.unpack(raw).items()}
    w = QTensor(planes, type_, (n_out, n_in))

    def temp(n):
        lowered = compiled().lower(jax.ShapeDtypeStruct((n, n_in), jnp.float32), w)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temp(1) < as_floats / 16
    chunk, result = 4 * linear.CPU_CHUNK, 4 * 8 * n_out
    assert chunk <= temp(8) < 4 * chunk + 2 * result < as_floats / 2


def equations(jaxpr, name):
    """All equations of one primitive, those within other equations included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == name:
            yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner, name)
