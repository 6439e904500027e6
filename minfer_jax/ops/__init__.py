"""The maths that graphs are made of: free functions over traced arrays.

Nothing here knows a model, a file or a cache. Shapes stand at the line's end where they matter:
`n` rows (tokens), `h` query heads, `g` query heads per KV head, `d` head width, `c` cells.
Import the modules themselves: `rope_spec` needs no jax, and `info` reads it without.
"""
