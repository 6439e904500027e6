"""RWKV-6 and RWKV-7 against a loop over tokens in float64."""

import jax
import numpy as np
import pytest

from minfer_jax.ops.recurrent.wkv import wkv6, wkv7

LENGTHS = [1, 2, 31, 33, 64, 100]
S, H, D = 2, 3, 8
RWKV7_MIN = -np.exp(-0.5)


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def inputs6(t, *, strength=1.0, seed=0):
    rng = np.random.default_rng(seed)
    r, k, v = (normal(rng, S, t, H, D) for _ in range(3))
    log_w = -strength * np.exp(normal(rng, S, t, H, D))
    return [r, k, v, log_w, normal(rng, H, D), normal(rng, S, H, D, D)]


def inputs7(t, *, strength=None, seed=0):
    """As RWKV-7 makes them: unit keys for a and b, decays bounded, if no `strength` is given."""
    rng = np.random.default_rng(seed)
    r, k, v, key = (normal(rng, S, t, H, D) for _ in range(4))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    sigmoid, rate = 1 / (1 + np.exp(-normal(rng, 2, S, t, H, D)))
    log_w = RWKV7_MIN * sigmoid if strength is None else -strength * np.exp(4 * sigmoid - 2)
    return [r, log_w.astype(np.float32), k, v, -key, key * rate, normal(rng, S, H, D, D)]


def loop6(r, k, v, log_w, bonus, state, real):
    r, k, v, log_w, bonus, state = (np.float64(x) for x in (r, k, v, log_w, bonus, state))
    y, state = np.zeros_like(r), state.copy()
    for s, t in zip(*np.nonzero(real), strict=True):
        for h in range(H):
            written = np.outer(k[s, t, h], v[s, t, h])
            y[s, t, h] = r[s, t, h] @ (state[s, h] + bonus[h][:, None] * written)
            state[s, h] = np.exp(log_w[s, t, h])[:, None] * state[s, h] + written
    return y, state


def loop7(r, log_w, k, v, a, b, state, real):
    r, log_w, k, v, a, b, state = (np.float64(x) for x in (r, log_w, k, v, a, b, state))
    y, state = np.zeros_like(r), state.copy()
    for s, t in zip(*np.nonzero(real), strict=True):
        for h in range(H):
            read = a[s, t, h] @ state[s, h]
            state[s, h] = np.exp(log_w[s, t, h])[:, None] * state[s, h]
            state[s, h] += np.outer(b[s, t, h], read) + np.outer(k[s, t, h], v[s, t, h])
            y[s, t, h] = r[s, t, h] @ state[s, h]
    return y, state


def check(op, loop, x, real=None, *, atol=2e-4):
    """`op` gives what `loop` gives: every real row, and the state."""
    real = np.ones((S, x[0].shape[1]), bool) if real is None else real
    y, state = jax.jit(op)(*x, real)
    expected, expected_state = loop(*x, real)
    np.testing.assert_allclose(np.asarray(y)[real], expected[real], rtol=1e-5, atol=atol)
    np.testing.assert_allclose(state, expected_state, rtol=1e-5, atol=atol)


def wkv7_bounded(*x):
    return wkv7(*x, log_w_min=RWKV7_MIN)


OPS = [
    pytest.param(wkv6, loop6, inputs6, id="wkv6"),
    pytest.param(wkv7, loop7, inputs7, id="wkv7"),
    pytest.param(wkv7_bounded, loop7, inputs7, id="wkv7-bounded"),
]


@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize("op, loop, inputs", OPS)
def test_rows_one_after_another(op, loop, inputs, t):
    check(op, loop, inputs(t))


@pytest.mark.parametrize("t", [1, 33])
@pytest.mark.parametrize("op, loop, inputs", OPS)
def test_padding_leaves_the_state_alone(op, loop, inputs, t):
    real = np.arange(t)[None, :] < np.array([[0], [t // 2 + 1]])
    check(op, loop, inputs(t), real)


@pytest.mark.parametrize("op, loop, inputs", OPS)
def test_two_calls_are_as_one(op, loop, inputs):
    x = inputs(50)
    whole, last = loop(*x, np.ones((S, 50), bool))
    first = [v[:, :41] if v.shape[:2] == (S, 50) else v for v in x]
    op = jax.jit(op)
    y1, state = op(*first, np.broadcast_to(np.arange(41) < 40, (S, 41)))
    second = [v[:, 40:] if v.shape[:2] == (S, 50) else v for v in x[:-1]]
    y2, state = op(*second, state, np.ones((S, 10), bool))
    y = np.concatenate([np.asarray(y1)[:, :40], y2], axis=1)
    np.testing.assert_allclose(y, whole, rtol=1e-5, atol=2e-4)
    np.testing.assert_allclose(state, last, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("strength", [1e-6, 30.0, 1e4])
@pytest.mark.parametrize("t", [1, 33])
@pytest.mark.parametrize("op, loop, inputs", OPS[:2])
def test_decays_from_none_to_all_at_once(op, loop, inputs, t, strength):
    # Log decays are added up in float32; what is left of them after exp is off by the rounding.
    check(op, loop, inputs(t, strength=strength), atol=2e-3)


def test_one_strong_decay_among_weak_ones_hides_nothing_after_it():
    x = inputs7(32, strength=1e-3)
    x[1][:, 5] = -500.0
    check(wkv7, loop7, x)


def test_graphs_do_not_depend_on_x64():
    for op, x in ((wkv6, inputs6(33)), (wkv7, inputs7(33)), (wkv7, inputs7(1))):
        real = np.ones((S, x[0].shape[1]), bool)
        shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (*x, real)]
        plain = str(jax.make_jaxpr(lambda *v, op=op: op(*v))(*shapes))
        with jax.enable_x64(True):
            assert str(jax.make_jaxpr(lambda *v, op=op: op(*v))(*shapes)) == plain
