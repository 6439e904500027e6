"""What RWKV-6 and RWKV-7 share, on the metadata of tiny models and on numbers worked by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
from tiny_models import read_spec, write_tiny

from minfer_jax.errors import ModelError
from minfer_jax.gguf import open_gguf
from minfer_jax.memory.plan import plan_memory
from minfer_jax.models import rwkv, rwkv6
from minfer_jax.models.rwkv import heads, normed_heads, squared_relu


@pytest.fixture
def tiny(tmp_path):
    """The tiny RWKV-6 with changed metadata or tensors."""

    def tiny(*, kv=(), **changes):
        spec = read_spec("rwkv6-dense")
        spec["kv"] += [[f"rwkv6.{key}", ["UINT32"], value] for key, value in kv]
        return open_gguf(write_tiny(spec, tmp_path / "x.gguf", **changes))

    return tiny


def test_layers_recur_and_none_attends(tiny):
    hp, head_size = rwkv.read_rwkv(tiny())
    assert head_size == 32
    assert (hp.recurrent_layers, hp.attention_layers) == ((True,) * 2, (False,) * 2)
    assert hp.states == ((64,), (64,), (2, 32, 32))
    assert plan_memory(hp, n_ctx=64).caches == ()


def test_head_size_must_divide_the_embedding(tiny):
    with pytest.raises(ModelError, match="head_size 48 does not divide the embedding of 64"):
        rwkv6.hparams(tiny(kv=[("wkv.head_size", 48)]))


def test_only_two_token_shifts_a_layer(tiny):
    assert rwkv6.hparams(tiny(kv=[("token_shift_count", 2)])).n_layer == 2
    with pytest.raises(ModelError, match="token_shift_count is 1, only 2"):
        rwkv6.hparams(tiny(kv=[("token_shift_count", 1)]))


def test_heads_are_runs_of_the_embedding():
    assert heads(np.arange(12).reshape(1, 2, 6), 3)[0, 1].tolist() == [[6, 7, 8], [9, 10, 11]]


def test_heads_are_normed_one_by_one():
    y = np.random.default_rng(0).normal(size=(3, 2, 4)).astype(np.float32) * 0.01
    weight, bias = np.arange(8, dtype=np.float32), -np.arange(8, dtype=np.float32)
    f = SimpleNamespace(array={"x.weight": weight, "x.bias": bias}.__getitem__)
    centred = y - y.mean(axis=2, keepdims=True)
    normed = centred / np.sqrt(centred.var(axis=2, keepdims=True) + 64e-5)
    expected = normed.reshape(3, 8) * weight + bias
    np.testing.assert_allclose(normed_heads(f, y, "x"), expected, rtol=0, atol=1e-5)


def test_squared_relu():
    assert squared_relu(np.float32([-2, 0, 3])).tolist() == [0, 0, 9]
