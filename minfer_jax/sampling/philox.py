"""Random numbers that a seed and a count decide: Philox4x32-10.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A block of
four words is a function of a key and a counter and of nothing else, so a draw can be computed
anywhere, on the host or in a graph, without a state to carry along.
"""

from __future__ import annotations

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # the golden ratio and sqrt(3) - 1, as fractions of 2**32

_WORD = 0xFFFFFFFF


def philox_key(seed: int) -> tuple[int, int]:
    """The key of a seed of 64 bits: its low and its high word."""
    return seed & _WORD, seed >> 32 & _WORD


def philox4x32(key: tuple[int, int], counter: int) -> tuple[int, int, int, int]:
    """The block of four words of 32 bits at `counter`, a number of 128 bits."""
    k0, k1 = key
    c0, c1, c2, c3 = ((counter >> shift) & _WORD for shift in (0, 32, 64, 96))
    for _ in range(ROUNDS):
        first, second = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1 = second >> 32 ^ c1 ^ k0, second & _WORD
        c2, c3 = first >> 32 ^ c3 ^ k1, first & _WORD
        k0, k1 = (k0 + KEY_STEPS[0]) & _WORD, (k1 + KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, draw: int, k: int = 0) -> float:
    """Word `k` (0 to 3) of block `draw` as a number in [0, 1), a multiple of 2**-32."""
    return philox4x32(philox_key(seed), draw)[k] * 2.0**-32
