"""The gated delta rule against a loop over tokens in float64."""

import jax
import numpy as np
import pytest

from minfer_jax.ops.recurrent.delta import gated_delta

S, H, DK, DV = 2, 3, 8, 6
DELTA = jax.jit(gated_delta)


def inputs(t, *, strength=1.0, seed=0):
    """Unit keys and queries, as the models make them."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, S, t, H, DK))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(S, t, H, DV))
    log_decay = -strength * np.exp(rng.normal(size=(S, t, H)))
    beta = rng.uniform(size=(S, t, H))
    state = rng.normal(size=(S, H, DK, DV))
    return [x.astype(np.float32) for x in (q, k, v, log_decay, beta, state)]


def loop(q, k, v, log_decay, beta, state, real):
    q, k, v, log_decay, beta, state = (np.float64(x) for x in (q, k, v, log_decay, beta, state))
    y, state = np.zeros_like(v), state.copy()
    for s, t in zip(*np.nonzero(real), strict=True):
        for h in range(H):
            state[s, h] *= np.exp(log_decay[s, t, h])
            error = v[s, t, h] - k[s, t, h] @ state[s, h]
            state[s, h] += np.outer(k[s, t, h], beta[s, t, h] * error)
            y[s, t, h] = q[s, t, h] @ state[s, h]
    return y, state


def check(x, real=None, *, atol=1e-5):
    real = np.ones((S, x[0].shape[1]), bool) if real is None else real
    y, state = DELTA(*x, real)
    expected, expected_state = loop(*x, real)
    np.testing.assert_allclose(np.asarray(y)[real], expected[real], rtol=1e-5, atol=atol)
    np.testing.assert_allclose(state, expected_state, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("t", [1, 2, 31, 33, 64, 100])
def test_rows_one_after_another(t):
    check(inputs(t))


@pytest.mark.parametrize("t", [1, 33])
def test_padding_leaves_the_state_alone(t):
    check(inputs(t), np.arange(t)[None, :] < np.array([[0], [t // 2 + 1]]))


def test_two_calls_are_as_one():
    x = inputs(50)
    whole, last = loop(*x, np.ones((S, 50), bool))
    y1, state = DELTA(
        *(v[:, :41] for v in x[:-1]), x[-1], np.broadcast_to(np.arange(41) < 40, (S, 41))
    )
    y2, state = DELTA(*(v[:, 40:] for v in x[:-1]), state, np.ones((S, 10), bool))
    y = np.concatenate([np.asarray(y1)[:, :40], y2], axis=1)
    np.testing.assert_allclose(y, whole, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state, last, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strength", [1e-6, 30.0, 1e4])
@pytest.mark.parametrize("t", [1, 64])
def test_decays_from_none_to_all_at_once(t, strength):
    # Log decays are added up in float32; what is left of them after exp is off by the rounding.
    check(inputs(t, strength=strength), atol=1e-3)


def test_one_key_written_again_and_again():
    """With beta 1 and no decay each write replaces the one before: y is v."""
    q, k, v, log_decay, beta, state = inputs(64)
    k = q = np.broadcast_to(k[:, :1], k.shape)
    y, _ = DELTA(
        q, k, v, np.zeros_like(log_decay), np.ones_like(beta), state, np.ones((S, 64), bool)
    )
    np.testing.assert_allclose(y, v, rtol=0, atol=1e-5)


def test_graphs_do_not_depend_on_x64():
    for t in (1, 33):
        x = [*inputs(t), np.ones((S, t), bool)]
        shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in x]
        plain = str(jax.make_jaxpr(lambda *v: gated_delta(*v))(*shapes))
        with jax.enable_x64(True):
            assert str(jax.make_jaxpr(lambda *v: gated_delta(*v))(*shapes)) == plain
