"""Block formats: bit-equal to the gguf package's numpy routines, in numpy and inside a graph."""

from functools import cache

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.quants import dequantize as oracle_dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax.errors import GGUFError
from minfer_jax.gguf import BLOCK_FORMATS, BLOCK_SIZES, BlockFormat, GGMLType, dequantize

FORMATS = [pytest.param(f, id=f.type.name) for f in BLOCK_FORMATS.values()]
ISSUE_2 = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K"


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@cache
def jitted(type_: GGMLType):
    return jax.jit(lambda planes: BLOCK_FORMATS[type_].dequantize(planes, jnp))


def oracle(raw: np.ndarray, type_: GGMLType) -> np.ndarray:
    with np.errstate(all="ignore"):
        return oracle_dequantize(raw, gguf.GGMLQuantizationType(int(type_)))


def assert_same_bits(ours, expected: np.ndarray) -> None:
    """Equal bits, but for NaNs, whose sign and payload mean nothing."""
    ours = np.asarray(ours)
    assert ours.dtype == np.float32 and ours.shape == expected.shape
    same = ours.view(np.uint32) == expected.view(np.uint32)
    assert np.all(same | (np.isnan(ours) & np.isnan(expected)))


def random_raw(fmt: BlockFormat, rows: int, blocks: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, blocks * fmt.nbytes), np.uint8)


def every_half(fmt: BlockFormat) -> np.ndarray:
    """Random blocks in which each float16 field takes every one of the 65536 bit patterns."""
    raw = random_raw(fmt, 256, 256, 7)
    blocks = raw.view(fmt.layout)
    rng = np.random.default_rng(8)
    for name in fmt.layout.names or ():
        if fmt.layout[name].base == np.dtype("<f2"):
            patterns = rng.permutation(1 << 16).astype(np.uint16)
            blocks[name] = patterns.view(np.float16).reshape(blocks[name].shape)
    return raw


def test_the_formats_of_issue_2_are_there():
    assert {t.name for t in BLOCK_FORMATS} == set(ISSUE_2.split())
    for type_, fmt in BLOCK_FORMATS.items():
        assert (fmt.type, (fmt.block, fmt.nbytes)) == (type_, BLOCK_SIZES[type_])


@pytest.mark.parametrize("fmt", FORMATS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 5), blocks=st.integers(1, 4))
def test_random_blocks_in_numpy(fmt, seed, rows, blocks):
    raw = random_raw(fmt, rows, blocks, seed)
    assert_same_bits(fmt.dequantize(fmt.unpack(raw), np), oracle(raw, fmt.type))
    assert_same_bits(dequantize(raw.ravel(), fmt.type, blocks * fmt.block), oracle(raw, fmt.type))


@pytest.mark.parametrize("fmt", FORMATS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_blocks_inside_a_graph(fmt, seed):
    raw = random_raw(fmt, 3, 2, seed)
    assert_same_bits(jitted(fmt.type)(fmt.unpack(raw)), oracle(raw, fmt.type))


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_half_precision_scale(fmt):
    # Holds all subnormals, infinities and NaNs, with random quants and sub-scales.
    raw = every_half(fmt)
    expected = oracle(raw, fmt.type)
    planes = fmt.unpack(raw)
    assert_same_bits(fmt.dequantize(planes, np), expected)
    assert_same_bits(jitted(fmt.type)(planes), expected)


def test_every_bfloat16_value():
    fmt = BLOCK_FORMATS[GGMLType.BF16]
    bits = np.arange(1 << 16, dtype=np.uint16)
    expected = (bits.astype(np.uint32) << 16).view(np.float32)[None]
    assert_same_bits(jitted(GGMLType.BF16)({"bits": bits[None]}), expected)
    assert_same_bits(fmt.dequantize({"bits": bits[None]}, np), expected)


@pytest.mark.parametrize("fmt", FORMATS)
def test_planes_are_views_and_hold_the_bytes_once(fmt):
    raw = random_raw(fmt, 4, 3, 1)
    planes = fmt.unpack(raw)
    assert sum(p.nbytes for p in planes.values()) == raw.nbytes
    for plane in planes.values():
        assert np.shares_memory(plane, raw) and plane.shape[:2] == (4, 3)


def test_plane_names_shapes_and_types():
    def planes(type_: GGMLType) -> dict:
        fmt = BLOCK_FORMATS[type_]
        unpacked = fmt.unpack(random_raw(fmt, 2, 3, 0))
        return {k: (v.dtype.name, v.shape) for k, v in unpacked.items()}

    assert planes(GGMLType.F32) == {"values": ("float32", (2, 3))}
    assert planes(GGMLType.F16) == {"values": ("float16", (2, 3))}
    assert planes(GGMLType.BF16) == {"bits": ("uint16", (2, 3))}
    assert planes(GGMLType.Q8_0) == {"d": ("float16", (2, 3)), "qs": ("int8", (2, 3, 32))}
    assert planes(GGMLType.Q4_1) == {
        "d": ("float16", (2, 3)),
        "m": ("float16", (2, 3)),
        "qs": ("uint8", (2, 3, 16)),
    }
    assert planes(GGMLType.Q4_K) == {
        "d": ("float16", (2, 3)),
        "dmin": ("float16", (2, 3)),
        "scales": ("uint8", (2, 3, 12)),
        "qs": ("uint8", (2, 3, 128)),
    }


@pytest.mark.parametrize("type_", [GGMLType.F32, GGMLType.F16, GGMLType.BF16])
def test_float_formats_unpack_without_a_copy(type_):
    raw = random_raw(BLOCK_FORMATS[type_], 2, 8, 0)
    (plane,) = BLOCK_FORMATS[type_].unpack(raw).values()
    assert np.shares_memory(plane, raw)


@pytest.mark.parametrize("fmt", FORMATS)
def test_any_leading_axes(fmt):
    raw = random_raw(fmt, 6, 2, 3)
    expected = oracle(raw, fmt.type)
    planes = fmt.unpack(raw)
    ids = np.array([[5, 0, 5], [1, 2, 3]])
    gathered = {k: v[ids] for k, v in planes.items()}
    assert_same_bits(fmt.dequantize(gathered, np), expected[ids])
    assert_same_bits(jitted(fmt.type)(gathered), expected[ids])
    one = {k: v[4] for k, v in planes.items()}
    assert_same_bits(jitted(fmt.type)(one), expected[4])
    experts = fmt.unpack(raw.reshape(2, 3, -1))
    assert_same_bits(fmt.dequantize(experts, np), expected.reshape(2, 3, -1))


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_graph_neither_joins_nor_gathers(fmt):
    planes = fmt.unpack(random_raw(fmt, 2, 2, 0))
    jaxpr = str(jax.make_jaxpr(lambda p: fmt.dequantize(p, jnp))(planes))
    assert "concatenate" not in jaxpr and "gather" not in jaxpr


def test_dequantize_in_steps_gives_all_rows():
    fmt = BLOCK_FORMATS[GGMLType.Q4_1]
    raw = random_raw(fmt, 1030, 16, 5)  # 527360 values: three steps, the last one short
    assert_same_bits(dequantize(raw, fmt.type, 512), oracle(raw, fmt.type))


def test_what_does_not_fit_is_refused():
    q8 = BLOCK_FORMATS[GGMLType.Q8_0]
    with pytest.raises(GGUFError, match="cannot dequantize IQ2_XXS, allowed: F32 F16"):
        dequantize(bytes_of(66), GGMLType.IQ2_XXS, 256)
    for n_cols in (0, -32, 33, 96):
        with pytest.raises(GGUFError, match="not whole Q8_0 rows"):
            dequantize(bytes_of(68), GGMLType.Q8_0, n_cols)
    with pytest.raises(GGUFError, match="a multiple of 34 uint8"):
        q8.unpack(bytes_of(35)[None])


def bytes_of(n: int) -> np.ndarray:
    return np.zeros(n, np.uint8)
