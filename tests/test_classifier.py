"""`classifier`: scores worked by hand, and which heads are refused.

Heads of whole models are judged against llama.cpp in test_conformance_encoders.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from gguf_builder import Tensor, f32_tensor, write_gguf

from minfer_jax.classifier import read_classifier
from minfer_jax.errors import ModelError
from minfer_jax.gguf import open_gguf

HIDDEN = np.float32([[1.0, 2.0], [5.0, -1.0], [0.0, 3.0]])
DENSE = f32_tensor("cls.weight", [[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]])
DENSE_BIAS = f32_tensor("cls.bias", [0.0, -2.0, 1.0])
OUT = f32_tensor("cls.output.weight", [[1.0, 1.0, 1.0], [0.0, 2.0, 0.0]])
OUT_BIAS = f32_tensor("cls.output.bias", [0.0, 0.5])
DIRECT = f32_tensor("cls.output.weight", [[1.0, 10.0], [0.0, 1.0]])
LABELS = ["no", "yes"]


@pytest.fixture
def read(tmp_path):
    def read(*tensors, labels=LABELS, arch="bert", causal=False, n_embd=2):
        kv = {} if labels is None else {f"{arch}.classifier.output_labels": labels}
        file = open_gguf(write_gguf(tmp_path / "x.gguf", {"x": 1, **kv}, tensors))
        return read_classifier(file, SimpleNamespace(arch=arch, causal=causal, n_embd=n_embd))

    return read


def test_dense_tanh_and_output(read):
    t = np.tanh([1.0, 0.0, 0.0])
    scores = read(DENSE, DENSE_BIAS, OUT, OUT_BIAS).scores(HIDDEN)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, [t[0], 0.5], rtol=1e-6)


def test_biases_may_be_missing(read):
    t = np.tanh([1.0, 2.0, -1.0])
    np.testing.assert_allclose(read(DENSE, OUT).scores(HIDDEN), [t.sum(), 2 * t[1]], rtol=1e-6)


def test_a_direct_projection(read):
    np.testing.assert_array_equal(read(DIRECT).scores(HIDDEN), [21.0, 2.0])


def test_a_dense_layer_alone_has_its_tanh(read):
    one = f32_tensor("cls.weight", [[0.5, 0.25]])
    np.testing.assert_allclose(read(one, labels=None).scores(HIDDEN), [np.tanh(1.0)], rtol=1e-6)


def test_a_causal_model_is_judged_by_its_last_token(read):
    np.testing.assert_array_equal(read(DIRECT, causal=True).scores(HIDDEN), [30.0, 3.0])


def test_qwen3_makes_probabilities(read):
    scores = read(DIRECT, arch="qwen3", causal=True).scores(HIDDEN)
    p = 1.0 / (1.0 + np.exp(-27.0))
    np.testing.assert_allclose(scores, [p, 1.0 - p], rtol=1e-4)
    huge = read(DIRECT, arch="qwen3", causal=True).scores(HIDDEN * np.float32(1e4))
    np.testing.assert_array_equal(huge, [1.0, 0.0])


def test_a_single_row_may_have_one_dimension(read):
    row = Tensor("cls.output.weight", (2,), 0, np.float32([1.0, 10.0]).tobytes())
    np.testing.assert_array_equal(read(row, labels=None).scores(HIDDEN), [21.0])


def test_quantized_weights(read):
    # A Q8_0 block of 32: scale 0.5, quants 2 and 4 in front.
    block = np.float16([0.5]).tobytes() + np.int8([2, 4] + [0] * 30).tobytes()
    row = Tensor("cls.output.weight", (32, 1), 8, block)
    scores = read(row, labels=None, n_embd=32).scores(np.ones((1, 32), np.float32))
    np.testing.assert_array_equal(scores, [3.0])


@pytest.mark.parametrize(
    ("tensors", "labels", "line"),
    [
        ([], LABELS, r"no classifier \(cls\.weight, cls\.output\.weight\): pooling 'rank' is for"),
        ([DENSE_BIAS, OUT_BIAS], LABELS, "no classifier"),
        ([DIRECT], ["a"], "the classifier makes 2 scores for 1 labels"),
        ([DIRECT], None, "the classifier makes 2 scores for 1 labels"),
        ([DENSE], LABELS, "the classifier makes 3 scores for 2 labels"),
        ([OUT], LABELS, r"'cls\.output\.weight' is \[2, 3\] \(F32\), expected rows of 2"),
        ([DENSE, DIRECT], LABELS, r"'cls\.output\.weight' is \[2, 2\] \(F32\), expected rows of 3"),
        ([DENSE, OUT, f32_tensor("cls.bias", [1.0])], LABELS, r"'cls\.bias' is \[1\] .*\[3\]$"),
        (
            [Tensor("cls.weight", (2, 1), 99, bytes(8))],
            None,
            r"'cls\.weight' is \[1, 2\] \(type id",
        ),
    ],
)
def test_heads_that_do_not_fit(read, tensors, labels, line):
    with pytest.raises(ModelError, match=rf"x\.gguf: .*{line}"):
        read(*tensors, labels=labels)
