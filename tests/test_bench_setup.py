"""What is said of the model and the machine."""

from importlib.metadata import PackageNotFoundError

import jax
import pytest
from tiny_models import read_spec, write_tiny

from minfer_jax.bench import setup as module
from minfer_jax.bench.setup import describe, weights_read
from minfer_jax.lm import load
from minfer_jax.settings import Settings


def test_the_demo_model(smollm2_path, tmp_path, native_library):
    lm = load(smollm2_path, n_ctx=64, settings=Settings(home=tmp_path), device="cpu")
    setup = describe(lm.context(n_ctx=64), n_ubatch=512, exact=False, flags="-p 1")
    assert setup.model_type == "llama 135M Q4_1"
    # As llama-bench prints them.
    assert (setup.model_size, setup.model_n_params) == (96576768, 134515008)
    assert setup.model_filename == str(smollm2_path)
    assert (setup.n_ctx, setup.n_ubatch, setup.type_k, setup.type_v) == (64, 512, "f16", "f16")
    assert (setup.backends, setup.gpu_info, setup.exact) == ("JAX CPU", "", False)
    assert (setup.n_gpu_layers, setup.flash_attn) == (0, 1)
    assert setup.jax_version == jax.__version__ and setup.flags == "-p 1"
    # Its table of embeddings is its head, of Q8_0: all weights but lower bits are read.
    lower = 49152 * 576 * 3 // 8
    assert weights_read(lm.model) == lm.model.weights.nbytes - lower


def test_exact_mode_has_another_kv(load_tiny):
    context = load_tiny("llama-dense").context(n_ctx=64)
    setup = describe(context, n_ubatch=32, exact=True, flags="")
    assert (setup.type_k, setup.type_v, setup.exact) == ("f32", "f32", True)


@pytest.mark.parametrize(("file_type", "name"), [(15, "Q4_K_M"), (2, "F32"), (99, "F32")])
def test_a_file_type_names_what_its_tensors_do_not(file_type, name, tmp_path):
    spec = read_spec("llama-dense")
    spec["kv"].append(["general.file_type", ["UINT32"], file_type])
    path = write_tiny(spec, tmp_path / "x.gguf")
    lm = load(path, n_ctx=64, settings=Settings(home=tmp_path), device="cpu")
    setup = describe(lm.context(n_ctx=64), n_ubatch=32, exact=False, flags="")
    assert setup.model_type.split()[0] == "llama" and setup.model_type.split()[2] == name


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("type_", ["Q8_0", "Q5_1"])
def test_a_table_beside_a_head_of_its_own_is_not_read(type_, exact, tmp_path):
    def weights_of(path):
        return load(path, n_ctx=64, exact=exact, settings=Settings(home=tmp_path), device="cpu")

    spec = read_spec("llama-dense")
    with_head = write_tiny(spec, tmp_path / "a.gguf", quantize={"token_embd.weight": type_})
    # Reads its table of float32, which is as large as the other's head.
    without = write_tiny(spec, tmp_path / "b.gguf", drop=("output.weight",))
    assert weights_read(weights_of(with_head).model) == weights_of(without).model.weights.nbytes


@pytest.mark.parametrize(("arch", "split"), [("llama-dense", True), ("qwen2-dense", False)])
def test_the_lower_bits_of_a_split_head_are_not_read(arch, split, tmp_path, native_library):
    """The tiny Qwen2 has a bias behind its head, which is then in one piece."""
    spec = read_spec(arch)
    path = write_tiny(spec, tmp_path / "a.gguf", quantize={"output.weight": "Q8_0"})
    model = load(path, n_ctx=64, settings=Settings(home=tmp_path), device="cpu").model
    view = model.weights.view(model.weights.leaves)
    table, head = view.packed("token_embd.weight"), view.packed("output.weight")
    n_vocab, n_embd = model.hp.n_vocab, model.hp.n_embd
    assert head.split == split and table.nbytes == n_vocab * n_embd * 4
    lower = n_vocab * n_embd * 3 // 8 if split else 0
    assert weights_read(model) == model.weights.nbytes - table.nbytes - lower


def test_a_checkout_that_is_not_installed(load_tiny, monkeypatch):
    def version(name):
        if name == "minfer-jax":
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(module, "version", version)
    setup = describe(load_tiny("llama-dense").context(n_ctx=64), n_ubatch=32, exact=True, flags="")
    assert (setup.build_commit, setup.jax_version) == ("unknown", "1")
