"""Packed matrices: ranges and gathers of rows equal those of the whole matrix, dequantized."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.gguf import BLOCK_FORMATS, GGMLType, dequantize
from minfer_jax.ops.qtensor import QTensor

N_OUT, N_IN = 12, 512
TYPES = [GGMLType.F16, GGMLType.Q8_0, GGMLType.Q4_K]


@pytest.fixture(params=TYPES, ids=lambda type_: type_.name)
def packed(request):
    """A random QTensor and its values, dequantized on the host."""
    fmt = BLOCK_FORMATS[request.param]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (N_OUT, N_IN // fmt.block * fmt.nbytes), np.uint8)
    blocks = raw.view(fmt.layout)
    for name in {"d", "dmin", "values"} & set(fmt.layout.names or ()):
        blocks[name] = rng.normal(size=blocks[name].shape).astype(np.float16)
    planes = {name: jnp.asarray(plane) for name, plane in fmt.unpack(raw).items()}
    return QTensor(planes, fmt.type, (N_OUT, N_IN)), dequantize(raw, fmt.type, N_IN)


def values(x):
    assert x.dtype == jnp.float32
    return np.asarray(x)


def test_the_whole_matrix_as_an_argument_of_a_graph(packed):
    w, expected = packed
    np.testing.assert_array_equal(values(jax.jit(QTensor.dequantize)(w)), expected)


def test_rows(packed):
    w, expected = packed
    ranges = [(0, 1), (3, 7), (11, 12), (0, 11)]
    parts = jax.jit(lambda w: [w.rows(*r) for r in ranges])(w)
    for (start, stop), part in zip(ranges, parts, strict=True):
        assert part.shape == (stop - start, N_IN) and part.type == w.type
        out = values(jax.jit(QTensor.dequantize)(part))
        np.testing.assert_array_equal(out, expected[start:stop])


def test_all_rows_are_the_tensor_itself(packed):
    w, _ = packed
    assert w.rows(0, N_OUT) is w


def test_dynamic_rows(packed):
    w, expected = packed

    traced = []

    @jax.jit
    def part(w, start):
        part = w.dynamic_rows(start, 5)
        traced.append((part.shape, part.type))
        return part.dequantize()

    for start in (0, 3, N_OUT - 5):
        out = values(part(w, jnp.int32(start)))
        np.testing.assert_array_equal(out, expected[start : start + 5])
    assert traced == [((5, N_IN), w.type)]


def test_take(packed):
    w, expected = packed
    ids = np.array([11, 0, 5, 5, 2], np.int32)
    np.testing.assert_array_equal(values(jax.jit(QTensor.take)(w, ids)), expected[ids])


def test_leaves_are_the_planes_and_the_rest_is_static(packed):
    w, _ = packed
    leaves, treedef = jax.tree.flatten(w)
    assert {id(leaf) for leaf in leaves} == {id(plane) for plane in w.planes.values()}
    again = jax.tree.unflatten(treedef, leaves)
    assert (again.type, again.shape) == (w.type, w.shape)
    chex.assert_trees_all_equal(again, w)
    assert treedef != jax.tree.structure(w.rows(0, 4))


def test_another_type_is_another_trace():
    planes = {"d": jnp.ones((2, 1), jnp.float16), "qs": jnp.zeros((2, 1, 32), jnp.int8)}
    q8 = QTensor(planes, GGMLType.Q8_0, (2, 32))
    other = QTensor({"values": jnp.ones((2, 32))}, GGMLType.F32, (2, 32))
    traced = []

    @jax.jit
    def total(w):
        traced.append(w.type)
        return jnp.sum(w.dequantize())

    assert [float(total(w)) for w in (q8, other, q8)] == [0.0, 64.0, 0.0]
    assert traced == [GGMLType.Q8_0, GGMLType.F32]
