"""Graph identity and reuse: `GraphParams`, the table of 8, compilation and the disk cache.

Knows no model: it is handed a function that makes step functions, and keeps what they compile to.
Import the modules themselves: `params` needs no jax.
"""
