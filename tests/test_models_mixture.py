"""A layer's mixture of experts out of its parts: router, padding, weights, shared experts."""

import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.models.hparams import MoEParams
from minfer_jax.models.mixture import mixture

N, N_EMBD, N_EXPERT = 5, 8, 6
X = np.random.default_rng(0).normal(size=(N, N_EMBD)).astype(np.float32)
ROUTER = np.random.default_rng(1).normal(size=(N_EXPERT, N_EMBD)).astype(np.float32)
GATE = np.random.default_rng(2).normal(size=N_EMBD).astype(np.float32)


class Parts:
    """What a `Forward` offers, with experts that answer their number times the row."""

    def __init__(self, arrays=None, seq=(0,) * N):
        self.arrays = arrays or {}
        self.seq = jnp.array(seq, jnp.int32)
        self.ids = self.names = None

    def has(self, name):
        return name in self.arrays

    def array(self, name):
        return jnp.asarray(self.arrays[name])

    def product(self, x, name):
        if name == "blk.3.ffn_gate_inp":
            return jnp.asarray(x @ ROUTER.T)
        assert name == "blk.3.ffn_down_shexp"
        return x * 10

    def gated(self, x, names):
        assert names == ["blk.3.ffn_gate_shexp", "blk.3.ffn_up_shexp"]
        return x + 1

    def expert_answers(self, x, ids, names):
        self.ids, self.names = np.asarray(ids), names
        return x[:, None, :] * ids.astype(jnp.float32)[:, :, None]


def params(**changes):
    return MoEParams(**{"n_expert": N_EXPERT, "n_expert_used": 2, "n_ff_exp": 4, **changes})


def expected(bias=0.0):
    logits = X @ ROUTER.T
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    ids = np.argsort(-(probs + bias), axis=-1)[:, :2]
    return ids, X * (np.take_along_axis(probs, ids, -1) * ids).sum(-1, keepdims=True)


def run(parts, x=X, **changes):
    return np.asarray(mixture(parts, params(**changes), 3, jnp.asarray(x)))


def test_answers_are_weighted_by_the_routers_probabilities():
    parts = Parts()
    out = run(parts)
    ids, weighted = expected()
    np.testing.assert_array_equal(parts.ids, ids)
    np.testing.assert_allclose(out, weighted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("joined", "names"),
    [(False, ["ffn_gate_exps", "ffn_up_exps"]), (True, ["ffn_gate_up_exps"])],
)
def test_names_of_the_experts_tensors(joined, names):
    parts = Parts()
    run(parts, joined=joined)
    assert parts.names == [f"blk.3.{name}" for name in (*names, "ffn_down_exps")]


def test_a_bias_of_the_file_is_part_of_the_choice():
    bias = np.array([0, 0, 5, 0, 0, 4], np.float32)
    parts = Parts({"blk.3.exp_probs_b.bias": bias})
    out = run(parts)
    assert (parts.ids == [2, 5]).all()
    np.testing.assert_allclose(out, expected(bias)[1], rtol=1e-5, atol=1e-5)


def test_padding_asks_nobody():
    parts = Parts(seq=[0, 1, -1, 0, -1])
    run(parts)
    assert (parts.ids[[2, 4]] == N_EXPERT).all()
    np.testing.assert_array_equal(parts.ids[[0, 1, 3]], expected()[0][[0, 1, 3]])


def test_rows_that_reach_the_head_are_no_padding():
    """Fewer than the graph's: in the last layer, those whose logits are wanted."""
    parts = Parts(seq=[-1] * N)
    run(parts, X[2:3])
    np.testing.assert_array_equal(parts.ids, expected()[0][2:3])


def test_shared_experts_are_added():
    out = run(Parts(), n_ff_shexp=4)
    np.testing.assert_allclose(out, expected()[1] + (X + 1) * 10, rtol=1e-5, atol=1e-5)


def test_shared_experts_behind_a_gate_of_their_own():
    parts = Parts({"blk.3.ffn_gate_inp_shexp.weight": GATE})
    out = run(parts, n_ff_shexp=4)
    gate = 1 / (1 + np.exp(-(X @ GATE)))[:, None]
    np.testing.assert_allclose(out, expected()[1] + gate * (X + 1) * 10, rtol=1e-5, atol=1e-5)
