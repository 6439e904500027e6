"""State-space layers: Mamba's selective scan and Mamba-2's, whose decay is one number a head.

Both are the recurrence (Gu and Dao 2023; Dao and Gu 2024)

    h[t] = exp(dt[t] * a) * h[t-1] + dt[t] * x[t] * b[t]        y[t] = c[t] . h[t]

with a state of n values for each of d channels. It is kept as [n, d]: everything that is done to
it then runs along d. A padding row has dt = 0, which leaves the state as it is.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_SCAN_GROUP = 16
"""Rows of a selective scan that follow each other; a chunk's groups run beside each other."""
_SCAN_GROUPS = 8
"""Groups of a chunk: so many states [n, d] are held at once, and should stay in cache."""
_SSD_CHUNK = 64
"""Rows of Mamba-2 that see each other through a matrix [rows, rows] a head."""
_MIN_LOG_DECAY = np.float32(-30.0)
"""Less of a state than exp(-30) is left of it for no float32 to see. Sums of these are
subtracted: the smaller they stay, the more digits are left."""
_ZERO = np.float32(0.0)


def selective_scan(
    x: Array, dt: Array, a: Array, b: Array, c: Array, state: Array, real: Array
) -> tuple[Array, Array]:
    """Mamba-1: (y float32 [s, t, d], new state [s, n, d]).

    x and dt [s, t, d], dt before its softplus; a [d, n] negative; b and c [s, t, n]; state
    [s, n, d]; real bool [s, t].
    """
    dt, x, b = _masked(real, dt, x, b)
    decays = lax.optimization_barrier(a.T)  # [n, d]; fused into the exponential it would be slow
    if x.shape[1] == 1:
        state = _scan_step(state, x[:, 0], dt[:, 0], b[:, 0], decays)
        return _read(state, c[:, 0])[:, None], state
    rows = _SCAN_GROUP * min(_SCAN_GROUPS, -(-x.shape[1] // _SCAN_GROUP))
    chunks = tuple(_chunks(v, rows) for v in (x, dt, b, c))

    def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        return _scan_chunk(state, chunk, decays)

    state, y = lax.scan(step, state, chunks)
    return _unchunk(y, x.shape[1]), state


def _scan_step(h: Array, x: Array, dt: Array, b: Array, decays: Array) -> Array:
    """One row of any number of sequences: h [..., n, d], x and dt [..., d], b [..., n]."""
    decay = jnp.exp(dt[..., None, :] * decays.reshape((1,) * (h.ndim - 2) + decays.shape))
    return h * decay + b[..., :, None] * (dt * x)[..., None, :]


def _read(h: Array, c: Array) -> Array:
    """c . h: h [..., n, d], c [..., n] -> [..., d]."""
    return jnp.einsum("...nd,...n->...d", h, c, precision=lax.Precision.HIGHEST)


def _scan_chunk(state: Array, chunk: tuple[Array, ...], decays: Array) -> tuple[Array, Array]:
    """The rows of one chunk: arrays [s, groups * _SCAN_GROUP, ...] -> (new state, y).

    All groups walk their rows at the same time: once from zero, for what each adds to the state
    and how much of the state it leaves, and once more from the state that it really begins with.
    """
    x, dt, b, c = (_groups(v) for v in chunk)  # [_SCAN_GROUP, s, groups, ...]
    n, d = state.shape[1:]

    def walk(h: Array, row: tuple[Array, ...]) -> tuple[Array, None]:
        x, dt, b = row
        return _scan_step(h, x, dt, b, decays), None

    zero = jnp.zeros((*x.shape[1:3], n, d), np.float32)
    added, _ = lax.scan(walk, zero, (x, dt, b))
    left = jnp.exp(jnp.sum(dt, axis=0)[..., None, :] * decays[None, None])

    def carry(h: Array, group: tuple[Array, Array]) -> tuple[Array, Array]:
        added, left = group
        return h * left + added, h

    state, begins = lax.scan(carry, state, (added.swapaxes(0, 1), left.swapaxes(0, 1)))

    def speak(h: Array, row: tuple[Array, ...]) -> tuple[Array, Array]:
        x, dt, b, c = row
        h = _scan_step(h, x, dt, b, decays)
        return h, _read(h, c)

    _, y = lax.scan(speak, begins.swapaxes(0, 1), (x, dt, b, c))
    return state, jnp.moveaxis(y, 0, 2).reshape(chunk[0].shape)


def _groups(v: Array) -> Array:
    """[s, groups * _SCAN_GROUP, k] -> [_SCAN_GROUP, s, groups, k]."""
    s, _, k = v.shape
    return jnp.moveaxis(v.reshape(s, -1, _SCAN_GROUP, k), 2, 0)


def ssd_scan(
    x: Array, dt: Array, a: Array, b: Array, c: Array, state: Array, real: Array
) -> tuple[Array, Array]:
    """Mamba-2: (y float32 [s, t, h, p], new state [s, g, n, h / g * p]).

    x [s, t, h, p]: h heads of p channels; dt [s, t, h] before its softplus; a [h] negative; b and
    c [s, t, g, n]: group g serves h / g heads that follow each other; state [s, g, n, h / g * p];
    real bool [s, t].
    """
    s, t, n_head, p = x.shape
    g = b.shape[2]
    dt, x, b = _masked(real, dt, x, b)
    log_decay = jnp.maximum(dt * a[None, None, :], _MIN_LOG_DECAY).reshape(s, t, g, -1)
    x = (x * dt[..., None]).reshape(s, t, g, -1, p)  # [s, t, g, r, p]: r heads a group
    if t == 1:
        state, y = _ssd_step(state, x[:, 0], log_decay[:, 0], b[:, 0], c[:, 0])
        return y.reshape(s, t, n_head, p), state
    rows = min(_SSD_CHUNK, t)
    chunks = tuple(_chunks(v, rows) for v in (x, log_decay, b, c))
    state, y = lax.scan(_ssd_chunk, state, chunks)
    return _unchunk(y, t).reshape(s, t, n_head, p), state


def _ssd_step(state: Array, x: Array, log_decay: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """One row a sequence: x [s, g, r, p] times dt, log_decay [s, g, r], b and c [s, g, n]."""
    s, g, n, _ = state.shape
    heads = state.reshape(s, g, n, *x.shape[2:])
    new = b[..., None, None] * x[:, :, None]
    state = (heads * jnp.exp(log_decay)[:, :, None, :, None] + new).reshape(state.shape)
    return state, _einsum("sgn,sgnc->sgc", c, state)


def _ssd_chunk(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
    """The rows of one chunk: every row reads the state at the chunk's beginning and, through a
    matrix of decays, the rows up to itself. x [s, l, g, r, p] is times dt already.
    """
    x, log_decay, b, c = chunk
    s, rows, g, r, p = x.shape
    below = np.tril(np.ones((rows, rows), np.float32))
    passed = _einsum("ij,sjgr->sgri", below, log_decay)  # from the chunk's beginning to row i
    # Masked before the exponential: above the diagonal it would overflow.
    between = passed[..., :, None] - passed[..., None, :]
    between = jnp.where(below[None, None, None] > _ZERO, between, np.float32(-np.inf))
    seen = _einsum("sign,sjgn->sgij", c, b)[:, :, None] * jnp.exp(between)
    y = _einsum("sgrij,sjgrp->sigrp", seen, x)
    kept = _einsum("sign,sgnc->sigc", c, state).reshape(x.shape)
    y = y + kept * jnp.exp(jnp.moveaxis(passed, 3, 1))[..., None]
    last = passed[..., -1]
    left = x * jnp.exp(last[..., None] - passed).transpose(0, 3, 1, 2)[..., None]
    added = _einsum("sjgn,sjgc->sgnc", b, left.reshape(s, rows, g, r * p))
    kept = state.reshape(s, g, -1, r, p) * jnp.exp(last)[:, :, None, :, None]
    return kept.reshape(state.shape) + added, y


def _einsum(spec: str, x: Array | np.ndarray, y: Array) -> Array:
    return jnp.einsum(spec, x, y, precision=lax.Precision.HIGHEST)


def _masked(real: Array, dt: Array, x: Array, b: Array) -> tuple[Array, Array, Array]:
    """softplus(dt), x and b, all zero at padding rows: what stands there reaches no state."""

    def where_real(v: Array) -> Array:
        return jnp.where(real.reshape(real.shape + (1,) * (v.ndim - 2)), v, _ZERO)

    return where_real(jax.nn.softplus(dt)), where_real(x), where_real(b)


def _chunks(v: Array, rows: int) -> Array:
    """[s, t, ...] -> [chunks, s, rows, ...], zeros behind the last row."""
    s, t = v.shape[:2]
    n = -(-t // rows)
    if n * rows > t:
        v = jnp.pad(v, ((0, 0), (0, n * rows - t)) + ((0, 0),) * (v.ndim - 2))
    return v.reshape(s, n, rows, *v.shape[2:]).swapaxes(0, 1)


def _unchunk(y: Array, t: int) -> Array:
    """[chunks, s, rows, ...] -> [s, t, ...]."""
    n, s, rows = y.shape[:3]
    return y.swapaxes(0, 1).reshape(s, n * rows, *y.shape[3:])[:, :t]
