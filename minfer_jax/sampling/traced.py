"""Single samplers on traced rows: what `samplers.py` does on the host, for a graph.

Candidates come in and go out; a row is an output. Shapes are static, so what is ruled out stays in
its place with a logit of -inf. Arithmetic is float32: what is kept and drawn is the same as on the
host but for candidates whose cumulative probability lies within rounding of the edge.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from minfer_jax.sampling.philox import KEY_STEPS, MULTIPLIERS, ROUNDS
from minfer_jax.sampling.traced_rows import (
    INF,
    ZERO,
    first_highest,
    has_nan,
    highest,
    inverted,
    places,
    row_sum,
)

NONE = np.int32(-1)


@dataclass(frozen=True)
class Candidates:
    """Tokens that may still be chosen: `logits` float32 [n, m], `ids` int32 [n, m].

    Without `ids` they are the whole vocabulary, and a token's place is its id. `ordered` says that
    the logits of a row descend, the lowest id first among equals; until then ids ascend.
    """

    logits: Array
    ids: Array | None = None
    ordered: bool = False

    def keep(self, which: Array) -> Candidates:
        """Those of a mask, which rules out the end of an order only."""
        return Candidates(jnp.where(which, self.logits, -INF), self.ids, self.ordered)

    def at(self, place: Array) -> Array:
        """The tokens at places [n, k]."""
        return place if self.ids is None else jnp.take_along_axis(self.ids, place, 1, mode="clip")

    def top(self) -> Array:
        """The highest logit of each row: [n, 1]."""
        # Not the first one of an order: XLA then sorts instead of selecting.
        return first_highest(self.logits)[0]

    def weights(self) -> Array:
        """Probabilities up to a common factor, the highest being 1: [n, m]."""
        return jnp.exp(self.logits - self.top())


def checked(logits: Array) -> tuple[Candidates, Array]:
    """The whole vocabulary, and which rows can be used: neither a NaN nor all -inf [n, 1].

    Where some logits are +inf, only those remain, as equals. Zeros lose their sign.
    """
    top, _ = first_highest(logits)
    infinite = jnp.where(logits == INF, ZERO, -INF)
    finite = jnp.where(logits == ZERO, ZERO, logits)
    usable = (top > -INF) & ~has_nan(logits)
    return Candidates(jnp.where(top == INF, infinite, finite)), usable


def greedy(logits: Array) -> Array:
    """The best of unchanged logits: tokens [n, 1], -1 in rows that cannot be used."""
    top, first = first_highest(logits)
    return jnp.where((top > -INF) & ~has_nan(logits), first, NONE)


def in_order(c: Candidates) -> Candidates:
    """The same candidates in order. Sorting a vocabulary of 49k takes a CPU 9 ms."""
    if c.ordered:
        return c
    falling, place = lax.sort((-c.logits, places(c.logits)), dimension=1, is_stable=True)
    return Candidates(-falling, c.at(place), ordered=True)


def head(c: Candidates, k: int) -> Candidates:
    """The k highest of each row in order, or all if they are fewer."""
    if c.ordered or c.ids is not None or k >= c.logits.shape[1]:
        return in_order(c)
    return Candidates(*highest(c.logits, k), ordered=True)


def logit_bias(c: Candidates, ids: Array, bias: Array) -> Candidates:
    """Add `bias` float32 [n, b] to tokens `ids` int32 [n, b] of a whole vocabulary; -1: none."""
    return Candidates(c.logits.at[_cells(c.logits, ids)].add(bias, mode="drop"))


def penalties(
    c: Candidates,
    window: Array,
    n_vocab: int,
    *,
    repeat: Array,
    frequency: Array,
    presence: Array,
) -> Candidates:
    """Make tokens of `window` int32 [n, w] less likely; -1: none."""
    # A table of the vocabulary costs less than comparing each with each.
    counts = jnp.zeros((len(window), n_vocab), jnp.float32)
    counts = counts.at[_cells(counts, window)].add(np.float32(1.0), mode="drop")

    def less(old: Array, ids: Array) -> Array:
        times = jnp.take_along_axis(counts, ids, 1, mode="clip")
        repeated = jnp.where(old <= ZERO, old * repeat, old / repeat)
        return jnp.where(times > ZERO, repeated - times * frequency - presence, old)

    if c.ids is None:
        # A token may stand in the window twice: both places then write the same number.
        new = less(jnp.take_along_axis(c.logits, window, 1, mode="clip"), window)
        return Candidates(c.logits.at[_cells(c.logits, window)].set(new, mode="drop"))
    ids, logits = c.ids, c.logits
    if c.ordered:
        ids, logits = lax.sort((ids, logits), dimension=1)
    return Candidates(less(logits, ids), ids)


def top_k(c: Candidates, k: Array, width: int) -> Candidates:
    """Keep the k <= width highest; `k` int32 [n, 1], 0 or less: `width` of them."""
    c = head(c, width)
    return c.keep((places(c.logits) < k) | (k <= np.int32(0)))


def top_p(c: Candidates, p: Array, total: Array | None = None) -> tuple[Candidates, Array]:
    """Keep the smallest head of probability >= p; also says in which rows it was reached [n, 1].

    `c` is in order. `total` is the sum of all weights, if there are more than these candidates.
    """
    weights, place = c.weights(), places(c.logits)
    reached = jnp.cumsum(weights / (row_sum(weights) if total is None else total), axis=1) >= p
    end = np.int32(place.shape[1])
    last = jnp.min(jnp.where(reached, place, end), axis=1, keepdims=True)
    return c.keep((place <= last) | (p >= np.float32(1.0))), last < end


def min_p(c: Candidates, log_p: Array) -> Candidates:
    """Keep tokens at least p times as likely as the likeliest one, which always stays."""
    top = c.top()
    return c.keep((c.logits >= top + log_p) | (c.logits >= top))


def temperature(c: Candidates, temp: Array) -> Candidates:
    """Divide by the temperature; only the first maximum stays where that has no finite result."""
    top, first = first_highest(c.logits)
    finite = (temp > ZERO) & jnp.isfinite(top / temp)
    only = jnp.where(places(c.logits) == first, top, -INF)
    return Candidates(jnp.where(finite, c.logits / temp, only), c.ids, c.ordered)


def best(c: Candidates) -> Array:
    """The first of the highest: tokens [n, 1], -1 if none is left."""
    top, first = first_highest(c.logits)
    return jnp.where(jnp.isfinite(top), c.at(first), NONE)


def draw(c: Candidates, u: Array) -> Array:
    """Invert the cumulative distribution, in the order of `c`, at `u` float32 [n, 1] in [0, 1).

    Tokens [n, 1]: never one that is ruled out; -1 if none is left.
    """
    return jnp.where(jnp.isfinite(c.top()), c.at(inverted(c.weights(), u)), NONE)


def uniform(low: Array, high: Array, count: Array) -> Array:
    """Word 0 of Philox4x32-10's block `count` as float32 in [0, 1), rounded down to 24 bits.

    The key's words and the count are uint32, of one shape. See `philox.py`.
    """
    c0, c1, c2, c3 = count, *(jnp.zeros_like(count) for _ in range(3))
    for _ in range(ROUNDS):
        first, second = _product(MULTIPLIERS[0], c0), _product(MULTIPLIERS[1], c2)
        c0, c1 = second[0] ^ c1 ^ low, second[1]
        c2, c3 = first[0] ^ c3 ^ high, first[1]
        low, high = low + np.uint32(KEY_STEPS[0]), high + np.uint32(KEY_STEPS[1])
    return (c0 >> np.uint32(8)).astype(jnp.float32) * np.float32(2.0**-24)


def _product(a: int, b: Array) -> tuple[Array, Array]:
    """The high and the low word of a * b, by halves of 16 bits: there are no 64-bit numbers."""
    half, sixteen = np.uint32(0xFFFF), np.uint32(16)
    a0, a1 = np.uint32(a & 0xFFFF), np.uint32(a >> 16)
    b0, b1 = b & half, b >> sixteen
    middle = a1 * b0 + (a0 * b0 >> sixteen)
    other = a0 * b1 + (middle & half)
    return a1 * b1 + (middle >> sixteen) + (other >> sixteen), np.uint32(a) * b


def _cells(logits: Array, ids: Array) -> tuple[np.ndarray, Array]:
    """Where in `logits` the tokens are; outside if they are none, because -1 would be the last."""
    n, m = logits.shape
    return np.arange(n, dtype=np.int32)[:, None], jnp.where(ids < np.int32(0), np.int32(m), ids)
