"""GGUF files: checked metadata, memory-mapped tensors, block formats, split files.

The first room that data walks through. Knows nothing of tokenizers, models or jax; what it hands
out are Python values, read-only numpy views and the arithmetic of block formats.
"""

from minfer_jax.gguf.blocks import BLOCK_FORMATS, BlockFormat, dequantize
from minfer_jax.gguf.file import GGUFFile, open_gguf
from minfer_jax.gguf.types import BLOCK_SIZES, GGMLType, TensorInfo

__all__ = [
    "BLOCK_FORMATS",
    "BLOCK_SIZES",
    "BlockFormat",
    "GGMLType",
    "GGUFFile",
    "TensorInfo",
    "dequantize",
    "open_gguf",
]
