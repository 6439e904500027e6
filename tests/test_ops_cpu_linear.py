"""Native products against float64 over int8 activations, which are what the kernels promise."""

from functools import cache

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.quants import dequantize as oracle_dequantize
from random_blocks import random_blocks

from minfer_jax.gguf import BLOCK_FORMATS, GGMLType, dequantize
from minfer_jax.ops.cpu.library import library, n_tiles
from minfer_jax.ops.cpu.tiled import Normed, TiledTensor, add_normed, linear

N_IN = 512
SIZES = (1, 7, 16, 40)
"""Rows of the parts of a call: less than a tile, a tile, and tiles with a rest."""
TYPES = [pytest.param(type_, id=type_.name) for type_ in BLOCK_FORMATS]
FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
MIXED = (GGMLType.Q4_K, GGMLType.F16, GGMLType.Q6_K, GGMLType.Q8_0)
GROUP = 16
"""Activations that share a scale."""
ROUNDING = 5e-6  # of the results' standard deviation: float32 sums in another order

multiply = jax.jit(linear, static_argnames=("gate", "margin"))
gather = jax.jit(lambda table, ids: table.take(ids))


def tiled(type_, *raws, n_in=N_IN):
    """The matrices `raws` one below the other, each from a new tile on."""
    kernels = library()
    assert kernels is not None
    tiles = sum(n_tiles(len(raw)) for raw in raws)
    out = np.empty(tiles * kernels.tile_bytes(type_, n_in), np.uint8)
    kernels.pack(raws, type_, n_in, out)
    n_out = len(raws[0]) if len(raws) == 1 else 16 * tiles
    return TiledTensor(jnp.asarray(out), type_, (n_out, n_in))


def split(raw, n_in=N_IN):
    """A Q8_0 matrix with the lower bits of its quants apart."""
    kernels = library()
    assert kernels is not None
    size = kernels.tile_bytes(GGMLType.Q8_0, n_in, split=True)
    out = np.empty(n_tiles(len(raw)) * size, np.uint8)
    kernels.pack([raw], GGMLType.Q8_0, n_in, out, split=True)
    return TiledTensor(jnp.asarray(out), GGMLType.Q8_0, (len(raw), n_in), split=True)


def values(type_, raw, n_in=N_IN):
    return dequantize(raw, type_, n_in).astype(np.float64)


@cache
def matrix(type_, n_out, n_in=N_IN):
    """A tiled matrix and its values, float64 [n_out, n_in]."""
    raw = random_blocks(type_, n_out, n_in, seed=n_out)
    return tiled(type_, raw, n_in=n_in), values(type_, raw, n_in)


@cache
def matrices(type_):
    parts, w = zip(*(matrix(type_, size) for size in SIZES), strict=True)
    return parts, np.concatenate(w)


def rows(n, n_in=N_IN, seed=1):
    return np.random.default_rng(seed).normal(size=(n, n_in)).astype(np.float32)


def rounded(x):
    """Activations as int8 times the 127th part of the largest of their group: float64."""
    groups = x.reshape(len(x), -1, GROUP)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    assert largest.min() > 0
    quants = np.rint(groups * (np.float32(127) / largest))  # in float32, as the kernels do
    return (quants.astype(np.float64) * (largest.astype(np.float64) / 127)).reshape(x.shape)


def expected(x, w, type_):
    return (x.astype(np.float64) if type_ in FLOATS else rounded(x)) @ w.T


def assert_close(y, reference, tolerance=ROUNDING):
    y = np.asarray(y)
    assert y.dtype == np.float32 and y.shape == reference.shape
    assert np.abs(y - reference).max() < tolerance * reference.std()


def assert_same_bits(a, b):
    """Equal bits, but for NaNs, whose sign and payload mean nothing."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype == np.float32 and a.shape == b.shape
    assert np.all((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b)))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 16, 33])
@pytest.mark.parametrize("type_", TYPES)
def test_products(kernels, type_, n):
    parts, w = matrices(type_)
    x = rows(n)
    assert_close(multiply(x, parts), expected(x, w, type_))


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("n_out", SIZES)
@pytest.mark.parametrize("type_", [GGMLType.F16, GGMLType.Q4_0, GGMLType.Q6_K])
def test_a_part_of_any_size_alone(kernels, type_, n_out, n):
    part, w = matrix(type_, n_out)
    x = rows(n)
    reference = expected(x, matrices(type_)[1], type_).std()
    difference = np.abs(np.asarray(multiply(x, (part,))) - expected(x, w, type_))
    assert difference.shape == (n, n_out) and difference.max() < ROUNDING * reference


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("type_", TYPES)
def test_rows_of_one_block(kernels, type_, n):
    n_in = BLOCK_FORMATS[type_].block
    part, w = matrix(type_, 40, n_in)
    x = rows(n, n_in)
    assert_close(multiply(x, (part,)), expected(x, w, type_))


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("n_in", [7, 40])
@pytest.mark.parametrize("type_", FLOATS)
def test_float_weights_of_any_row_length(kernels, type_, n_in, n):
    part, w = matrix(type_, 17, n_in)
    x = rows(n, n_in)
    assert_close(multiply(x, (part,)), expected(x, w, type_))


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("type_", TYPES)
def test_zero_activations_give_zeros(kernels, type_, n):
    y = np.asarray(multiply(np.zeros((n, N_IN), np.float32), matrices(type_)[0]))
    np.testing.assert_array_equal(y, 0.0)


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("type_", TYPES)
def test_zero_blocks_give_zeros(kernels, type_, n):
    raw = random_blocks(type_, 20, N_IN)
    raw[3:18] = 0
    w = values(type_, raw)
    assert not w[3:18].any()
    y = np.asarray(multiply(rows(n), (tiled(type_, raw),)))
    np.testing.assert_array_equal(y[:, 3:18], 0.0)
    assert_close(y, expected(rows(n), w, type_))


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("type_", TYPES)
def test_a_bad_scale_harms_its_own_column_alone(kernels, type_, bad, n):
    raw = random_blocks(type_, 20, N_IN)
    good = np.asarray(multiply(rows(n), (tiled(type_, raw),)))
    blocks = raw.view(BLOCK_FORMATS[type_].layout)
    if type_ == GGMLType.BF16:
        blocks["bits"][5, -1] = np.array(bad, np.float32).view(np.uint32) >> 16
    else:
        blocks["values" if type_ in FLOATS else "d"][5, -1] = bad
    y = np.asarray(multiply(rows(n), (tiled(type_, raw),)))
    assert not np.isfinite(y[:, 5]).any()
    others = np.arange(20) != 5
    assert_same_bits(y[:, others], good[:, others])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n", [2, 9])
@pytest.mark.parametrize("type_", TYPES)
def test_a_bad_activation_harms_its_own_row_alone(kernels, type_, n, bad):
    parts, w = matrices(type_)
    x = rows(n)
    good = np.asarray(multiply(x, parts))
    x[1, 70] = bad
    y = np.asarray(multiply(x, parts))
    if type_ in FLOATS:  # whose products with an infinity are infinities
        assert_same_bits(y[1], (bad * w[:, 70]).astype(np.float32))
    else:
        assert np.isnan(y[1]).all()
    others = np.arange(n) != 1
    assert_same_bits(y[others], good[others])


@pytest.mark.parametrize("n", [1, 3, 5])
def test_parts_of_several_types(kernels, n):
    pairs = [matrix(type_, size) for type_, size in zip(MIXED, (7, 1, 33, 16), strict=True)]
    x = rows(n)
    y = multiply(x, tuple(part for part, _ in pairs))
    reference = [expected(x, w, type_) for type_, (_, w) in zip(MIXED, pairs, strict=True)]
    assert_close(y, np.concatenate(reference, axis=1))


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("type_", [GGMLType.F32, GGMLType.Q5_1, GGMLType.Q3_K])
def test_parts_of_one_array_begin_at_their_own_tiles(kernels, type_, n):
    raws = [random_blocks(type_, size, N_IN, seed=size) for size in (20, 16, 7)]
    joined = tiled(type_, *raws)
    assert joined.shape == (64, N_IN)
    x = rows(n)
    w = [values(type_, raw) for raw in raws]

    def backwards(x, w):
        return linear(x, [w.rows(48, 55), w.rows(32, 48), w.rows(0, 20)])

    reference = expected(x, np.concatenate(w[::-1]), type_)
    assert_close(jax.jit(backwards)(x, joined), reference)
    (call,) = jax.make_jaxpr(backwards)(x, joined).eqns
    assert len(call.invars) == 2  # the array is handed over once
    # A range of rows of a range of rows.
    y = jax.jit(lambda x, w: linear(x, [w.rows(32, 64).rows(16, 23)]))(x, joined)
    assert_same_bits(y, jax.jit(backwards)(x, joined)[:, :7])


@pytest.mark.parametrize("bad", [33, 64])
def test_rows_past_the_end_are_refused(kernels, bad):
    part, _ = matrix(GGMLType.Q8_0, 20)
    with pytest.raises(jax.errors.JaxRuntimeError, match="past the end"):
        multiply(rows(1), (TiledTensor(part.tiles, part.type, (bad, N_IN)),))


def test_more_parts_than_a_call_takes_are_refused(kernels):
    with pytest.raises(jax.errors.JaxRuntimeError, match="one to eight parts"):
        multiply(rows(1), (matrix(GGMLType.Q8_0, 7)[0],) * 9)


@pytest.mark.parametrize("n_out", [(7, 8), (7,), (7, 7, 7)])
def test_a_gate_takes_two_equal_parts(kernels, n_out):
    parts = tuple(matrix(GGMLType.Q8_0, n)[0] for n in n_out)
    with pytest.raises(jax.errors.JaxRuntimeError, match="two parts of equally many rows"):
        multiply(rows(1), parts, gate="silu")


def test_activations_have_the_length_of_the_rows(kernels):
    part, _ = matrix(GGMLType.Q8_0, 7)
    with pytest.raises(AssertionError):
        multiply(np.zeros((1, N_IN + 32), np.float32), (part,))


def activated(gate, x):
    if gate == "silu":
        return x / (1 + np.exp(-x))
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("gate", ["silu", "gelu"])
@pytest.mark.parametrize("n_out", [7, 16, 40])
@pytest.mark.parametrize("types", [(GGMLType.Q4_1, GGMLType.Q4_1), (GGMLType.Q5_K, GGMLType.F16)])
def test_gates(kernels, types, n_out, gate, n):
    parts, w = zip(*(matrix(type_, n_out) for type_ in types), strict=True)
    x = rows(n) / np.float32(4)
    halves = [expected(x, w[i], types[i]) for i in range(2)]
    reference = activated(gate, halves[0]) * halves[1]
    assert_close(multiply(x, parts, gate=gate), reference, 2 * ROUNDING)


@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_gates_over_their_whole_range(kernels, gate):
    """A unit matrix for a gate and ones to multiply with: the activation itself."""
    n_in = 32
    unit, ones = np.eye(n_in, dtype=np.float32), np.zeros((n_in, n_in), np.float32)
    ones[:, 0] = 1  # times the first activation, which is 1
    parts = tuple(
        tiled(GGMLType.F32, w.view(np.uint8).reshape(n_in, -1), n_in=n_in) for w in (unit, ones)
    )
    x = np.concatenate([np.linspace(-8, 8, 62), np.linspace(-1000, 1000, 62)])
    x = np.insert(x.reshape(4, 31), 0, 1.0, axis=1).astype(np.float32)
    with np.errstate(over="ignore"):
        reference = activated(gate, x.astype(np.float64))
    y = np.asarray(multiply(x, parts, gate=gate))
    # Where the tanh form is a difference of nearly equal numbers, float64 has few digits itself.
    np.testing.assert_allclose(y, reference, rtol=2e-6, atol=1e-9 if gate == "gelu" else 1e-30)


@pytest.mark.parametrize("type_", TYPES)
def test_a_row_has_the_same_bits_in_any_company(kernels, type_):
    parts, _ = matrices(type_)
    x = rows(33)
    alone = np.concatenate([multiply(x[i : i + 1], parts) for i in range(33)])
    for n in (2, 3, 8, 33):
        assert_same_bits(multiply(x[:n], parts), alone[:n])
        assert_same_bits(multiply(x[33 - n :], parts), alone[33 - n :])


@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_a_gated_row_has_the_same_bits_in_any_company(kernels, gate):
    parts = (matrix(GGMLType.Q4_0, 40)[0], matrix(GGMLType.Q6_K, 40)[0])
    x = rows(33)
    alone = np.concatenate([multiply(x[i : i + 1], parts, gate=gate) for i in range(33)])
    for n in (2, 3, 8, 33):
        assert_same_bits(multiply(x[:n], parts, gate=gate), alone[:n])


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("kernels", ["portable"], indirect=True)
def test_variants_agree(kernels, type_, n):
    parts, _ = matrices(type_)
    plain = np.asarray(multiply(rows(n), parts), np.float64)
    for variant in kernels.variants:
        kernels.use(variant)
        assert_close(multiply(rows(n), parts), plain, 1e-5)


@pytest.mark.parametrize("n", [1, 33])
@pytest.mark.parametrize("type_", TYPES)
def test_rounding_of_activations_costs_less_than_a_hundredth(kernels, type_, n):
    parts, w = matrices(type_)
    x = rows(n)
    exact = x.astype(np.float64) @ w.T
    error = np.asarray(multiply(x, parts)) - exact
    assert np.sqrt(np.mean(error**2)) < 0.01 * exact.std()
    assert np.abs(error).max() < 0.08 * exact.std()


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("type_", TYPES)
def test_a_power_of_two_passes_through(kernels, type_, n):
    parts, _ = matrices(type_)
    y = np.asarray(multiply(rows(n), parts))
    for power in (-80, 40):
        factor = np.float32(2.0**power)
        assert_same_bits(multiply(rows(n) * factor, parts), y * factor)


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("size", [1e-35, 1e-38, 1e-42])
@pytest.mark.parametrize("type_", TYPES)
def test_activations_near_nothing_give_nearly_nothing(kernels, type_, size, n):
    parts, w = matrices(type_)
    y = np.asarray(multiply(rows(n) * np.float32(size), parts))
    assert np.isfinite(y).all()
    assert np.abs(y).max() <= 2 * size * np.abs(rows(n).astype(np.float64) @ w.T).max()


@pytest.mark.parametrize("type_", TYPES)
def test_take(kernels, type_):
    raw = random_blocks(type_, 40, N_IN)
    table = tiled(type_, raw)
    ids = np.array([39, 0, 15, 16, 31, 32, 7, 7], np.int32)
    reference = oracle_dequantize(raw, gguf.GGMLQuantizationType(int(type_)))[ids]
    y = np.asarray(gather(table, ids))
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, reference)
    later = jax.jit(lambda table, ids: table.rows(16, 40).take(ids))
    assert_same_bits(later(table, np.array([0, 23], np.int32)), y[[3, 0]])


@pytest.mark.parametrize("type_", TYPES)
def test_take_of_blocks_of_any_bits(kernels, type_):
    fmt = BLOCK_FORMATS[type_]
    shape = (64, N_IN // fmt.block * fmt.nbytes)
    raw = np.random.default_rng(4).integers(0, 256, shape, np.uint8)
    ids = np.arange(64, dtype=np.int32)
    with np.errstate(all="ignore"):
        reference = oracle_dequantize(raw, gguf.GGMLQuantizationType(int(type_)))
    # NaNs at the same places; only a zero may have another sign.
    np.testing.assert_array_equal(gather(tiled(type_, raw), ids), reference)


def test_take_outside_the_table_reads_nothing(kernels):
    table, w = matrix(GGMLType.Q4_0, 20)
    y = gather(table, np.array([-1, 20, 2**31 - 1, -(2**31), 19], np.int32))
    np.testing.assert_array_equal(y, [*np.zeros((4, N_IN)), w[19]])


def normed(x, weight, eps):
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def norm_then_multiply(x, weight, eps, parts):
    return jax.jit(lambda x, weight, parts: linear(Normed(x, weight, eps), parts))(x, weight, parts)


@pytest.mark.parametrize("n", [1, 5, 33])
@pytest.mark.parametrize("n_in", [7, 40, N_IN])
def test_normed_activations(kernels, n_in, n):
    part, w = matrix(GGMLType.F32, 40, n_in)
    x, (weight,) = rows(n, n_in) * np.float32(3), rows(1, n_in, seed=2)
    reference = normed(x, weight, 0.5) @ w.T
    assert np.abs(reference - normed(x, weight, 0.0) @ w.T).max() > 0.01 * reference.std()
    assert_close(norm_then_multiply(x, weight, 0.5, (part,)), reference)


@pytest.mark.parametrize("n", [1, 5, 33])
@pytest.mark.parametrize("types", [(GGMLType.Q4_0,), (GGMLType.Q6_K, GGMLType.F16)])
def test_a_norm_that_is_a_power_of_two_changes_no_bit(kernels, types, n):
    """Rows of 2 and -2, some of which are 0: their mean square plus eps is 4, the factor 1/2."""
    signs = np.sign(rows(n)) * np.float32(2)
    signs[:, ::4] = 0
    (weight,) = rows(1, seed=2)
    parts = tuple(matrix(type_, 40)[0] for type_ in types)
    y = norm_then_multiply(signs, weight, 1.0, parts)
    assert_same_bits(y, multiply(signs / 2 * weight, parts))


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("n_in", [1, 7, 40, N_IN])
def test_adding_a_norm(kernels, n_in, n):
    x, y, (weight,) = rows(n, n_in), rows(n, n_in, seed=3), rows(1, n_in, seed=2)
    out = jax.jit(lambda x, y, weight: add_normed(x, Normed(y, weight, 0.25)))(x, y, weight)
    reference = x.astype(np.float64) + normed(y, weight, 0.25)
    assert out.dtype == np.float32 and out.shape == (n, n_in)
    np.testing.assert_allclose(out, reference, rtol=1e-6, atol=1e-6)


N_HEAD = 2037
"""Rows of a head: 128 tiles, the last of which has five."""
FEW = 3
"""Rows of activations up to which lower bits are left out."""


@cache
def head(scale=1.0, n_out=N_HEAD, n_in=N_IN):
    """A Q8_0 matrix whole and split, and what its upper bits alone stand for, float64."""
    w = np.random.default_rng(5).normal(size=(n_out, n_in)) * scale
    raw = gguf.quants.quantize(w.astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
    raw = np.ascontiguousarray(raw).view(np.uint8)
    blocks = raw.reshape(n_out, -1, 34)
    d = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16).astype(np.float64)
    upper = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8) // 8
    rough = (d * (8 * upper + 3.5)).reshape(n_out, n_in)
    return tiled(GGMLType.Q8_0, raw, n_in=n_in), split(raw, n_in), rough


def tiles_of(flags):
    """[n, N_HEAD] -> [n, tiles]: whether a tile has one that is set."""
    padded = np.pad(flags, ((0, 0), (0, -N_HEAD % 16)))
    return padded.reshape(len(flags), -1, 16).any(axis=-1)


def spread(tiles):
    return np.repeat(tiles, 16, axis=1)[:, :N_HEAD]


@pytest.mark.parametrize("n", [1, 3, 4, 9])
def test_a_split_matrix_has_the_whole_one_s_products(kernels, n):
    whole, parts, _ = head()
    x = rows(n)
    assert_same_bits(multiply(x, (parts,)), multiply(x, (whole,)))


def test_a_split_matrix_has_the_whole_one_s_rows(kernels):
    whole, parts, _ = head()
    ids = np.array([0, 15, 16, 1234, N_HEAD - 1], np.int32)
    assert_same_bits(gather(parts, ids), gather(whole, ids))


@pytest.mark.parametrize("n", range(1, FEW + 1))
def test_with_a_margin_lower_bits_count_near_the_largest(kernels, n):
    whole, parts, rough = head(0.1)
    x, margin = rows(n), 3.0
    exact = np.asarray(multiply(x, (whole,)))
    coarse = rounded(x) @ rough.T
    y = np.asarray(multiply(x, (parts,), margin=margin))
    below = coarse.max(axis=1, keepdims=True) - coarse
    near = tiles_of(below < margin)
    assert (near.sum(axis=1) > 0).all() and not near.all(axis=1).any()
    # The few at the edge may go either way: the kernel's sums are float32.
    far = ~tiles_of(below < margin + 1e-4)
    assert (near | far).mean() > 0.99
    assert_same_bits(y[spread(near)], exact[spread(near)])
    assert np.abs(y - coarse)[spread(far)].max() < ROUNDING * coarse.std()
    assert not np.array_equal(y, exact)
    # How rough: 2.3 of 127 steps of the largest weight of 32.
    assert np.std((y - exact)[spread(far)]) < 0.05 * exact.std()


def test_more_rows_than_a_few_read_all_bits(kernels):
    whole, parts, _ = head(0.1)
    x = rows(FEW + 1)
    assert_same_bits(multiply(x, (parts,), margin=3.0), multiply(x, (whole,)))


def test_the_margin_shrinks_while_more_than_512_tiles_are_near(kernels):
    whole, parts, rough = head(0.25, n_out=16 * 800, n_in=64)
    x = rows(1, 64)
    coarse = rounded(x) @ rough.T
    tops = coarse.reshape(-1, 16).max(axis=1)
    below = tops.max() - tops
    allowed = max(m for m in range(1, 20) if (below < m).sum() <= 512)
    assert 0 < (below < allowed).sum() < 512 < (below < allowed + 1).sum()
    y = np.asarray(multiply(x, (parts,), margin=20.0))
    near = np.repeat(below < allowed - 1e-4, 16)[None]
    assert_same_bits(y[near], np.asarray(multiply(x, (whole,)))[near])
    far = np.repeat(below > allowed + 1e-4, 16)[None]
    assert np.abs(y - coarse)[far].max() < ROUNDING * coarse.std()
    assert (near | far).mean() > 0.99


def test_a_row_does_not_depend_on_the_rows_beside_it_with_a_margin(kernels):
    _, parts, _ = head(0.1)
    x = rows(FEW)
    alone = [multiply(x[i : i + 1], (parts,), margin=3.0) for i in range(FEW)]
    assert_same_bits(multiply(x, (parts,), margin=3.0), np.concatenate(alone))


def test_a_nan_and_an_infinity_reach_the_outputs_of_a_split_matrix(kernels):
    _, parts, _ = head()
    x = rows(2)
    x[0, 5] = np.nan
    y = np.asarray(multiply(x, (parts,), margin=3.0))
    assert np.isnan(y[0]).all() and np.isfinite(y[1]).all()
    raw = np.zeros((40, N_IN // 32, 34), np.uint8)
    raw[:, :, 2:] = 1
    raw[:, :, 1] = 0x3C  # 1
    raw[33, 0, 1] = 0x7C  # infinity
    y = np.asarray(
        multiply(np.ones((1, N_IN), np.float32), (split(raw.reshape(40, -1)),), margin=1.0)
    )
    assert np.isposinf(y[0, 33]) and np.isfinite(np.delete(y[0], 33)).all()


def test_a_margin_takes_one_part(kernels):
    whole, parts, _ = head()
    with pytest.raises(jax.errors.JaxRuntimeError, match="a margin takes one part and no gate"):
        np.asarray(linear(rows(1), (whole, parts), margin=1.0))
