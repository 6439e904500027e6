"""The head of a re-ranker: from the hidden states of a text (a query and a document) to scores.

On the host, once a text, so in numpy; the graph that made the hidden states does not know it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minfer_jax.errors import ModelError
from minfer_jax.gguf import GGUFFile, dequantize
from minfer_jax.models.hparams import HParams
from minfer_jax.pooling import pool

_SOFTMAX = ("qwen3",)
"""Architectures whose scores are made probabilities."""


@dataclass(frozen=True)
class _Linear:
    weight: np.ndarray
    """[out, in]"""
    bias: np.ndarray | None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        y = self.weight @ x
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class Classifier:
    """Scores of a text from its first token's hidden state, or its last's in causal models."""

    causal: bool
    dense: _Linear | None
    """Followed by a tanh."""
    out: _Linear | None
    softmax: bool

    def scores(self, hidden: np.ndarray) -> np.ndarray:
        """float32 [labels] of the hidden states [n, n_embd] of one text."""
        x = pool(hidden, "last" if self.causal else "cls")
        if self.dense:
            x = np.tanh(self.dense(x))
        if self.out:
            x = self.out(x)
        if self.softmax:
            x = np.exp(x - x.max())
            x /= x.sum()
        return x.astype(np.float32)


def read_classifier(file: GGUFFile, hp: HParams) -> Classifier:
    """The classifier of `file`; raises `ModelError` if it has none, or one of another shape."""
    labels = file.get_array(f"{hp.arch}.classifier.output_labels", None, kind="str")
    n_labels = 1 if labels is None else len(labels)
    dense = _linear(file, "cls", hp.n_embd)
    width = hp.n_embd if dense is None else len(dense.weight)
    out = _linear(file, "cls.output", width)
    last = out or dense
    if last is None:
        raise ModelError(
            f"{file.path}: no classifier (cls.weight, cls.output.weight): pooling 'rank' is for"
            " re-rankers"
        )
    if len(last.weight) != n_labels:
        raise ModelError(
            f"{file.path}: the classifier makes {len(last.weight)} scores for {n_labels} labels"
        )
    return Classifier(causal=hp.causal, dense=dense, out=out, softmax=hp.arch in _SOFTMAX)


def _linear(file: GGUFFile, name: str, n_in: int) -> _Linear | None:
    """The matrix and bias `name`; of a single row files may leave the second dimension out."""
    info = file.tensors.get(f"{name}.weight")
    if info is None:
        return None
    if info.type is None or not 1 <= len(info.shape) <= 2 or info.shape[-1] != n_in:
        raise ModelError(
            f"{file.path}: tensor {info.name!r} is {list(info.shape)} ({info.type_name()}),"
            f" expected rows of {n_in}"
        )
    weight = dequantize(file.raw(info.name), info.type, n_in)
    bias = file.tensors.get(f"{name}.bias")
    if bias is None:
        return _Linear(weight, None)
    if bias.type is None or bias.shape != (len(weight),):
        raise ModelError(
            f"{file.path}: tensor {bias.name!r} is {list(bias.shape)} ({bias.type_name()}),"
            f" expected [{len(weight)}]"
        )
    return _Linear(weight, dequantize(file.raw(bias.name), bias.type, len(weight))[0])
