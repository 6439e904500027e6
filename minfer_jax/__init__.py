"""minfer_jax: a local LLM inference engine on JAX. GGUF files in, one compiled graph per shape.

    import minfer_jax as mj
    lm = mj.load("smollm2", n_ctx=2048)
    lm.generate("The capital of France is", n=8).text

Names are resolved at first use: importing the package imports neither jax nor numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from minfer_jax.errors import (
    BatchError,
    ContextFullError,
    FetchError,
    GGUFError,
    GrammarError,
    MinferError,
    ModelError,
    SamplingError,
    TemplateError,
    TokenizerError,
    UsageError,
)

if TYPE_CHECKING:
    from minfer_jax import tokenizer
    from minfer_jax.batch import Batch
    from minfer_jax.lm import load

__all__ = [
    "Batch",
    "BatchError",
    "ContextFullError",
    "FetchError",
    "GGUFError",
    "GrammarError",
    "MinferError",
    "ModelError",
    "SamplingError",
    "TemplateError",
    "TokenizerError",
    "UsageError",
    "load",
    "tokenizer",
]


def __getattr__(name: str) -> Any:
    if name == "Batch":
        return importlib.import_module("minfer_jax.batch").Batch
    if name == "load":
        return importlib.import_module("minfer_jax.lm").load
    if name == "tokenizer":
        return importlib.import_module("minfer_jax.tokenizer")
    raise AttributeError(f"module 'minfer_jax' has no attribute {name!r}")
