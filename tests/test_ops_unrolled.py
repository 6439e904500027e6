"""Weights with output rows innermost: their values bit for bit, their products against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_blocks import random_blocks

from minfer_jax.gguf import BLOCK_FORMATS, GGMLType, dequantize
from minfer_jax.ops import unrolled
from minfer_jax.ops.unrolled import UnrolledTensor, pack

FORMATS = [pytest.param(type_, id=type_.name) for type_ in BLOCK_FORMATS]
QUANTIZED = [pytest.param(t, id=t.name) for t, f in BLOCK_FORMATS.items() if f.block > 1]


def tensor(raws, type_, n_in):
    planes = {name: jnp.asarray(plane) for name, plane in pack(raws, type_).items()}
    return UnrolledTensor(planes, type_, (sum(len(raw) for raw in raws), n_in))


def weight(type_, n_out, n_in=256, seed=0):
    """A packed random matrix and its values, dequantized from the file's blocks."""
    raw = random_blocks(type_, n_out, n_in, seed)
    return tensor([raw], type_, n_in), dequantize(raw, type_, n_in)


def rows(n, n_in=256):
    return np.random.default_rng(1).normal(size=(n, n_in)).astype(np.float32)


def matmul(x, w):
    # A new function each time: jax's cache of traces would hide changed module constants.
    out = jax.jit(lambda x, w: w.matmul(x))(x, w)
    assert out.dtype == jnp.float32 and out.shape == (len(x), w.shape[0])
    return np.asarray(out)


def take(w, ids):
    out = jax.jit(UnrolledTensor.take)(w, np.array(ids, np.int32))
    assert out.dtype == jnp.float32
    return np.asarray(out)


def check(x, w, values):
    values = values.astype(np.float64)
    expected = x.astype(np.float64) @ values.T
    # Against the size of the terms: sums may cancel.
    size = np.abs(x).astype(np.float64) @ np.abs(values).T
    assert np.max(np.abs(matmul(x, w) - expected) / size) < 1e-6


@pytest.mark.parametrize("type_", FORMATS)
def test_taken_rows_are_the_files_values_bit_for_bit(type_):
    first, second = random_blocks(type_, 5, 512), random_blocks(type_, 8, 512, seed=1)
    w = tensor([first, second], type_, 512)
    values = dequantize(np.concatenate([first, second]), type_, 512)
    ids = [12, 0, 4, 5, 5, 11]
    np.testing.assert_array_equal(take(w, ids), values[ids])


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("type_", FORMATS)
def test_products(type_, n):
    check(rows(n, 768), *weight(type_, 33, 768))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("n_out", [1, 7, 65, 1100])
@pytest.mark.parametrize("type_", [GGMLType.Q5_0, GGMLType.Q6_K])
def test_rows_that_are_no_multiple_of_anything(type_, n_out, n):
    n_in = BLOCK_FORMATS[type_].block
    check(rows(n, n_in), *weight(type_, n_out, n_in))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("n_in", [1, 7, 16, 33])
@pytest.mark.parametrize("type_", [GGMLType.F32, GGMLType.F16, GGMLType.BF16])
def test_floats_in_rows_that_are_no_whole_groups(type_, n_in, n):
    w, values = weight(type_, 9, n_in)
    check(rows(n, n_in), w, values)
    np.testing.assert_array_equal(take(w, [8, 1]), values[[8, 1]])


@pytest.mark.parametrize("n_out", [64, 65, 300])
def test_one_row_in_parts(monkeypatch, n_out):
    monkeypatch.setattr(unrolled, "PARTIAL_BYTES", 4 * 16 * 70)  # 70 rows of 16 groups
    check(rows(1), *weight(GGMLType.Q4_K, n_out))


@pytest.mark.parametrize("n_out", [1, 3, 4, 5, 7, 8, 9, 12])
def test_many_rows_in_chunks_of_four(monkeypatch, n_out):
    monkeypatch.setattr(unrolled, "CHUNK", 4 * 256 + 100)
    w, values = weight(GGMLType.Q8_0, n_out)
    check(rows(2), w, values)
    loops = str(jax.make_jaxpr(lambda x, w: w.matmul(x))(rows(2), w)).count("while[")
    assert loops == (n_out > 4)


def test_a_chunk_shorter_than_a_row_is_one_row(monkeypatch):
    monkeypatch.setattr(unrolled, "CHUNK", 100)
    check(rows(2), *weight(GGMLType.Q4_0, 3))


@pytest.mark.parametrize("type_", [GGMLType.F16, GGMLType.Q4_1, GGMLType.Q3_K])
def test_a_range_of_rows_reads_the_same_planes(monkeypatch, type_):
    monkeypatch.setattr(unrolled, "CHUNK", 4 * 256)
    w, values = weight(type_, 20)
    for start, stop in [(0, 1), (3, 14), (19, 20)]:
        view = w.rows(start, stop)
        assert view.shape == (stop - start, 256) and view.planes is w.planes
        for n in (1, 3):
            check(rows(n), view, values[start:stop])
        last = stop - start - 1
        np.testing.assert_array_equal(take(view, [last, 0]), values[[stop - 1, start]])
    inner = w.rows(3, 14).rows(2, 6)
    np.testing.assert_array_equal(take(inner, [0, 3]), values[[5, 8]])


def test_hand_worked_blocks():
    # Q4_0: d = 2, value 0 is 9 - 8, value 16 is 7 - 8, all others 8 - 8.
    raw = np.zeros((1, 18), np.uint8)
    raw[0, :2] = np.array([2.0], np.float16).view(np.uint8)
    raw[0, 2:] = 0x88
    raw[0, 2] = 0x79
    w = tensor([raw], GGMLType.Q4_0, 32)
    expected = np.zeros((1, 32), np.float32)
    expected[0, 0], expected[0, 16] = 2.0, -2.0
    np.testing.assert_array_equal(take(w, [0]), expected)
    x = np.zeros((1, 32), np.float32)
    x[0, 0], x[0, 16] = 3.0, 5.0
    np.testing.assert_array_equal(matmul(x, w), [[-4.0]])


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("type_", QUANTIZED)
def test_zero_scales_are_zeros(type_, n):
    fmt = BLOCK_FORMATS[type_]
    raw = random_blocks(type_, 3, 256)
    for name in fmt.layout.names or ():
        if fmt.layout[name].base == np.float16:
            raw.view(fmt.layout)[name] = 0
    w = tensor([raw], type_, 256)
    np.testing.assert_array_equal(matmul(rows(n), w), np.zeros((n, 3), np.float32))


@pytest.mark.parametrize("n_out", [40, 1100])  # without and with room for more rows
@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("type_", QUANTIZED)
def test_a_damaged_scale_harms_its_own_row(monkeypatch, type_, bad, n_out):
    monkeypatch.setattr(unrolled, "PARTIAL_BYTES", 4 * 16 * 600)  # two parts of 1100 rows
    raw = random_blocks(type_, n_out, 256)
    raw.view(BLOCK_FORMATS[type_].layout)["d"][0, 0] = bad
    w = tensor([raw], type_, 256)
    others = np.arange(n_out) != 0
    values = dequantize(raw, type_, 256)
    np.testing.assert_array_equal(take(w, [6, 8]), values[[6, 8]])
    for n in (1, 2):
        finite = np.isfinite(matmul(rows(n), w))
        assert finite[:, others].all() and not finite[:, 0].any()


def test_planes_are_as_large_as_the_file():
    larger = {GGMLType.Q3_K: 114 / 110, GGMLType.Q4_K: 148 / 144, GGMLType.Q5_K: 180 / 176}
    for type_ in BLOCK_FORMATS:
        raw = random_blocks(type_, 6, 512)
        nbytes = sum(plane.nbytes for plane in pack([raw], type_).values())
        assert nbytes == pytest.approx(raw.nbytes * larger.get(type_, 1.0))


@pytest.mark.parametrize(
    ("n_rows", "stride"), [(1023, 1023), (1024, 1088), (1100, 1216), (1088, 1088), (49152, 49216)]
)
def test_values_of_a_group_lie_an_odd_number_of_cache_lines_apart(n_rows, stride):
    planes = pack([np.zeros((n_rows, 34), np.uint8)], GGMLType.Q8_0)
    shapes = {name: plane.shape for name, plane in planes.items()}
    assert shapes == {"values": (2, 16, stride), "d": (1, stride)}


@pytest.mark.parametrize("type_", FORMATS)
@pytest.mark.parametrize("n", [1, 512])
def test_traces_do_not_depend_on_x64(type_, n):
    w, _ = weight(type_, 1100)

    def trace():
        ids = np.zeros(n, np.int32)
        products = jax.make_jaxpr(lambda x, w: w.matmul(x))(rows(n), w)
        return str(products), str(jax.make_jaxpr(lambda w, ids: w.take(ids))(w, ids))

    with jax.enable_x64(True):
        wide = trace()
    assert wide == trace()


@pytest.mark.parametrize("type_", [GGMLType.Q4_1, GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.Q6_K])
def test_a_product_holds_one_part_at_a_time(monkeypatch, type_):
    monkeypatch.setattr(unrolled, "PARTIAL_BYTES", 1 << 18)
    monkeypatch.setattr(unrolled, "CHUNK", 1 << 16)
    n_out, n_in = 4096, 1024
    fmt = BLOCK_FORMATS[type_]
    planes = pack([np.zeros((n_out, n_in // fmt.block * fmt.nbytes), np.uint8)], type_)
    shapes = {k: jax.ShapeDtypeStruct(p.shape, p.dtype) for k, p in planes.items()}
    view = UnrolledTensor(shapes, type_, (n_out, n_in)).rows(10, n_out)

    def temp(n):
        x = jax.ShapeDtypeStruct((n, n_in), jnp.float32)
        compiled = jax.jit(lambda x, w: w.matmul(x)).lower(x, view).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    floats, result = 4 * n_out * n_in, 4 * n_out
    assert temp(1) < (1 << 18) + 2 * result < floats / 16 / 2
    assert temp(8) < 3 * (4 << 16) + 2 * 8 * result < floats / 8


def test_leaves_are_the_planes_and_the_rest_is_static():
    w, _ = weight(GGMLType.Q4_1, 4)
    leaves, treedef = jax.tree.flatten(w)
    assert {id(leaf) for leaf in leaves} == {id(plane) for plane in w.planes.values()}
    assert jax.tree.unflatten(treedef, leaves) == w
    assert treedef not in (jax.tree.structure(w.rows(0, 3)), jax.tree.structure(w.rows(1, 4)))
    assert jax.tree.structure(w.rows(0, 3)) != jax.tree.structure(w.rows(1, 4))


@pytest.mark.parametrize("n", [1, 3])
def test_rows_from_a_traced_start(n):
    w, values = weight(GGMLType.Q4_K, 100)
    run = jax.jit(lambda x, w, start: w.rows(10, 90).dynamic_rows(start, 33).matmul(x))
    for start in (0, 20, 47):  # the last 33 of the 80 rows
        expected = rows(n) @ values[10 + start : 43 + start].T
        out = np.asarray(run(rows(n), w, np.int32(start)))
        assert out.shape == (n, 33)
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
