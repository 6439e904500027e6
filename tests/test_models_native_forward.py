"""Graphs of native kernels: the logits of the graphs that XLA makes, out of fewer nodes."""

from collections import Counter
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from steps import step_of
from tiny_models import read_spec, write_tiny

from minfer_jax.batch import Batch
from minfer_jax.context import Context
from minfer_jax.gguf import open_gguf
from minfer_jax.models.model import Model
from minfer_jax.models.packing import WeightForm
from minfer_jax.ops.cpu.library import target
from minfer_jax.settings import Settings

# Biases everywhere and grouped heads; norms and windows; biases of Q, K, V; norms of Q and K.
NAMES = ["llama-gqa-dense", "gemma3-dense", "qwen2-dense", "qwen3-dense"]
QUANTIZE = {
    "attn_q.weight": "Q8_0",
    "attn_k.weight": "Q8_0",
    "blk.0.attn_v.weight": "Q8_0",
    "blk.1.attn_v.weight": "Q5_1",
    "attn_output.weight": "Q5_0",
    "ffn_gate.weight": "Q4_1",
    "ffn_up.weight": "Q4_1",
    "ffn_down.weight": "BF16",
    "token_embd.weight": "Q4_0",
    "output.weight": "Q8_0",
}
PARTLY_ROTATED = {
    "qwen35.rope.dimension_count": 64,
    "qwen35.rope.dimension_sections": [11, 11, 10, 0],
}
N = 53
TOKENS = np.random.default_rng(0).integers(0, 128, N).tolist()
ONE_VARIANT = pytest.mark.parametrize("kernels", ["portable"], indirect=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Makes the tiny model `name`, its matrices in the given form; each is made once."""
    folder = tmp_path_factory.mktemp("native")
    settings, cpu = Settings(home=folder), jax.devices("cpu")[0]

    @cache
    def get(name, form=WeightForm.TILED, *, quantized=False):
        path = folder / f"{name}-{quantized}.gguf"
        if not path.exists():
            kv = PARTLY_ROTATED if name == "qwen35-dense" else {}
            write_tiny(read_spec(name), path, kv=kv, quantize=QUANTIZE if quantized else {})
        return Model(open_gguf(path), device=cpu, form=form, settings=settings)

    return get


@pytest.fixture(scope="module")
def logits(model, tmp_path_factory):
    """Logits of every token out of a model: more rows than a window twice, then one at a time."""
    settings = Settings(home=tmp_path_factory.mktemp("home"))

    @cache
    def context(made, flags, exact, flash_attn):
        own = replace(settings, **dict(flags))
        return Context(made, n_ctx=64, exact=exact, flash_attn=flash_attn, settings=own)

    def get(made, *, exact=False, flash_attn=True, **flags):
        running = context(made, tuple(flags.items()), exact, flash_attn)
        running.memory.clear()
        out = []
        for tokens in (TOKENS[:30], TOKENS[30:50], *([token] for token in TOKENS[50:])):
            assert running.decode(Batch(token=tokens, logits=[True] * len(tokens))) == 0
            out.append(running.all_logits())
        return np.concatenate(out)

    return get


@pytest.fixture(scope="module")
def logits_of_xla(model, logits):
    """The same with matrices that XLA multiplies."""

    @cache
    def get(name, *, quantized, exact):
        return logits(model(name, WeightForm.PLANES, quantized=quantized), exact=exact)

    return get


def distance(a, b):
    """The largest difference in units of the standard deviation."""
    assert a.shape == b.shape == (N, 128) and np.isfinite(a).all()
    return np.abs(a - b).max() / b.std()


@pytest.mark.parametrize("name", NAMES)
def test_float_weights_give_the_logits_of_xla(kernels, model, logits, logits_of_xla, name):
    # Exact here means float32 K and V, so that nothing is rounded.
    expected = logits_of_xla(name, quantized=False, exact=True)
    assert distance(logits(model(name), exact=True), expected) < 1e-4


@ONE_VARIANT
def test_heads_beside_gates_that_are_partly_rotated(kernels, model, logits, logits_of_xla):
    expected = logits_of_xla("qwen35-dense", quantized=False, exact=True)
    assert distance(logits(model("qwen35-dense"), exact=True), expected) < 1e-4


@pytest.mark.parametrize("name", NAMES[:2])
def test_quantized_weights_give_nearly_those_of_xla(kernels, model, logits, logits_of_xla, name):
    expected = logits_of_xla(name, quantized=True, exact=False)
    native = logits(model(name, quantized=True))
    assert distance(native, expected) < 0.2
    assert np.sqrt(np.mean((native - expected) ** 2)) < 0.03 * expected.std()


@ONE_VARIANT
@pytest.mark.parametrize("name", NAMES[:2])
def test_attention_of_xla_over_tiled_weights(kernels, model, logits, name):
    native = logits(model(name), exact=True)
    assert distance(logits(model(name), exact=True, flash_attn=False), native) < 1e-4


@ONE_VARIANT
@pytest.mark.parametrize("name", ["qwen2-dense", "gemma3-dense"])
def test_separate_products_give_the_same_logits(kernels, model, logits, name):
    fused = logits(model(name), exact=True)
    separate = logits(model(name), exact=True, fuse_qkv=False)
    np.testing.assert_array_equal(separate, fused)
    # Gates are then activated by XLA.
    assert distance(logits(model(name), exact=True, fuse_ffn=False), fused) < 1e-4


def trace(model, n_tokens, **cparams):
    make_step, params, args = step_of(model, n_tokens, **cparams)
    return jax.make_jaxpr(make_step(), static_argnums=0)(params, *args)


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def calls(eqns):
    """How often each kernel is called."""
    return Counter(e.params["target_name"] for e in eqns if e.primitive.name == "ffi_call")


@ONE_VARIANT
@pytest.mark.parametrize(
    ("flags", "products", "attends"),
    [
        # QKV, attention output, gate and up, down.
        ({}, 4, 1),
        ({"fuse_qkv": False}, 6, 1),
        ({"fuse_ffn": False}, 5, 1),
        ({"flash_attn": False}, 4, 0),
    ],
)
@pytest.mark.parametrize(("name", "n_tokens"), [(NAMES[0], 1), (NAMES[1], 32)])
def test_number_of_kernels(kernels, model, name, n_tokens, flags, products, attends):
    """One product serves tensors of several types; nothing else touches a packed weight."""
    made = model(name, quantized=True)
    eqns = list(equations(trace(made, n_tokens, **flags).jaxpr))
    n_layer = made.hp.n_layer
    per_layer = {"linear": products, "attend": attends}
    per_layer["add_normed"] = 2 if name == "gemma3-dense" else 0
    expected = Counter({target(kind): n_layer * n for kind, n in per_layer.items()})
    expected += Counter({target("linear"): 1, target("take"): 1})  # the head, the embeddings
    assert calls(eqns) == expected
    readers = {e.primitive.name for e in eqns for v in e.invars if v.aval.dtype == np.uint8}
    assert readers == {"ffi_call"}
    if attends:
        assert "dot_general" not in {e.primitive.name for e in eqns}


@ONE_VARIANT
@pytest.mark.parametrize(
    ("name", "flags", "linear", "attend", "experts"),
    [
        # A delta net layer: inputs, output, gate and up, down. One that attends: as many.
        ("qwen35-dense", {}, 8, 1, 0),
        # The inputs are of four tensors, those of the other layer of three.
        ("qwen35-dense", {"fuse_qkv": False}, 8 + 3 + 2, 1, 0),
        ("qwen35-dense", {"flash_attn": False}, 8, 0, 0),
        # Instead of the feed-forward: router, shared gate and up, shared down; experts twice.
        ("qwen3next-moe", {}, 2 * (2 + 3), 1, 4),
        ("qwen3next-joined-moe", {}, 2 * (2 + 3), 1, 4),
    ],
)
def test_kernels_of_other_layers(kernels, model, name, flags, linear, attend, experts):
    found = calls(equations(trace(model(name), 1, **flags).jaxpr))
    per_kind = {"linear": linear + 1, "attend": attend, "experts": experts, "take": 1}
    assert found == Counter({target(kind): n for kind, n in per_kind.items() if n})


@ONE_VARIANT
@pytest.mark.parametrize("tokens", [[5], list(range(20))], ids=["decode", "prefill"])
def test_regions_are_updated_in_place(kernels, model, tmp_path, tokens):
    context = Context(model("gemma3-dense"), n_ctx=64, settings=Settings(home=tmp_path))
    assert context.decode(Batch(token=tokens)) == 0  # the first step's regions are new
    before = context.store.regions()
    pointers = [region.unsafe_buffer_pointer() for region in before]
    assert context.decode(Batch(token=tokens)) == 0
    after = context.store.regions()
    assert [region.unsafe_buffer_pointer() for region in after] == pointers
    assert all(region.is_deleted() for region in before)
    executable = context.graphs.entries[0].compiled.run
    kv_bytes = sum(region.nbytes for region in after)
    assert executable.memory_analysis().alias_size_in_bytes == kv_bytes
