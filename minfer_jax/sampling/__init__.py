"""From one row of logits to one token id, on the host.

Knows numbers only: no model, no text, no jax. A request has a `Sampler` of its own; its
parameters are data, none of them shapes a graph.
"""

from minfer_jax.sampling.params import SamplingParams, draw_seed
from minfer_jax.sampling.sampler import Sampler

__all__ = ["Sampler", "SamplingParams", "draw_seed"]
