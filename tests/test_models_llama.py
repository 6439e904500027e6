"""The families of Llama's shape: llama, qwen2 and qwen3, and in what they differ."""

import numpy as np
import pytest
from gguf_builder import f32_tensor, write_gguf
from tiny_models import read_spec, write_tiny

from minfer_jax.errors import GGUFError
from minfer_jax.gguf import open_gguf
from minfer_jax.lm import load
from minfer_jax.models import llama, qwen2, qwen3
from minfer_jax.settings import Settings

FAMILIES = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3}


def keys(arch):
    return {
        "general.architecture": arch,
        f"{arch}.context_length": 256,
        f"{arch}.embedding_length": 64,
        f"{arch}.block_count": 2,
        f"{arch}.feed_forward_length": 96,
        f"{arch}.attention.head_count": 4,
        f"{arch}.attention.head_count_kv": 2,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
    }


@pytest.fixture
def hparams(tmp_path):
    def hparams(arch, changes=None):
        kv = {**keys(arch), **(changes or {})}
        table = f32_tensor("token_embd.weight", np.zeros((7, 64)))
        path = write_gguf(tmp_path / "x.gguf", kv, [table])
        return FAMILIES[arch].hparams(open_gguf(path))

    return hparams


@pytest.mark.parametrize(
    ("arch", "style", "qk_norm"),
    [("llama", "interleaved", False), ("qwen2", "half", False), ("qwen3", "half", True)],
)
def test_rotation_and_norms_of_heads(hparams, arch, style, qk_norm):
    hp = hparams(arch)
    assert (hp.arch, hp.rope.style, hp.qk_norm) == (arch, style, qk_norm)
    assert (hp.activation, hp.embd_scale, hp.attn_scale, hp.n_swa) == ("silu", 1.0, 0.25, 0)
    assert (hp.attn_softcap, hp.final_softcap) == (0.0, 0.0)


@pytest.mark.parametrize(("value", "scale"), [(0.125, 0.125), (0.0, 0.25)])
def test_llama_files_may_give_the_attention_scale(hparams, value, scale):
    assert hparams("llama", {"llama.attention.scale": value}).attn_scale == scale


def test_an_attention_scale_out_of_range(hparams):
    with pytest.raises(GGUFError, match=r"key 'llama\.attention\.scale' is -1\.0, allowed: "):
        hparams("llama", {"llama.attention.scale": -1.0})


MATRICES = {
    "attn_q": (64, 64),
    "attn_k": (32, 64),
    "attn_v": (32, 64),
    "attn_output": (64, 64),
    "ffn_gate": (96, 64),
    "ffn_up": (96, 64),
    "ffn_down": (64, 96),
}


@pytest.mark.parametrize("arch", FAMILIES)
def test_required_tensors(hparams, arch):
    listed = {spec.name: spec.shape for spec in specs(hparams, arch) if spec.required}
    expected = {"token_embd.weight": (7, 64), "output_norm.weight": (64,)}
    norms = {"attn_norm": (64,), "ffn_norm": (64,)}
    if arch == "qwen3":
        norms |= {"attn_q_norm": (16,), "attn_k_norm": (16,)}
    for il in range(2):
        expected |= {f"blk.{il}.{name}.weight": s for name, s in (MATRICES | norms).items()}
    assert listed == expected


@pytest.mark.parametrize(
    ("arch", "biases", "extra"),
    [
        ("llama", list(MATRICES), {"rope_freqs.weight": (8,)}),
        ("qwen2", ["attn_q", "attn_k", "attn_v"], {"output.bias": (7,)}),
        ("qwen3", ["attn_q", "attn_k", "attn_v", "attn_output"], {}),
    ],
)
def test_optional_tensors(hparams, arch, biases, extra):
    listed = {spec.name: spec.shape for spec in specs(hparams, arch) if not spec.required}
    expected = {"output.weight": (7, 64), **extra}
    for il in range(2):
        expected |= {f"blk.{il}.{name}.bias": MATRICES[name][:1] for name in biases}
    assert listed == expected


def test_they_share_a_graph():
    assert qwen2.graph is qwen3.graph is llama.graph


def specs(hparams, arch):
    return FAMILIES[arch].tensors(hparams(arch)).specs


@pytest.mark.parametrize("drop", [(), ("output.weight",)], ids=["own head", "tied head"])
def test_output_bias_is_added_to_either_head(tmp_path, drop):
    spec, bias = read_spec("qwen2-dense"), np.arange(128, dtype=np.float32)
    settings = Settings(home=tmp_path)

    def logits(name, **changes):
        path = write_tiny(spec, tmp_path / name, drop=(*drop, "output.bias"), **changes)
        return load(path, n_ctx=64, exact=True, settings=settings).logits([1, 2, 3])

    without, with_bias = logits("a.gguf"), logits("b.gguf", extra={"output.bias": bias})
    np.testing.assert_allclose(with_bias - without, np.tile(bias, (3, 1)), atol=1e-3)
