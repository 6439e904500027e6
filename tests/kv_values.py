"""Values that are awkward to store in KV regions."""

import numpy as np


def awkward(d):
    """Rows [n, d] of many magnitudes, with ties of rounding and of the largest value."""
    rng = np.random.default_rng(0)
    normal = rng.normal(size=(400, d))
    rows = [normal * 10.0 ** rng.uniform(-6, 4, (400, 1)), np.zeros((2, d))]
    whole = rng.integers(-127, 128, (100, d)) + rng.choice([0.0, 0.5, -0.5], (100, d))
    whole[:, ::32] = 127  # a scale of 1: halves are ties
    whole[:, 1::32] = np.nextafter(np.float32(0.5), np.float32(0.0))
    eighths = rng.integers(-16, 17, (100, d)) / 2
    eighths[:, 5::32], eighths[:, 9::32] = 8, -8  # the first of the two counts
    rows += [whole, eighths, -eighths, normal.round()]
    return np.concatenate([*rows, *(near_ties(rng, d, most) for most in (127, 8))]).astype(
        np.float32
    )


def near_ties(rng, d, most):
    """Values on and beside the middles between quants, which go up to `most`."""
    scale = rng.uniform(0.5, 2, (500, 1)).astype(np.float32)
    x = (rng.integers(1 - most, most - 1, (500, d)) + np.float32(0.5)) * scale
    x[:, ::32] = -most * scale
    towards = rng.choice(np.array([-np.inf, 0.0, np.inf], np.float32), (500, d))
    beside = np.nextafter(x, towards, dtype=np.float32)
    return np.where(np.arange(d) % 32 == 0, x, beside)
