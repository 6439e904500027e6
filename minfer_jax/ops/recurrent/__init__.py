"""Layers that carry a state from token to token: the maths, in forms that many rows share.

Every function sees rows as [s, t, ...]: t rows of each of s sequences, padding last. It takes the
sequences' states and returns (outputs, new states). One row is a plain step; more are computed in
chunks, whose number of sequential steps is a small part of t. Knows nothing of models and memory.
"""
