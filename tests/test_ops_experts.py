"""Choice of experts and products grouped by them, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_blocks import random_blocks

from minfer_jax.gguf import BLOCK_FORMATS, GGMLType, dequantize
from minfer_jax.ops.activation import silu
from minfer_jax.ops.experts import (
    block_rows,
    by_expert,
    choose_experts,
    each_matrix,
    expert_ffn,
)
from minfer_jax.ops.linear import CPU_CHUNK, matmul
from minfer_jax.ops.qtensor import QTensor
from minfer_jax.ops.unrolled import UnrolledTensor, pack

N_IN = 64
FORMS = ("planes", "unrolled")


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def choices(n, k, n_expert, seed=0):
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(n_expert)[:k] for _ in range(n)]).astype(np.int32)


def choose(logits, bias=None, **options):
    defaults = {"gating": "softmax", "normalize": False, "scale": 1.0}
    choice = jax.jit(lambda x, b: choose_experts(x, b, **{**defaults, **options}))
    ids, weights = choice(logits, bias)
    assert ids.dtype == jnp.int32 and weights.dtype == jnp.float32
    assert ids.shape == weights.shape == (len(logits), options["n_used"])
    return np.asarray(ids), np.asarray(weights)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def matrix(form, type_, n_out, n_in=N_IN, seed=0):
    """A random matrix in a form, and its values."""
    raw = random_blocks(type_, n_out, n_in, seed)
    values = dequantize(raw, type_, n_in)
    if form == "planes":
        blocks = BLOCK_FORMATS[type_].unpack(raw)
        planes = {name: jnp.asarray(plane) for name, plane in blocks.items()}
        return QTensor(planes, type_, (n_out, n_in)), values
    planes = {name: jnp.asarray(plane) for name, plane in pack([raw], type_).items()}
    return UnrolledTensor(planes, type_, (n_out, n_in)), values


def multiply(x, w):
    if isinstance(w, UnrolledTensor):
        return w.matmul(x)
    return matmul(x, w, exact=True, chunk=CPU_CHUNK)


def assert_close(found, expected, tolerance=2e-6):
    found = np.asarray(found)
    assert found.dtype == np.float32 and found.shape == expected.shape
    assert np.abs(found - expected).max() < tolerance * np.abs(expected).max()


# The choice.


def test_the_most_likely_experts_with_their_probabilities():
    logits = random(7, 9)
    ids, weights = choose(logits, n_used=3)
    probs = softmax(logits.astype(np.float64))
    np.testing.assert_array_equal(ids, np.argsort(-probs, axis=-1)[:, :3])
    assert_close(weights, np.take_along_axis(probs, ids, -1))


def test_sigmoid_gating_weighs_every_expert_by_itself():
    logits = random(7, 9)
    ids, weights = choose(logits, n_used=3, gating="sigmoid")
    assert_close(weights, np.take_along_axis(sigmoid(logits.astype(np.float64)), ids, -1))


def test_a_bias_decides_who_is_chosen_but_not_the_weights():
    logits = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    bias = np.array([0.0, -1.0, 0.0, 1.0], np.float32)
    ids, weights = choose(logits, bias, n_used=2, gating="sigmoid")
    assert ids.tolist() == [[3, 0]]  # 0.27 + 1 before 0.88; expert 1 has lost a whole unit
    assert_close(weights, sigmoid(np.array([[-1.0, 2.0]])))


def test_normalized_weights_sum_up_to_the_scale():
    logits = random(7, 9)
    plain = choose(logits, n_used=4)[1].astype(np.float64)
    weights = choose(logits, n_used=4, normalize=True, scale=2.5)[1]
    assert_close(weights, 2.5 * plain / plain.sum(-1, keepdims=True))
    assert_close(choose(logits, n_used=4, scale=2.5)[1], 2.5 * plain)


def test_a_sum_of_nearly_nothing_is_not_divided_by():
    """llama.cpp divides by the least normal float16 at least."""
    _, weights = choose(
        np.full((1, 4), -30.0, np.float32), n_used=2, gating="sigmoid", normalize=True
    )
    assert_close(weights, np.full((1, 2), np.exp(-30.0) / 6.103515625e-5), 1e-5)


def test_experts_are_taken_from_the_best_groups_only():
    """Groups of three; a group counts as much as its two best experts together."""
    scores = np.array([[9, 1, 1, 6, 6, 1, 8, 1, 3, 5, 5, 5]], np.float32) / 10  # 10 12 11 10
    logits = np.log(scores / (1 - scores))
    ids, _ = choose(logits, n_used=3, gating="sigmoid", n_group=4, n_group_used=2)
    assert ids.tolist()[0] == [6, 3, 4]
    ids, _ = choose(logits, n_used=3, gating="sigmoid", n_group=4, n_group_used=1)
    assert sorted(ids.tolist()[0]) == [3, 4, 5]


def test_the_bias_counts_for_the_groups_too():
    logits = np.zeros((1, 4), np.float32)
    bias = np.array([0.0, 0.0, 0.1, 0.0], np.float32)
    options = {"n_used": 2, "gating": "sigmoid", "n_group": 2, "n_group_used": 1}
    assert choose(logits, bias, **options)[0].tolist() == [[2, 3]]
    assert choose(logits, -bias, **options)[0].tolist() == [[0, 1]]


def test_groups_of_one_expert():
    logits = random(5, 6)
    ids, _ = choose(logits, n_used=2, n_group=6, n_group_used=2)
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=-1)[:, :2])


# Answers.


@pytest.mark.parametrize(
    ("m", "n_expert", "rows"),
    [
        (1, 8, 1),
        (8, 8, 1),
        (16, 8, 1),
        (17, 8, 4),
        (32, 8, 4),
        (33, 8, 8),
        (3072, 64, 64),
        (6, 2, 4),
    ],
)
def test_rows_of_a_block(m, n_expert, rows):
    assert block_rows(m, n_expert) == rows


def asked(x, ids, n_expert):
    """Answers of experts that add a thousand times their number, and the blocks that were asked."""
    blocks = []

    def answer(rows, expert):
        jax.debug.callback(lambda e, r: blocks.append((int(e), np.asarray(r))), expert, rows)
        return jnp.concatenate([rows, rows[:, :1] + expert.astype(jnp.float32) * 1000], axis=1)

    y = jax.jit(lambda x, ids: by_expert(x, ids, n_expert, answer))(x, ids)
    jax.effects_barrier()
    return np.asarray(y), blocks


@pytest.mark.parametrize("n", [1, 5, 50])
@pytest.mark.parametrize(("k", "n_expert"), [(1, 1), (2, 4), (3, 16)])
def test_every_choice_is_answered_by_its_expert(n, k, n_expert):
    x, ids = random(n, 1, 5), choices(n, min(k, n_expert), n_expert)
    y, blocks = asked(x, ids, n_expert)
    assert y.shape == (*ids.shape, 6)
    np.testing.assert_array_equal(y[..., :5], np.broadcast_to(x, (*ids.shape, 5)))
    np.testing.assert_array_equal(y[..., 5], x[..., 0] + ids.astype(np.float32) * 1000)
    assert {e for e, _ in blocks} == set(ids.ravel().tolist())


def test_every_choice_has_a_row_of_its_own():
    x, ids = random(9, 3, 5), choices(9, 3, 7)
    y, _ = asked(x, ids, 7)
    np.testing.assert_array_equal(y[..., :5], x)


@pytest.mark.parametrize(("n", "n_expert"), [(2, 64), (40, 4)])
def test_an_expert_is_asked_once_a_block_and_others_not_at_all(n, n_expert):
    ids = choices(n, 2, n_expert)
    _, blocks = asked(random(n, 1, 5), ids, n_expert)
    counts = np.bincount(ids.ravel(), minlength=n_expert)
    rows = block_rows(ids.size, n_expert)
    expected = [e for e in range(n_expert) for _ in range(-(-counts[e] // rows))]
    assert sorted(e for e, _ in blocks) == expected
    assert all(len(r) == rows for _, r in blocks)


def test_all_rows_may_choose_one_expert():
    ids = np.full((33, 1), 6, np.int32)
    y, blocks = asked(random(33, 1, 5), ids, 8)
    assert {e for e, _ in blocks} == {6} and (np.round(y[..., 5] / 1000) == 6).all()


def test_ids_past_the_last_expert_ask_nobody():
    ids = choices(6, 2, 4)
    ids[1] = ids[4] = 4
    y, blocks = asked(random(6, 1, 5), ids, 4)
    real = [0, 2, 3, 5]
    np.testing.assert_array_equal(np.round(y[real][..., 5] / 1000), ids[real])
    assert np.isfinite(y).all()
    assert sorted({e for e, _ in blocks}) == sorted(set(ids[real].ravel().tolist()))
    assert asked(random(6, 1, 5), np.full((6, 2), 4, np.int32), 4)[1] == []


# Feed-forward.


def reference(x, ids, gate, up, down):
    """gate, up [n_expert, ff, in], down [n_expert, out, ff] -> float64 [n, k, out]."""
    out = np.empty((*ids.shape, down.shape[1]))
    for i, row in enumerate(x.astype(np.float64)):
        for j, e in enumerate(ids[i]):
            g, u = gate[e] @ row, up[e] @ row
            out[i, j] = down[e] @ (g * sigmoid(g) * u)
    return out


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("type_", [GGMLType.F32, GGMLType.Q4_0])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [1, 40])
def test_feed_forward(form, type_, joined, n):
    n_expert, k, ff, n_out = 6, 2, 96, 33
    down, down_values = matrix(form, type_, n_expert * n_out, ff, seed=1)
    if joined:
        w, values = matrix(form, type_, n_expert * 2 * ff, seed=2)
        matrices, halves = [w], values.reshape(n_expert, 2, ff, N_IN)
        gate, up = halves[:, 0], halves[:, 1]
    else:
        (w, gate), (v, up) = (matrix(form, type_, n_expert * ff, seed=s) for s in (3, 4))
        matrices, gate, up = [w, v], *(m.reshape(n_expert, ff, N_IN) for m in (gate, up))
    x, ids = random(n, N_IN), choices(n, k, n_expert)
    run = jax.jit(
        lambda x, ids, w: expert_ffn(x, ids, w, n_expert, activation=silu, multiply=multiply)
    )
    expected = reference(x, ids, gate, up, down_values.reshape(n_expert, n_out, ff))
    assert_close(run(x, ids, [*matrices, down]), expected, 5e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "g"), [(1, 4), (5, 3), (2, 1)])
def test_each_matrix_with_its_own_rows(form, n, g):
    w, values = matrix(form, GGMLType.Q8_0, g * 10)
    x = random(n, g, N_IN)
    run = jax.jit(lambda x, w: each_matrix(x, w, multiply))
    expected = np.einsum("ngi,goi->ngo", x.astype(np.float64), values.reshape(g, 10, N_IN))
    assert_close(run(x, w), expected)


def test_a_trace_does_not_depend_on_x64():
    x, ids = random(20, N_IN), choices(20, 2, 4)
    (w, _), (down, _) = (
        matrix("planes", GGMLType.Q8_0, 4 * 64),
        matrix("planes", GGMLType.Q8_0, 40, 32),
    )

    def run(x, ids, logits, bias):
        chosen = choose_experts(
            logits,
            bias,
            n_used=2,
            gating="sigmoid",
            normalize=True,
            scale=2.0,
            n_group=2,
            n_group_used=1,
        )
        y = expert_ffn(x, ids, [w, down], 4, activation=silu, multiply=multiply)
        return chosen, y, each_matrix(x.reshape(5, 4, N_IN), w, multiply)

    arguments = (x, ids, random(20, 4), random(4))
    plain = str(jax.make_jaxpr(run)(*arguments))
    with jax.enable_x64(True):
        wide = str(jax.make_jaxpr(run)(*arguments))
    assert plain == wide
