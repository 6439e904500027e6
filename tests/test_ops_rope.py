"""The rotation against complex numbers, and what makes it a rotation of relative positions."""

from functools import partial

import chex
import jax
import numpy as np
import pytest

from minfer_jax.ops.rope import apply_rope, rope_tables
from minfer_jax.ops.rope_spec import RopeSpec

STYLES = ["interleaved", "half"]
D, N_ROT = 12, 8
POS = [0, 1, 2, 7, 100, 4095]
FREQ = 500.0 ** (-np.arange(0, N_ROT, 2) / N_ROT)


@partial(jax.jit, static_argnums=0)
def _rotate(spec, x, pos, factors):
    return apply_rope(spec, x, rope_tables(spec, pos, factors))


def rotate(spec, x, pos, factors=None):
    return np.asarray(_rotate(spec, x, np.asarray(pos, np.int32), factors))


def spec_of(style, **changes):
    return RopeSpec(style=style, n_rot=N_ROT, freq_base=500.0, **changes)


def heads(n, d=D, seed=0):
    return np.random.default_rng(seed).normal(size=(n, 3, d)).astype(np.float32)


def pairs(style, x):
    """The rotating components as complex numbers: [n, heads, n_rot / 2]."""
    rot = np.asarray(x, np.float64)[..., :N_ROT]
    half = N_ROT // 2
    if style == "interleaved":
        return rot[..., 0::2] + 1j * rot[..., 1::2]
    return rot[..., :half] + 1j * rot[..., half:]


@pytest.mark.parametrize("style", STYLES)
def test_against_complex_numbers(style):
    x = heads(len(POS))
    turn = np.exp(1j * np.array(POS)[:, None] * FREQ)[:, None, :]
    out = rotate(spec_of(style), x, POS)
    assert out.dtype == np.float32 and out.shape == x.shape
    # An angle of 4095 radians has an error of 1e-4 in float32.
    np.testing.assert_allclose(pairs(style, out), pairs(style, x) * turn, atol=1e-3)
    np.testing.assert_allclose(pairs(style, out)[:4], (pairs(style, x) * turn)[:4], atol=2e-6)


@pytest.mark.parametrize("style", STYLES)
def test_components_beyond_n_rot_pass_through(style):
    x = heads(len(POS))
    np.testing.assert_array_equal(rotate(spec_of(style), x, POS)[..., N_ROT:], x[..., N_ROT:])


@pytest.mark.parametrize("style", STYLES)
def test_a_head_that_rotates_whole(style):
    x = heads(len(POS))
    out = rotate(spec_of(style), x[..., :N_ROT], POS)
    chex.assert_trees_all_close(out, rotate(spec_of(style), x, POS)[..., :N_ROT], atol=1e-6)


@pytest.mark.parametrize("style", STYLES)
def test_position_zero_is_the_identity_and_norms_stay(style):
    x = heads(len(POS))
    out = rotate(spec_of(style), x, POS)
    np.testing.assert_array_equal(out[0], x[0])
    assert np.abs(out[1:] - x[1:]).max(axis=(1, 2)).min() > 0.1
    norms = [np.linalg.norm(y.astype(np.float64), axis=-1) for y in (out, x)]
    np.testing.assert_allclose(*norms, rtol=1e-6)


@pytest.mark.parametrize("style", STYLES)
def test_products_depend_on_the_difference_of_positions_alone(style):
    q, k = (np.repeat(heads(1, seed=seed), len(POS), axis=0) for seed in (1, 2))
    base = np.array([0, 1, 5, 17, 100, 1000])

    def product(ahead):
        rotated = rotate(spec_of(style), q, base + ahead), rotate(spec_of(style), k, base)
        return np.sum(np.prod(np.float64(rotated), axis=0), axis=-1)  # [n, heads]

    three, four = product(3), product(4)
    np.testing.assert_allclose(three, np.repeat(three[:1], len(POS), axis=0), atol=1e-3)
    assert np.abs(three - four).max(axis=0).min() > 0.05


@pytest.mark.parametrize("style", STYLES)
def test_linear_scaling_stretches_positions(style):
    x = heads(4)
    scaled = rotate(spec_of(style, freq_scale=0.25), x, [0, 4, 12, 80])
    np.testing.assert_array_equal(scaled, rotate(spec_of(style), x, [0, 1, 3, 20]))


def test_factors_divide_the_frequencies():
    x = heads(4)
    factors = np.array([1.0, 2.0, 3.5, 8.0], np.float32)
    pos = [1, 2, 7, 30]
    turn = np.exp(1j * np.array(pos)[:, None] * (FREQ / factors))[:, None, :]
    out = rotate(spec_of("half"), x, pos, factors)
    np.testing.assert_allclose(pairs("half", out), pairs("half", x) * turn, atol=2e-5)


def test_the_magnitude_scales_what_rotates_and_nothing_else():
    x = heads(2)
    plain, scaled = (rotate(spec_of("half", attn_factor=f), x, [0, 5]) for f in (1.0, 1.5))
    np.testing.assert_allclose(scaled[..., :N_ROT], 1.5 * plain[..., :N_ROT], rtol=2e-6)
    np.testing.assert_array_equal(scaled[..., N_ROT:], x[..., N_ROT:])


def test_yarn_tables_have_its_frequencies_and_magnitude():
    spec = spec_of("half", yarn=True, freq_scale=0.25, n_ctx_orig=64)
    cos, sin = (np.asarray(t, np.float64) for t in rope_tables(spec, np.array([0, 3], np.int32)))
    angle = 3.0 * spec.frequencies()
    magnitude = 1.0 + 0.1 * np.log(4.0)
    np.testing.assert_allclose(cos, magnitude * np.cos([0.0 * angle, angle]), rtol=1e-6)
    np.testing.assert_allclose(sin, magnitude * np.sin([0.0 * angle, angle]), rtol=1e-6)
