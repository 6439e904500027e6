"""BERT: what is read from metadata, which tensors a file may and must have.

The graph is judged against llama.cpp in test_conformance_encoders.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from gguf_builder import f32_tensor, write_gguf
from steps import step_of
from tiny_models import write_tiny

from minfer_jax.errors import GGUFError, ModelError
from minfer_jax.gguf import open_gguf
from minfer_jax.lm import load
from minfer_jax.memory.plan import plan_memory
from minfer_jax.models import bert
from minfer_jax.ops.cpu.library import target
from minfer_jax.settings import Settings

KV = {
    "general.architecture": "bert",
    "bert.context_length": 512,
    "bert.embedding_length": 48,
    "bert.block_count": 2,
    "bert.feed_forward_length": 96,
    "bert.attention.head_count": 3,
    "bert.attention.layer_norm_epsilon": 1e-12,
    "bert.attention.causal": False,
    "tokenizer.ggml.token_type_count": 2,
}
TABLE = f32_tensor("token_embd.weight", np.zeros((7, 48)))
FUSED = f32_tensor("blk.0.attn_qkv.weight", np.zeros((144, 48)))


@pytest.fixture
def hparams(tmp_path):
    """Reads the metadata above, with changes; a value of None leaves a key out."""

    def hparams(changes=None, *tensors):
        kv = {key: value for key, value in {**KV, **(changes or {})}.items() if value is not None}
        return bert.hparams(open_gguf(write_gguf(tmp_path / "x.gguf", kv, [TABLE, *tensors])))

    return hparams


def test_every_key(hparams):
    hp = hparams()
    assert (hp.n_vocab, hp.n_ctx_train, hp.n_embd, hp.n_layer, hp.n_ff) == (7, 512, 48, 2, 96)
    assert (hp.n_head, hp.n_head_kv, hp.head_dim_k, hp.head_dim_v) == (3, 3, 16, 16)
    assert (hp.norm_eps, hp.attn_scale) == (pytest.approx(1e-12), 0.25)
    assert (hp.activation, hp.rope.n_rot, hp.alibi) == ("gelu", 0, 0.0)
    assert not hp.causal and hp.encoder is not None
    assert (hp.encoder.n_token_types, hp.encoder.fused_qkv, hp.encoder.ffn) == (2, False, "plain")


def test_an_encoder_caches_nothing(hparams):
    assert plan_memory(hparams(), n_ctx=64).layout == ()


@pytest.mark.parametrize(
    ("number", "kind"),
    [(None, "none"), (0, "none"), (1, "mean"), (2, "cls"), (3, "last"), (4, "rank")],
)
def test_pooling(hparams, number, kind):
    assert hparams({"bert.pooling_type": number}).pooling == kind


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"bert.attention.layer_norm_epsilon": None}, GGUFError, "missing key"),
        ({"tokenizer.ggml.token_type_count": None}, GGUFError, "missing key"),
        ({"tokenizer.ggml.token_type_count": 0}, GGUFError, "is 0, allowed: an integer from 1"),
        ({"bert.pooling_type": 5}, GGUFError, "is 5, allowed: an integer from 0 to 4"),
        ({"bert.attention.causal": True}, ModelError, "encoders with causal attention do not run"),
    ],
)
def test_what_is_refused(hparams, changes, error, words):
    with pytest.raises(error, match=rf"x\.gguf: .*{words}"):
        hparams(changes)


def specs(hp):
    return {spec.name: spec for spec in bert.tensors(hp).specs}


def test_tensors(hparams):
    known = specs(hparams())
    shapes = {
        "position_embd.weight": (512, 48),
        "token_types.weight": (2, 48),
        "token_embd_norm.bias": (48,),
        "blk.1.attn_q.weight": (48, 48),
        "blk.1.attn_v.bias": (48,),
        "blk.1.attn_output_norm.weight": (48,),
        "blk.1.ffn_up.weight": (96, 48),
        "blk.1.ffn_down.bias": (48,),
        "blk.1.layer_output_norm.bias": (48,),
    }
    assert {name: known[name].shape for name in shapes} == shapes
    optional = {name for name in shapes if not known[name].required}
    assert optional == {"token_types.weight", "blk.1.attn_v.bias", "blk.1.ffn_down.bias"}
    plain = {name for name, spec in known.items() if spec.plain}
    assert plain == {"position_embd.weight", "token_types.weight"}
    assert not {"blk.0.attn_qkv.weight", "blk.0.ffn_gate.weight"} & set(known)


def test_fused_qkv(hparams):
    hp = hparams({"bert.attention.head_count_kv": 1}, FUSED)
    known = specs(hp)
    # Three query heads, a key head and a value head of 16.
    assert known["blk.0.attn_qkv.weight"].shape == (80, 48)
    assert known["blk.0.attn_qkv.weight"].required and not known["blk.0.attn_qkv.bias"].required
    assert "blk.0.attn_q.weight" not in known


def test_a_classifier_is_no_part_of_the_graph(hparams):
    ignored = set(bert.tensors(hparams()).ignored)
    assert ignored == {"cls.weight", "cls.bias", "cls.output.weight", "cls.output.bias"}


@pytest.mark.parametrize(
    ("name", "flags", "n"),
    [
        # Of two layers: QKV, attention output, gate and up, down.
        ("nomic-bert-split", {}, 2 * 4),
        ("nomic-bert-split", {"fuse_qkv": False}, 2 * 6),
        ("nomic-bert-split", {"fuse_ffn": False}, 2 * 5),
        ("nomic-bert-dense", {"fuse_qkv": False}, 2 * 4),
    ],
)
def test_number_of_products(native_library, tmp_path, name, flags, n):
    spec = json.loads((Path(__file__).parent / "data" / "encoders" / f"{name}.json").read_text())
    path = write_tiny(spec, tmp_path / "x.gguf")
    model = load(path, n_ctx=64, settings=Settings(home=tmp_path)).model
    make_step, params, args = step_of(model, 8, n_out=8, embeddings=True, **flags)
    step = jax.make_jaxpr(make_step(), static_argnums=0)(params, *args)
    assert str(step).count(f"target_name={target('linear')}") == n
