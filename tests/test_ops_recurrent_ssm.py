"""State-space scans: against the recurrence, row by row in float64, cut, padded and extreme."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
import pytest

from minfer_jax.ops.recurrent.ssm import selective_scan, ssd_scan

Loop = Callable[..., tuple[np.ndarray, np.ndarray]]
LENGTHS = [1, 2, 31, 33, 64, 100]


class Scan(NamedTuple):
    """One of the two scans: itself, its oracle, and random arguments for it."""

    scan: Callable[..., tuple[jax.Array, jax.Array]]
    loop: Loop
    args: Callable[[int, int], tuple[np.ndarray, ...]]
    """(seed, t) -> x, dt, a, b, c, state; two sequences."""


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, x.astype(np.float64))


def selective_loop(x, dt, a, b, c, state):
    """One sequence: x and dt [t, d], a [d, n], b and c [t, n], state [n, d]."""
    h, dt, out = state.T.astype(np.float64), softplus(dt), []
    for i in range(len(x)):
        h = np.exp(dt[i][:, None] * a) * h + (dt[i] * x[i])[:, None] * b[i][None, :]
        out.append(h @ c[i].astype(np.float64))
    return np.stack(out), h.T


def ssd_loop(x, dt, a, b, c, state):
    """One sequence: x [t, h, p], dt [t, h], a [h], b and c [t, g, n], state [g, n, h / g * p]."""
    t, n_head, p = x.shape
    g, n = b.shape[1:]
    h = state.reshape(g, n, n_head // g, p).transpose(0, 2, 3, 1).reshape(n_head, p, n)
    h, dt, out = h.astype(np.float64), softplus(dt), []
    for i in range(t):
        bh, ch = (np.repeat(v[i].astype(np.float64), n_head // g, axis=0) for v in (b, c))
        h = np.exp(dt[i] * a)[:, None, None] * h
        h = h + (dt[i][:, None] * x[i])[:, :, None] * bh[:, None, :]
        out.append(np.einsum("hpn,hn->hp", h, ch))
    h = h.reshape(g, n_head // g, p, n).transpose(0, 3, 1, 2)
    return np.stack(out), h.reshape(state.shape)


def random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def selective_args(seed: int, t: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    a = -np.exp(random(rng, 6, 4))
    return (
        random(rng, 2, t, 6),
        random(rng, 2, t, 6) - np.float32(1),
        a,
        random(rng, 2, t, 4),
        random(rng, 2, t, 4),
        random(rng, 2, 4, 6),
    )


def ssd_args(seed: int, t: int, n_group: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    a = -np.exp(random(rng, 4))
    return (
        random(rng, 2, t, 4, 3),
        random(rng, 2, t, 4) - np.float32(1),
        a,
        random(rng, 2, t, n_group, 5),
        random(rng, 2, t, n_group, 5),
        random(rng, 2, n_group, 5, 4 // n_group * 3),
    )


SCANS = {
    "mamba": Scan(jax.jit(selective_scan), selective_loop, selective_args),
    "mamba2": Scan(jax.jit(ssd_scan), ssd_loop, partial(ssd_args, n_group=1)),
    "mamba2-groups": Scan(jax.jit(ssd_scan), ssd_loop, partial(ssd_args, n_group=2)),
}


@pytest.fixture(params=SCANS)
def scan(request):
    return SCANS[request.param]


def rows(args: tuple[np.ndarray, ...], at: slice, state) -> tuple[np.ndarray, ...]:
    """The arguments for some of the rows, from another state."""
    x, dt, a, b, c, _ = args
    return x[:, at], dt[:, at], a, b[:, at], c[:, at], state


def padded(args: tuple[np.ndarray, ...], n: int) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """The arguments with rows of NaN behind theirs, n in all, and which rows are real."""
    x, dt, a, b, c, state = args
    t = x.shape[1]

    def pad(v: np.ndarray) -> np.ndarray:
        rest = np.full((v.shape[0], n - t, *v.shape[2:]), np.nan, np.float32)
        return np.concatenate([v, rest], axis=1)

    real = np.broadcast_to(np.arange(n) < t, (x.shape[0], n))
    return (pad(x), pad(dt), a, pad(b), pad(c), state), real


def all_real(args: tuple[np.ndarray, ...]) -> np.ndarray:
    return np.ones(args[0].shape[:2], bool)


def check(scan: Scan, args: tuple[np.ndarray, ...], got) -> None:
    """Both sequences against the loop."""
    x, dt, a, b, c, state = args
    y, new = (np.asarray(v) for v in got)
    assert y.dtype == new.dtype == np.float32
    assert y.shape == x.shape and new.shape == state.shape
    for i in range(2):
        want, want_new = scan.loop(x[i], dt[i], a, b[i], c[i], state[i])
        np.testing.assert_allclose(y[i], want, atol=2e-5 * np.abs(want).max())
        np.testing.assert_allclose(new[i], want_new, atol=2e-5 * np.abs(want_new).max())


@pytest.mark.parametrize("t", LENGTHS)
def test_the_recurrence(scan, t):
    args = scan.args(t, t)
    check(scan, args, scan.scan(*args, all_real(args)))


@pytest.mark.slow
def test_several_chunks(scan):
    args = scan.args(0, 300)
    check(scan, args, scan.scan(*args, all_real(args)))


@pytest.mark.parametrize("n_real", [1, 15, 16, 17, 63, 64, 65, 99])
def test_padding_reaches_no_state(scan, n_real):
    args = scan.args(n_real, n_real)
    with_padding, real = padded(args, 100)
    y, new = scan.scan(*with_padding, real)
    check(scan, args, (y[:, :n_real], new))


def test_a_sequence_of_nothing_but_padding(scan):
    for t in (1, 33):
        args = scan.args(t, t)
        real = np.array([[False], [True]]) & np.ones((2, t), bool)
        _, new = scan.scan(*args, real)
        np.testing.assert_array_equal(new[0], args[-1][0])
        assert np.abs(np.asarray(new[1]) - args[-1][1]).max() > 0.1


@pytest.mark.parametrize("cut", [1, 2, 15, 16, 17, 31, 63, 64, 65, 98, 99])
def test_cut_in_two_calls(scan, cut):
    """Both padded to the same length, as ubatches are."""
    args = scan.args(cut, 100)
    first, real = padded(rows(args, np.s_[:cut], args[-1]), 100)
    y0, middle = scan.scan(*first, real)
    second, real = padded(rows(args, np.s_[cut:], np.asarray(middle)), 100)
    y1, new = scan.scan(*second, real)
    check(scan, args, (np.concatenate([y0[:, :cut], y1[:, : 100 - cut]], axis=1), new))


@pytest.mark.parametrize("cut", [1, 98])
def test_cut_in_two_calls_of_their_own_lengths(scan, cut):
    args = scan.args(cut, 100)
    first = rows(args, np.s_[:cut], args[-1])
    y0, middle = scan.scan(*first, all_real(first))
    second = rows(args, np.s_[cut:], middle)
    y1, new = scan.scan(*second, all_real(second))
    check(scan, args, (np.concatenate([y0, y1], axis=1), new))


@pytest.mark.parametrize("t", [1, 100])
def test_extreme_decays(scan, t):
    """Steps that forget everything, or nothing, among ordinary ones."""
    args = scan.args(5, t)
    _, dt, a, *_ = args
    rng = np.random.default_rng(1)
    dt += np.where(rng.random(dt.shape) < 0.2, 200.0, 0.0).astype(np.float32)
    dt -= np.where(rng.random(dt.shape) < 0.2, 200.0, 0.0).astype(np.float32)
    a *= np.float32(100)
    check(scan, args, scan.scan(*args, all_real(args)))


def test_ordinary_rows_behind_one_that_forgets_everything_keep_their_digits(scan):
    """Differences of sums of logarithms: a summand of -1e6 would leave none of them."""
    args = scan.args(6, 64)
    args[1][:, 0] = 1e5
    check(scan, args, scan.scan(*args, all_real(args)))


def test_memory_is_bounded_by_chunks():
    """No array [t, n, d] of all rows: 4096 rows of 64 channels with 16 values would be 16 MiB."""
    shapes = [(1, 4096, 64), (1, 4096, 64), (64, 16), (1, 4096, 16), (1, 4096, 16), (1, 16, 64)]
    args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    compiled = jax.jit(selective_scan).lower(*args, jax.ShapeDtypeStruct((1, 4096), bool)).compile()
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 12 << 20
