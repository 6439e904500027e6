"""What a model's graphs are made of: in-place KV, no cache-sized copies, pure traces."""

import re

import jax
import numpy as np
import pytest
from steps import step_of
from tiny_models import ARCHS

from minfer_jax.batch import Batch
from minfer_jax.context import Context
from minfer_jax.graph.compile import CompiledGraph, verify_structural
from minfer_jax.graph.params import GType
from minfer_jax.sampling import Sampler, SamplingParams

DECODE = Batch(token=[5])
PREFILL = Batch(token=list(range(20)))


def compiled(context: Context, batch: Batch) -> CompiledGraph:
    """The graph that runs `batch`."""
    assert context.decode(batch) == 0
    return context.graphs.entries[0].compiled


@pytest.fixture(scope="module")
def lm(load_tiny):
    return load_tiny("llama-gqa-dense", exact=False)


@pytest.mark.parametrize("batch", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_kv_is_updated_in_place(lm, batch):
    context = lm.context(n_ctx=64)
    context.decode(batch)  # the first step's regions are new
    before = context.store.regions()
    pointers = [region.unsafe_buffer_pointer() for region in before]
    context.decode(batch)
    after = context.store.regions()
    assert [region.unsafe_buffer_pointer() for region in after] == pointers
    assert all(region.is_deleted() for region in before)


@pytest.mark.parametrize("kind", ["exact", "fast"])
@pytest.mark.parametrize("batch", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("name", ["llama-gqa-dense", "gemma3-dense"])
def test_cost_of_a_step_does_not_grow_with_n_ctx(load_tiny, name, batch, kind):
    """No cache-sized copy in the compiled text, every region aliased, temporaries of equal size."""
    temp = {}
    for n_ctx in (512, 8192):
        context = load_tiny(name, exact=kind == "exact").context(n_ctx=n_ctx)
        executable = compiled(context, batch).run
        analysis = executable.memory_analysis()
        assert analysis.alias_size_in_bytes == sum(r.nbytes for r in context.store.regions())
        text = executable.as_text()
        assert f",{n_ctx}," in text  # the regions are there
        moved = r"= \S*[\[,]" + str(n_ctx) + r"[,\]]\S* (copy|convert|transpose|concatenate)\("
        assert re.findall(moved, text) == []
        temp[n_ctx] = analysis.temp_size_in_bytes
    # A few bytes are for the loop's counters, whose layout is the compiler's.
    assert abs(temp[8192] - temp[512]) < 4096


@pytest.mark.parametrize(
    ("name", "several"), [("llama-gqa-dense", False), ("gemma3-dense", True), ("jamba-dense", True)]
)
def test_a_loop_updates_every_region_in_place(load_tiny, name, several):
    """They are carried from step to step: a copy would cost as much as the cache is large."""
    n = 3 if several else 1
    temp = {}
    for n_ctx in (512, 8192):
        context = load_tiny(name, exact=False).context(n_ctx=n_ctx, n_seq_max=n, kv_unified=several)
        batch = Batch(token=[5] * n, seq_id=range(n))
        samplers = [Sampler(SamplingParams()) for _ in range(n)]
        assert context.decode_loop(batch, samplers, 4)[0] == 0
        before = [region.unsafe_buffer_pointer() for region in context.store.regions()]
        assert context.decode_loop(batch, samplers, 4)[0] == 0
        regions = context.store.regions()
        assert [region.unsafe_buffer_pointer() for region in regions] == before
        executable = context.graphs.entries[0].compiled.run
        analysis = executable.memory_analysis()
        assert analysis.alias_size_in_bytes == sum(r.nbytes for r in regions)
        shapes = {",".join(map(str, region.shape)) for region in regions}
        moved = rf"= \S*\[({'|'.join(shapes)})\]\S* (copy|convert|transpose|concatenate)\("
        assert re.findall(moved, executable.as_text()) == []
        temp[n_ctx] = analysis.temp_size_in_bytes
    maps = 0 if not several and name == "llama-gqa-dense" else 16 * 8192
    assert temp[8192] - temp[512] < 4096 + maps


STEPS = {
    "decode": Batch(token=[5]),
    "decode of several": Batch(token=[5] * 3, seq_id=range(3)),
    "prefill": PREFILL,
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ["mamba-dense", "mamba2-dense", "rwkv6-dense", "jamba-dense"])
def test_cost_of_a_step_does_not_grow_with_the_slots_of_states(load_tiny, name, step):
    """Slots are two a sequence."""
    temp = []
    for n_seq_max in (23, 231):
        context = load_tiny(name).context(n_ctx=512, n_seq_max=n_seq_max, kv_unified=True)
        executable = compiled(context, STEPS[step]).run
        analysis = executable.memory_analysis()
        assert analysis.alias_size_in_bytes == sum(r.nbytes for r in context.store.regions())
        text = executable.as_text()
        assert f",{2 * n_seq_max}," in text  # the regions are there
        moved = rf"= \S*[\[,]{2 * n_seq_max}[,\]]\S* (copy|convert|transpose|concatenate)\("
        assert re.findall(moved, text) == []
        temp.append(analysis.temp_size_in_bytes)
    assert abs(temp[1] - temp[0]) < 4096


@pytest.mark.parametrize("flags", [{}, {"flash_attn": False, "fuse_qkv": False, "fuse_ffn": False}])
@pytest.mark.parametrize("n_tokens", [1, 32])
@pytest.mark.parametrize("name", ARCHS)
def test_traces_are_pure(load_tiny, name, n_tokens, flags):
    lm = load_tiny(name, exact=False)
    make_step, params, args = step_of(lm.model, n_tokens, **flags)
    verify_structural(make_step, params, args)


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("n_tokens", [1, 32])
@pytest.mark.parametrize("name", ARCHS)
def test_jax_settings_do_not_change_a_trace(load_tiny, name, n_tokens, several):
    """Of a decode step of one or four sequences, and of a prefill through a map of the cells."""
    lm = load_tiny(name, exact=False)
    if several and n_tokens == 1:
        make_step, params, args = step_of(lm.model, 4, gtype=GType.DECODE)
    else:
        make_step, params, args = step_of(lm.model, n_tokens, kv_map=several)

    def trace() -> str:
        text = str(jax.make_jaxpr(make_step(), static_argnums=0)(params, *args))
        return re.sub(r" at 0x[0-9a-f]+", "", text)

    plain = trace()
    with jax.enable_x64(True), jax.default_matmul_precision("bfloat16"):
        assert trace() == plain


def test_an_all_rows_graph_differs_from_a_last_row_graph_only_in_rows(lm):
    context = lm.context(n_ctx=64)
    tokens = list(range(3, 20))
    context.decode(Batch(token=tokens))
    last = context.logits()
    context.memory.clear()
    context.decode(Batch(token=tokens, logits=[True] * len(tokens)))
    everything = context.all_logits()
    assert everything.shape == (len(tokens), lm.model.hp.n_vocab)
    np.testing.assert_allclose(everything[-1], last, atol=1e-5 * everything.std())


def test_weights_are_arguments_and_survive(lm):
    """A weight that became a constant of the graph would be held once per executable."""
    context = lm.context(n_ctx=64)
    text = compiled(context, DECODE).run.as_text()
    constants = re.findall(r"= \w+\[([\d,]*)\][^=]* constant\(", text)
    sizes = [int(np.prod([int(d) for d in dims.split(",") if d])) for dims in constants]
    assert max(sizes, default=0) <= 1024
    assert not any(leaf.is_deleted() for leaf in lm.model.weights.leaves)
