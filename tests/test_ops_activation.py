"""Point-wise functions against their formulas and hand-worked values."""

import math

import numpy as np
import pytest

from minfer_jax.ops.activation import gelu, silu, softcap

X = np.linspace(-12.0, 12.0, 97, dtype=np.float32).reshape(1, 97)
WIDE = X.astype(np.float64)


def test_silu():
    np.testing.assert_allclose(silu(X), WIDE / (1.0 + np.exp(-WIDE)), rtol=2e-6, atol=1e-9)


def test_gelu_is_the_tanh_form():
    inner = math.sqrt(2.0 / math.pi) * (WIDE + 0.044715 * WIDE**3)
    np.testing.assert_allclose(gelu(X), 0.5 * WIDE * (1.0 + np.tanh(inner)), rtol=2e-6, atol=1e-6)
    # The exact form, x times the normal distribution, would give 0.8413447.
    assert float(gelu(np.float32([1.0]))[0]) == pytest.approx(0.8411920, abs=2e-7)


def test_softcap():
    np.testing.assert_allclose(softcap(X, 3.0), 3.0 * np.tanh(WIDE / 3.0), rtol=1e-6)
    assert np.asarray(softcap(np.float32([1e9, -1e9]), 30.0)).tolist() == [30.0, -30.0]
    assert float(softcap(np.float32([0.01]), 30.0)[0]) == pytest.approx(0.01, rel=1e-6)


def test_a_cap_of_zero_is_no_cap():
    assert softcap(X, 0.0) is X
