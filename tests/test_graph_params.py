"""`GraphParams`: identity, and words about differences."""

import dataclasses
import subprocess
import sys

from minfer_jax.graph.params import CParams, GraphParams, GType
from minfer_jax.sampling.in_graph import SamplerKind

BASE = GraphParams(n_tokens=32, n_out=1, gtype=GType.PREFILL, cparams=CParams(n_ctx=64))


def test_equal_values_are_one_key():
    again = GraphParams(n_tokens=32, n_out=1, gtype=GType.PREFILL, cparams=CParams(n_ctx=64))
    assert again == BASE and hash(again) == hash(BASE)


def test_every_field_is_part_of_the_identity():
    changed = {
        "n_tokens": dataclasses.replace(BASE, n_tokens=128),
        "n_out": dataclasses.replace(BASE, n_out=32),
        "gtype": dataclasses.replace(BASE, gtype=GType.DECODE),
        "weights_version": dataclasses.replace(BASE, weights_version=1),
    }
    other = {
        "n_ctx": 65,
        "backend": "gpu",
        "flash_attn": False,
        "fuse_qkv": False,
        "fuse_ffn": False,
        "kv_format": ("f32", "f16"),
        "exact": True,
        "kv_map": True,
        "embd_input": True,
        "embeddings": True,
        "sampler": SamplerKind((), greedy=True, width=0, window=0, n_bias=0),
    }
    for name, value in other.items():
        cparams = dataclasses.replace(BASE.cparams, **{name: value})
        changed[name] = dataclasses.replace(BASE, cparams=cparams)
    assert changed.keys() == {name for name, _ in BASE.leaves()}
    for name, params in changed.items():
        assert params != BASE
        assert params.differing(BASE) == (name,)


def test_text_names_every_field():
    text = str(BASE)
    assert text.startswith("n_tokens=32 n_out=1 gtype=prefill n_ctx=64 ")
    assert all(f"{name}=" in text for name, _ in BASE.leaves())


def test_needs_no_jax():
    code = "import sys, minfer_jax.graph.params; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
