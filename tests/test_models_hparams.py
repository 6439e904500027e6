"""Hyperparameters from metadata: what is read, what is assumed, what is refused and how."""

import math
import subprocess
import sys

import numpy as np
import pytest
from gguf_builder import f32_tensor, write_gguf

from minfer_jax.errors import GGUFError, ModelError
from minfer_jax.gguf import open_gguf
from minfer_jax.models.hparams import read_hparams, read_layered_flags

KV = {
    "general.architecture": "llama",
    "llama.context_length": 4096,
    "llama.embedding_length": 96,
    "llama.block_count": 3,
    "llama.feed_forward_length": 256,
    "llama.attention.head_count": 6,
    "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": 32,
    "llama.attention.value_length": 24,
    "llama.attention.layer_norm_rms_epsilon": 0.25,
    "llama.rope.dimension_count": 20,
    "llama.rope.freq_base": 5000.0,
}
TABLE = f32_tensor("token_embd.weight", np.zeros((7, 96)))


@pytest.fixture
def read(tmp_path):
    """Reads the metadata above, with changes; a value of None leaves a key out."""

    def read(changes=None, *, tensors=(TABLE,)):
        kv = {**KV, **{f"llama.{key}": value for key, value in (changes or {}).items()}}
        kv = {key: value for key, value in kv.items() if value is not None}
        return read_hparams(open_gguf(write_gguf(tmp_path / "x.gguf", kv, tensors)))

    return read


def test_every_key(read):
    hp = read()
    assert (hp.arch, hp.n_vocab, hp.n_ctx_train) == ("llama", 7, 4096)
    assert (hp.n_embd, hp.n_layer, hp.n_ff, hp.norm_eps) == (96, 3, 256, 0.25)
    assert (hp.n_head, hp.n_head_kv, hp.head_dim_k, hp.head_dim_v) == (6, 2, 32, 24)
    assert hp.attn_scale == pytest.approx(1.0 / math.sqrt(32.0), rel=1e-12)
    assert (hp.rope.style, hp.rope.n_rot, hp.rope.freq_base) == ("half", 20, 5000.0)
    assert (hp.rope.freq_scale, hp.rope.yarn, hp.rope.n_ctx_orig) == (1.0, False, 4096)
    assert (hp.n_swa, hp.window(2), hp.rope_of(2)) == (0, 0, hp.rope)


def test_what_absent_keys_mean(read):
    absent = (
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "rope.dimension_count",
        "rope.freq_base",
    )
    hp = read(dict.fromkeys(absent))
    assert (hp.n_head_kv, hp.head_dim_k, hp.head_dim_v) == (6, 16, 16)
    assert (hp.rope.n_rot, hp.rope.freq_base, hp.attn_scale) == (16, 10000.0, 0.25)


@pytest.fixture
def file_of(tmp_path):
    """A file with `value` under the key x.flags, which it lacks if that is None."""

    def file_of(value):
        kv = {"general.architecture": "x"} | ({} if value is None else {"x.flags": value})
        return open_gguf(write_gguf(tmp_path / "x.gguf", kv))

    return file_of


@pytest.mark.parametrize("flags", [[True, False, True, True], [1, 0, 2, 0], [-1, 0, 1]])
def test_a_flag_for_each_layer(file_of, flags):
    assert read_layered_flags(file_of(flags), "x.flags", 3) == (True, False, True)


@pytest.mark.parametrize("flags", [["yes", "no", ""], [1.0, math.nan, 0.0], [[1], [0], [1]]])
def test_flags_are_bool_or_whole_numbers(file_of, flags):
    with pytest.raises(GGUFError, match=r"x\.gguf: x\.flags must be an array of bool or of whole"):
        read_layered_flags(file_of(flags), "x.flags", 3)


def test_flags_for_fewer_layers_or_none(file_of):
    with pytest.raises(GGUFError, match=r"x\.gguf: x\.flags has 2 entries for 3 layers"):
        read_layered_flags(file_of([True, False]), "x.flags", 3)
    with pytest.raises(GGUFError, match=r"x\.flags.* is 1, allowed: an array"):
        read_layered_flags(file_of(1), "x.flags", 3)
    with pytest.raises(GGUFError, match="missing key"):
        read_layered_flags(file_of(None), "x.flags", 3)


@pytest.mark.parametrize(
    ("changes", "freq_scale", "yarn"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 0.25, False),
        ({"rope.scaling.factor": 4.0}, 0.25, False),
        ({"rope.scale_linear": 2.0}, 0.5, False),
        ({"rope.scale_linear": 2.0, "rope.scaling.factor": 4.0}, 0.25, False),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0, False),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, 1.0, False),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0}, 0.125, True),
    ],
)
def test_rope_scaling(read, changes, freq_scale, yarn):
    rope = read(changes).rope
    assert (rope.freq_scale, rope.yarn) == (freq_scale, yarn)


def test_yarn_parameters(read):
    rope = read(
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 1024,
            "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.yarn_beta_slow": 2.0,
            "rope.scaling.attn_factor": 1.5,
        }
    ).rope
    assert (rope.n_ctx_orig, rope.beta_fast, rope.beta_slow) == (1024, 16.0, 2.0)
    assert rope.attn_factor == 1.5


REQUIRED = [
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key(read, key):
    with pytest.raises(GGUFError, match=rf"x\.gguf: missing key 'llama\.{key}'$"):
        read({key: None})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("embedding_length", 0),
        ("embedding_length", 1 << 25),
        ("block_count", 0),
        ("block_count", 1 << 20),
        ("feed_forward_length", 0),
        ("context_length", 0),
        ("attention.head_count", 0),
        ("attention.head_count", 1 << 20),
        ("attention.head_count_kv", 0),
        ("attention.head_count_kv", 7),
        ("attention.key_length", 0),
        ("attention.value_length", 1 << 20),
        ("attention.layer_norm_rms_epsilon", -1.0),
        ("rope.dimension_count", 0),
        ("rope.dimension_count", 34),
        ("rope.freq_base", 0.0),
        ("rope.freq_base", 1.0),
        ("rope.scaling.factor", -2.0),
        ("rope.scaling.original_context_length", 0),
        ("rope.scaling.yarn_beta_fast", 0.0),
        ("attention.causal", 1),
        ("expert_count", -1),
        ("attention.head_count", "six"),
        ("attention.head_count", [6, 6, 6]),
    ],
)
def test_a_value_that_is_not_allowed(read, key, value):
    shown = "an array of 3" if isinstance(value, list) else str(value)
    with pytest.raises(GGUFError, match=rf"x\.gguf: key 'llama\.{key}' is .*{shown}.*allowed: "):
        read({key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.head_count_kv": 4}, "6 query heads cannot share 4 key heads evenly"),
        ({"rope.dimension_count": 15}, r"llama\.rope\.dimension_count is 15, must be even"),
        ({"attention.key_length": 5, "rope.dimension_count": None}, "is 5, must be even"),
        (
            {"rope.scaling.type": "longrope"},
            r"rope scaling 'longrope' is not supported \(none, linear, yarn are\)",
        ),
        ({"expert_count": 8}, r"mixture-of-experts models \(8 experts\) do not run yet"),
        ({"attention.causal": False}, "without causal attention do not run yet"),
    ],
)
def test_what_no_graph_implements(read, changes, message):
    with pytest.raises(ModelError, match=rf"x\.gguf: .*{message}"):
        read(changes)


@pytest.mark.parametrize("changes", [{"expert_count": 0}, {"attention.causal": True}])
def test_harmless_values_of_those_keys(read, changes):
    assert read(changes) == read()


def test_more_heads_than_embedding(read):
    changes = {
        "attention.head_count": 128,
        "attention.head_count_kv": 128,
        "attention.key_length": None,
        "attention.value_length": None,
        "rope.dimension_count": None,
    }
    with pytest.raises(ModelError, match=r"x\.gguf: 128 heads do not fit an embedding of 96"):
        read(changes)


def test_no_embedding_table(read):
    with pytest.raises(ModelError, match=r"x\.gguf: tensor token_embd\.weight is missing"):
        read(tensors=[f32_tensor("other", np.zeros((2, 2)))])


def test_it_needs_no_jax():
    code = "import sys, minfer_jax.models.hparams; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("n", [6, 8])
def test_a_vocabulary_of_another_size_than_the_embedding_is_refused(tmp_path, n):
    kv = {**KV, "tokenizer.ggml.tokens": [f"t{i}" for i in range(n)]}
    path = write_gguf(tmp_path / "x.gguf", kv, [TABLE])
    with pytest.raises(ModelError, match=rf"tokens has {n} entries and token_embd.weight 7 rows"):
        read_hparams(open_gguf(path))
