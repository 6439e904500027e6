"""From one row of logits to one token id, as llama.cpp's chain of samplers.

Knows numbers, no model, and of text what a `SamplerVocab` tells. A request has a `Sampler` of its
own. Here is the host's form, without jax; `in_graph` is the device's, where only the kind of a
chain shapes a graph, and its parameters are data.
"""

from minfer_jax.sampling.order import DEFAULT_SAMPLERS, parse_sampler_letters, parse_samplers
from minfer_jax.sampling.params import SamplingParams, draw_seed
from minfer_jax.sampling.sampler import Sampler
from minfer_jax.sampling.vocab import SamplerVocab, sampler_vocab

__all__ = [
    "DEFAULT_SAMPLERS",
    "Sampler",
    "SamplerVocab",
    "SamplingParams",
    "draw_seed",
    "parse_sampler_letters",
    "parse_samplers",
    "sampler_vocab",
]
