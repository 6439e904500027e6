"""RWKV-7 against a loop over tokens in float64.

llama.cpp is no oracle for heads of 32: with AVX-512 its kernel reads 64 values of a head at a time.
The golden that it made has heads of 64, as all published models.
"""

import numpy as np
import pytest
from tiny_models import golden, read_spec, tensor_values, write_tiny

from minfer_jax.gguf import open_gguf
from minfer_jax.lm import load
from minfer_jax.models import rwkv7
from minfer_jax.settings import Settings

NAME = "rwkv7-head64-dense"
SPEC = read_spec(NAME)
VALUES_OF_FIRST = tuple(f"blk.0.time_mix_v{i}.weight" for i in range(3))
GATES = tuple(f"blk.{il}.time_mix_g{i}.weight" for il in range(2) for i in (1, 2))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class Reference:
    """The model, written down from its paper, on tokens of one sequence."""

    def __init__(self, *, gate):
        self.gate = gate
        self.w = {
            name: tensor_values(name, int(np.prod(ne))).reshape(ne[::-1]).astype(np.float64)
            for name, ne, _ in SPEC["tensors"]
        }

    def norm(self, x, name):
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt(centred.var(axis=-1, keepdims=True) + 1e-5)
        return scaled * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def logits(self, tokens, d):
        x = self.norm(self.w["token_embd.weight"][tokens], "token_embd_norm")
        first = None
        for il in range(2):
            time, first = self.time_mix(self.norm(x, f"blk.{il}.attn_norm"), il, first, d)
            x = x + time
            x = x + self.channel_mix(self.norm(x, f"blk.{il}.attn_norm_2"), il)
        return self.norm(x, "output_norm") @ self.w["output.weight"].T

    def time_mix(self, x, il, first, d):
        w = {k[15:-7]: v for k, v in self.w.items() if k.startswith(f"blk.{il}.time_mix_")}
        bias = self.w[f"blk.{il}.time_mix_ln.bias"]
        before = np.concatenate([np.zeros_like(x[:1]), x[:-1]]) - x
        xr, xw, xk, xv, xa, xg = x + before * w["lerp_fused"].reshape(6, 1, -1)
        r, k, v = xr @ w["receptance"].T, xk @ w["key"].T, xv @ w["value"].T
        if first is not None:
            v = v + (first - v) * sigmoid(xv @ w["v1"].T @ w["v2"].T + w["v0"])
        decay = sigmoid(np.tanh(xw @ w["w1"].T) @ w["w2"].T + w["w0"])
        decay = np.exp(-np.exp(-0.5) * decay)
        rate = sigmoid(xa @ w["a1"].T @ w["a2"].T + w["a0"])
        key = (k * w["k_k"]).reshape(len(x), -1, d)
        key = key / np.linalg.norm(key, axis=-1, keepdims=True)
        k = k * (1 + (rate - 1) * w["k_a"])
        r, k, u, decay, rate, r_k = (
            y.reshape(-1, x.shape[1] // d, d) for y in (r, k, v, decay, rate, w["r_k"])
        )
        state, out = np.zeros((x.shape[1] // d, d, d)), []
        for t in range(len(x)):
            read = np.einsum("hij,hj->hi", state, -key[t])
            state = state * decay[t][:, None] + np.einsum("hi,hj->hij", u[t], k[t])
            state += np.einsum("hi,hj->hij", read, key[t] * rate[t])
            y = np.einsum("hij,hj->hi", state, r[t])
            y = (y - y.mean(axis=1, keepdims=True)) / np.sqrt(y.var(axis=1, keepdims=True) + 64e-5)
            own = (r[t] * k[t] * r_k[0]).sum(axis=1, keepdims=True) * u[t]
            out.append(y.reshape(-1) * w["ln"] + bias + own.reshape(-1))
        gate = sigmoid(xg @ w["g1"].T) @ w["g2"].T if self.gate else 1
        return np.stack(out) * gate @ w["output"].T, v if first is None else first

    def channel_mix(self, x, il):
        key, value, lerp = (
            self.w[f"blk.{il}.channel_mix_{name}.weight"] for name in ("key", "value", "lerp_k")
        )
        before = np.concatenate([np.zeros_like(x[:1]), x[:-1]]) - x
        return np.maximum((x + before * lerp.reshape(-1)) @ key.T, 0) ** 2 @ value.T


def ours(tmp_path, **changes):
    path = write_tiny(SPEC, tmp_path / "x.gguf", **changes)
    lm = load(path, n_ctx=64, exact=True, settings=Settings(home=tmp_path))
    return lm.logits(golden(NAME)[0])


@pytest.mark.parametrize("d", [32, 64])
def test_first_layer_without_a_share_of_its_own_values(tmp_path, d):
    want = Reference(gate=True).logits(golden(NAME)[0], d)
    got = ours(tmp_path, kv={"rwkv7.wkv.head_size": d}, drop=VALUES_OF_FIRST)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * want.std())


def test_without_a_gate(tmp_path):
    want = Reference(gate=False).logits(golden(NAME)[0], 64)
    got = ours(tmp_path, drop=("rwkv7.attention.gate_lora_rank", *GATES))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * want.std())


def test_hparams(tiny_path):
    p = rwkv7.hparams(open_gguf(tiny_path(NAME))).rwkv
    assert p and (p.head_size, p.decay_rank, p.rate_rank) == (64, 32, 12)
    assert (p.value_rank, p.gate_rank) == (8, 64)
