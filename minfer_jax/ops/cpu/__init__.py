"""Native kernels for the CPU: an optional library, compiled when the package is installed.

`library` loads it and packs weights for it; `calls` are its kernels as jax functions. Without the
library (no compiler, another platform) everything runs through XLA.
"""
