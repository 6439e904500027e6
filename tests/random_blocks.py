"""Random matrices of every block format, as a file stores them."""

import numpy as np

from minfer_jax.gguf import BLOCK_FORMATS, GGMLType

_HALVES = np.dtype("<f2")


def random_blocks(type_: GGMLType, n_out: int, n_in: int, seed: int = 0) -> np.ndarray:
    """Random bytes with scales near 1/100: uint8 [n_out, row bytes]."""
    fmt = BLOCK_FORMATS[type_]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (n_out, n_in // fmt.block * fmt.nbytes), np.uint8)
    blocks = raw.view(fmt.layout)
    for name in fmt.layout.names or ():
        if fmt.layout[name].base == _HALVES:
            blocks[name] = rng.normal(size=blocks[name].shape) * 0.01
    if type_ == GGMLType.F32:
        blocks["values"] = rng.normal(size=blocks["values"].shape)
    if type_ == GGMLType.BF16:  # the upper halves of float32 numbers
        floats = rng.normal(size=blocks["bits"].shape).astype(np.float32)
        blocks["bits"] = floats.view(np.uint32) >> 16
    return raw
