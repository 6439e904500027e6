"""`pooling`: vectors worked by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minfer_jax.errors import UsageError
from minfer_jax.pooling import POOLINGS, cosine_similarity, normalize, pool

HIDDEN = np.array([[1.0, -2.0], [3.0, 5.0], [8.0, 0.0]], np.float32)


def test_the_numbers_of_gguf():
    assert POOLINGS.index("mean") == 1 and POOLINGS.index("rank") == 4
    assert POOLINGS == ("none", "mean", "cls", "last", "rank")


@pytest.mark.parametrize(
    ("kind", "vector"),
    [("none", HIDDEN), ("mean", [4.0, 1.0]), ("cls", [1.0, -2.0]), ("last", [8.0, 0.0])],
)
def test_pool(kind, vector):
    out = pool(HIDDEN, kind)
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out, np.float32(vector))


def test_a_mean_of_many_rows_is_not_rounded_on_the_way():
    hidden = np.full((1 << 16, 1), 0.1, np.float32)
    hidden[0] = 4096.0
    want = (4096.0 + 65535 * float(np.float32(0.1))) / 65536
    assert pool(hidden, "mean")[0] == np.float32(want)


def test_rank_is_no_vector():
    with pytest.raises(UsageError, match="pooling 'rank' does not make a vector"):
        pool(HIDDEN, "rank")


@pytest.mark.parametrize(
    ("p", "want"),
    [
        (-1, [3.0, 0.0, -4.0]),
        (0, [24570.0, 0.0, -32760.0]),
        (1, [3 / 7, 0.0, -4 / 7]),
        (2, [0.6, 0.0, -0.8]),
        (3, [3 / 91 ** (1 / 3), 0.0, -4 / 91 ** (1 / 3)]),
        (100000, [0.75, 0.0, -1.0]),
    ],
)
def test_normalize(p, want):
    vectors = np.array([[3.0, 0.0, -4.0], [0.0, 0.0, 0.0]], np.float32)
    out = normalize(vectors, p)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out[0], want, rtol=1e-6)
    np.testing.assert_array_equal(out[1], 0.0)
    np.testing.assert_array_equal(normalize(vectors[0], p), out[0])


def test_euclidean_unless_told_otherwise():
    np.testing.assert_allclose(normalize(np.float32([3.0, 4.0])), [0.6, 0.8], rtol=1e-6)


@pytest.mark.parametrize("p", [-2, True, 2.0, "2", 1 << 31, None])
def test_norms_that_there_are_not(p):
    with pytest.raises(UsageError, match=r"normalize is .*; allowed: -1 \(none\), 0 "):
        normalize(HIDDEN, p)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1), st.integers(1, 400))
def test_a_normalized_vector_has_length_one(values, p):
    vector = np.array(values, np.float32)
    length = (np.abs(normalize(vector, p).astype(np.float64)) ** p).sum() ** (1.0 / p)
    assert length == pytest.approx(1.0 if vector.any() else 0.0, rel=1e-5)


def test_cosine_similarity():
    vectors = np.float32([[3.0, 4.0], [-30.0, -40.0], [4.0, 3.0], [0.0, 0.0], [0.0, 0.0]])
    want = [
        [1.0, -1.0, 0.96, 0.0, 0.0],
        [-1.0, 1.0, -0.96, 0.0, 0.0],
        [0.96, -0.96, 1.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 1.0, 1.0],
        [0.0, 0.0, 0.0, 1.0, 1.0],
    ]
    np.testing.assert_allclose(cosine_similarity(vectors), want, atol=1e-15)
