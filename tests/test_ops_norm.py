"""Root mean square norm against its formula in float64."""

import chex
import jax
import numpy as np
import pytest

from minfer_jax.ops.norm import rms_norm

jitted = jax.jit(rms_norm, static_argnames="eps")


@pytest.mark.parametrize("shape", [(3, 16), (3, 4, 16)])
def test_against_the_formula(shape):
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape).astype(np.float32)
    weight = rng.normal(size=16).astype(np.float32)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 0.125) * weight
    out = jitted(x, weight, eps=0.125)
    assert out.dtype == np.float32
    chex.assert_trees_all_close(np.asarray(out, np.float64), expected, rtol=1e-6, atol=1e-7)


def test_a_hand_worked_row():
    # The mean of the squares is 25 / 2, so 3 and 4 become 3 and 4 over 5 / sqrt(2).
    out = jitted(np.array([[3.0, 4.0]], np.float32), np.array([1.0, 10.0], np.float32), eps=0.0)
    np.testing.assert_allclose(out, [[0.6 * 2**0.5, 8.0 * 2**0.5]], rtol=1e-6)


def test_rows_do_not_mix_and_zeros_stay_zeros():
    x = np.zeros((3, 16), np.float32)
    x[1] = 1000.0
    out = np.asarray(jitted(x, np.ones(16, np.float32), eps=1e-5))
    np.testing.assert_array_equal(out[[0, 2]], 0.0)
    np.testing.assert_allclose(out[1], 1.0, rtol=1e-6)
