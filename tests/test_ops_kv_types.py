"""Types of KV regions: the bits of ggml's quantization, and what happens at the ends of a range."""

import gguf.quants
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_values import awkward

from minfer_jax.ops.kv_types import KV_TYPES

ORACLES = {
    "bf16": GGMLQuantizationType.BF16,
    "q8_0": GGMLQuantizationType.Q8_0,
    "q4_0": GGMLQuantizationType.Q4_0,
}
QUANTIZED = ["q8_0", "q4_0"]
LIMITS = {"f16": 65504.0, "bf16": 2.0**128 - 2.0**120, "q8_0": 127 * 65504.0, "q4_0": 8 * 65504.0}
ENCODE = {name: jax.jit(kind.encode) for name, kind in KV_TYPES.items()}
DECODE = {name: jax.jit(kind.decode) for name, kind in KV_TYPES.items()}


def encoded(name, x):
    return tuple(np.asarray(plane) for plane in ENCODE[name](x))


def through(name, x):
    """x, stored and read back."""
    return np.asarray(DECODE[name](ENCODE[name](np.asarray(x, np.float32))))


def oracle(name, x):
    """The planes as gguf's routines make them, and their values."""
    raw = gguf.quants.quantize(x, ORACLES[name])
    values = gguf.quants.dequantize(raw, ORACLES[name])
    if name == "bf16":
        return (raw.view(np.uint16),), values
    blocks = raw.reshape(*x.shape[:-1], x.shape[-1] // 32, -1)
    quants = blocks[..., 2:].reshape(*x.shape[:-1], -1)
    quants = quants.view(np.int8) if name == "q8_0" else quants
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    return (quants, scales), values


def check(name, x):
    planes, values = oracle(name, x)
    stored = encoded(name, x)
    for plane, same in zip(stored, planes, strict=True):
        assert plane.dtype == same.dtype
        np.testing.assert_array_equal(plane, same)
    np.testing.assert_array_equal(DECODE[name](stored), values)


@pytest.mark.parametrize("d", [32, 64, 96])
@pytest.mark.parametrize("name", ORACLES)
def test_bits_of_ggml(name, d):
    check(name, awkward(d))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e4, 1e4, width=32, allow_subnormal=False), min_size=32, max_size=32),
    st.sampled_from([*ORACLES]),
)
def test_bits_of_ggml_for_any_block(values, name):
    x = np.array([values], np.float32)
    if np.abs(x).max() > 1e-30:  # the oracle divides by scales that float32 can hardly hold
        check(name, x)


@pytest.mark.parametrize("name", ["f32", "f16"])
def test_floats_are_rounded_once(name):
    x = awkward(64)
    (stored,) = encoded(name, x)
    np.testing.assert_array_equal(stored, x.astype(stored.dtype))
    np.testing.assert_array_equal(DECODE[name]((stored,)), stored.astype(np.float32))


def test_bfloat16_rounds_to_the_nearest_even():
    x = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x80000000, 0x7F7F7FFF, 0x00010000], np.uint32
    )
    (bits,) = encoded("bf16", x.view(np.float32)[None])
    assert [hex(b) for b in bits[0]] == ["0x3f80", "0x3f82", "0x3f81", "0x8000", "0x7f7f", "0x1"]


def test_a_block_by_hand():
    """Of q4_0: value j in low nibbles, value j + 16 in high ones, signs by the largest value."""
    x = np.zeros((1, 32), np.float32)
    x[0, 0], x[0, 1], x[0, 16], x[0, 31] = -16.0, 14.0, 2.0, -4.0
    packed, scale = encoded("q4_0", x)
    assert scale == 2.0
    expected = np.full(16, 0x88)
    expected[0], expected[1], expected[15] = 0x90, 0x8F, 0x68
    np.testing.assert_array_equal(packed[0], expected)
    np.testing.assert_array_equal(DECODE["q4_0"]((packed, scale)), x)


@pytest.mark.parametrize(("name", "limit"), LIMITS.items())
def test_large_values_saturate(name, limit):
    x = np.ones((3, 32), np.float32)
    x[0, 3], x[1, 4], x[2, 5], x[2, 6] = np.inf, -np.inf, 2.0**127.99, -np.inf
    y = through(name, x)
    assert np.isfinite(y).all()
    assert (y[0, 3], y[1, 4]) == (limit, -limit)
    assert abs(y[2, 6]) == limit or name == "q4_0"  # which has seven steps on the other side
    np.testing.assert_array_equal(y, through(name, x.clip(-limit, limit)))


def test_float32_is_kept_as_it_is():
    x = np.array([[np.inf, -np.inf, np.nan, 1e-40]], np.float32)
    np.testing.assert_array_equal(encoded("f32", x)[0].view(np.uint32), x.view(np.uint32))


@pytest.mark.parametrize("name", KV_TYPES)
def test_nan_stays_nan_and_harms_no_other_block(name):
    x = np.ones((2, 96), np.float32)
    x[0, 40] = np.nan
    y = through(name, x)
    bad = np.isnan(y)
    assert bad[0, 40] and not bad[1].any() and not bad[0, :32].any() and not bad[0, 64:].any()
    np.testing.assert_allclose(y[~bad], 1.0, rtol=1e-4)
    if name not in QUANTIZED:
        assert bad.sum() == 1


def test_every_nan_of_bfloat16_is_quiet():
    x = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001], np.uint32).view(np.float32)
    (bits,) = encoded("bf16", x[None])
    assert ((bits & 0x7FC0) == 0x7FC0).all()


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_nan_block_has_one_form(name):
    x = np.full((1, 32), 3.0, np.float32)
    x[0, 7] = -np.float32(np.nan)
    quants, scale = encoded(name, x)
    assert scale.view(np.uint16) == 0x7E00
    assert set(quants.ravel().tolist()) == {0 if name == "q8_0" else 0x88}


@pytest.mark.parametrize("scale", [1e-45, 1e-40, 1e-37, 1e-30])
@pytest.mark.parametrize("name", QUANTIZED)
def test_values_too_small_for_a_scale_are_zero(name, scale):
    x = np.linspace(-1, 1, 32, dtype=np.float32)[None] * np.float32(scale)
    np.testing.assert_array_equal(through(name, x), 0.0)


@pytest.mark.parametrize(
    ("name", "multiple", "size"),
    [("f32", 1, 256), ("f16", 1, 128), ("bf16", 1, 128), ("q8_0", 32, 68), ("q4_0", 32, 36)],
)
def test_sizes(name, multiple, size):
    kind = KV_TYPES[name]
    assert (kind.name, kind.multiple, kind.bytes(64)) == (name, multiple, size)
    arrays = kind.arrays(3, 5, 64)
    made = [np.zeros(shape, dtype) for shape, dtype in arrays]
    assert sum(a.nbytes for a in made) == size * 3 * 5
    stored = encoded(name, np.zeros((3, 5, 64), np.float32))
    assert [(a.shape, a.dtype) for a in stored] == [(a.shape, a.dtype) for a in made]
    assert DECODE[name](stored).shape == (3, 5, 64)


@pytest.mark.parametrize("name", KV_TYPES)
def test_traces_do_not_depend_on_x64(name):
    def trace():
        kind, x = KV_TYPES[name], jnp.zeros((2, 3, 64), jnp.float32)
        return str(jax.make_jaxpr(lambda x: kind.decode(kind.encode(x)))(x))

    plain = trace()
    with jax.enable_x64(True):
        assert trace() == plain
