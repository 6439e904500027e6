"""What a memory is made of: which layers are in which part, how large it is, what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from minfer_jax.errors import UsageError
from minfer_jax.memory import plan as plans
from minfer_jax.memory.plan import MemoryPlan, plan_memory
from minfer_jax.models.hparams import EncoderParams, HParams, MLAParams
from minfer_jax.ops.rope_spec import RopeSpec

HP = HParams(
    arch="llama",
    n_vocab=8,
    n_ctx_train=64,
    n_embd=8,
    n_layer=4,
    n_head=4,
    n_head_kv=2,
    head_dim_k=64,
    head_dim_v=32,
    n_ff=8,
    norm_eps=1e-5,
    rope=RopeSpec(style="half", n_rot=4),
    attn_scale=0.5,
)
WINDOWED = replace(HP, n_swa=32, swa_layers=(True, False, True, True))
RECURRENT = replace(HP, recurrent_layers=(True,) * 4, states=((3, 5), (5, 2)))
MAMBA = replace(RECURRENT, attention_layers=(False,) * 4)
HYBRID = replace(
    RECURRENT,
    attention_layers=(False, True, False, False),
    recurrent_layers=(True, False, True, True),
)
BERT = EncoderParams(n_token_types=2, fused_qkv=False, ffn="plain")
BYTES = {"f32": (256, 128), "f16": (128, 64), "bf16": (128, 64), "q8_0": (68, 34), "q4_0": (36, 18)}
"""Of a key of 64 values and a value of 32: 34 or 18 bytes for 32 values of quantized types."""


def parts(plan: MemoryPlan) -> list[tuple[tuple[int, ...], int, int, int]]:
    """Layers, window, cells of a stream and usable ones of them, cache by cache."""
    return [(c.layers, c.window, c.stream_cells, c.stream_size) for c in plan.caches]


@pytest.mark.parametrize(
    ("n_ctx", "cells"), [(1, 256), (255, 256), (256, 256), (257, 512), (300, 512)]
)
def test_cells_are_rounded_up_to_the_attention_block(n_ctx, cells):
    plan = plan_memory(HP, n_ctx=n_ctx)
    assert parts(plan) == [((0, 1, 2, 3), 0, cells, n_ctx)] and plan.recurrent is None


def test_streams_and_a_cache_for_all():
    (cache,) = plan_memory(HP, n_ctx=1000, n_seq_max=3).caches
    assert (cache.n_stream, cache.stream_size, cache.n_cells, cache.n_seq) == (3, 333, 1536, 1)
    assert cache.words == 1
    (cache,) = plan_memory(HP, n_ctx=1000, n_seq_max=33, kv_unified=True).caches
    assert (cache.n_stream, cache.stream_size, cache.n_cells, cache.n_seq) == (1, 1000, 1024, 33)
    assert cache.words == 2


@pytest.mark.parametrize("k", BYTES)
@pytest.mark.parametrize("v", BYTES)
def test_bytes_per_cell_and_the_arrays_of_every_pair_of_types(k, v):
    plan = plan_memory(HP, n_ctx=512, types=(k, v))
    per_cell = 4 * 2 * (BYTES[k][0] + BYTES[v][1])
    assert plan.bytes_per_cell == per_cell and plan.nbytes == 512 * per_cell
    assert sum(int(np.prod(s)) * np.dtype(t).itemsize for s, t in plan.layout) == plan.nbytes
    assert all(shape[:2] == (8, 512) for shape, _ in plan.layout)
    assert len(plan.layout) == 2 + (k[0] == "q") + (v[0] == "q")


def test_what_a_model_attends_with_is_all_that_is_cached():
    (cache,) = plan_memory(replace(HP, attention_layers=(False, True, True, False)), n_ctx=9).caches
    assert cache.layers == (1, 2)
    assert cache.k_layout[0][0] == (4, 256, 64) and cache.v_layout[0][0] == (4, 256, 32)
    encoder = replace(HP, causal=False, encoder=BERT)
    assert plan_memory(encoder, n_ctx=100, n_seq_max=4) == MemoryPlan()
    assert MemoryPlan().layout == () and MemoryPlan().nbytes == MemoryPlan().bytes_per_cell == 0


# --- windows ------------------------------------------------------------------------------------


def test_window_layers_hold_windows_and_one_ubatch():
    """32 per sequence and a ubatch, in whole blocks."""

    def of(**options):
        return parts(plan_memory(WINDOWED, n_ctx=4096, **options))

    whole = ((1,), 0, 4096, 4096)
    assert of(n_ubatch=100) == [whole, ((0, 2, 3), 32, 256, 256)]
    assert of(n_ubatch=512) == [whole, ((0, 2, 3), 32, 768, 768)]
    shared = of(n_ubatch=100, n_seq_max=7, kv_unified=True)
    assert shared == [whole, ((0, 2, 3), 32, 512, 512)]  # 7 * 32 + 100 = 324
    apart = of(n_ubatch=100, n_seq_max=4)
    assert apart == [((1,), 0, 1024, 1024), ((0, 2, 3), 32, 256, 256)]
    plan = plan_memory(WINDOWED, n_ctx=4096, n_ubatch=100)
    assert plan.nbytes == (4096 + 3 * 256) * 2 * (128 + 64)
    assert plan.bytes_per_cell == 4 * 2 * (128 + 64)


@pytest.mark.parametrize("options", [{"swa_full": True}, {"n_ubatch": 4064}, {"n_ubatch": 9999}])
def test_one_cache_serves_all_layers_where_no_window_is_smaller(options):
    plan = plan_memory(WINDOWED, n_ctx=4096, **options)
    assert parts(plan) == [((0, 1, 2, 3), 0, 4096, 4096)]


def test_a_window_rolls_if_it_has_fewer_cells_than_the_context():
    def of(n_ctx):
        return parts(plan_memory(WINDOWED, n_ctx=n_ctx, n_ubatch=100))

    assert of(256) == [((0, 1, 2, 3), 0, 256, 256)]
    assert of(257) == [((1,), 0, 512, 257), ((0, 2, 3), 32, 256, 256)]
    alone = replace(WINDOWED, swa_layers=(True,) * 4)
    assert parts(plan_memory(alone, n_ctx=256, n_ubatch=9)) == [((0, 1, 2, 3), 0, 256, 256)]
    assert parts(plan_memory(alone, n_ctx=999, n_ubatch=9)) == [((0, 1, 2, 3), 32, 256, 256)]


# --- recurrent states ---------------------------------------------------------------------------


def test_states_of_recurrent_layers():
    plan = plan_memory(MAMBA, n_ctx=4096, n_seq_max=3)
    assert plan.caches == () and plan.recurrent is not None
    assert plan.recurrent.layers == (0, 1, 2, 3)
    assert plan.layout == (((4, 6, 3, 5), "float32"), ((4, 6, 5, 2), "float32"))
    assert plan.bytes_per_cell == 0 and plan.recurrent.bytes_per_slot == 4 * 4 * 25
    assert plan.nbytes == 6 * 4 * 4 * 25
    more = plan_memory(MAMBA, n_ctx=4096, n_seq_max=3, n_snapshots=5)
    assert more.recurrent is not None and more.recurrent.n_slots == 3 * (2 + 5)


def test_hybrids_have_both_and_the_states_come_last():
    plan = plan_memory(HYBRID, n_ctx=300, types=("q8_0", "f16"))
    assert parts(plan) == [((1,), 0, 512, 300)]
    assert plan.recurrent is not None and plan.recurrent.layers == (0, 2, 3)
    assert [shape for shape, _ in plan.layout] == [
        (2, 512, 64),
        (2, 512, 2),
        (2, 512, 32),
        (3, 2, 3, 5),
        (3, 2, 5, 2),
    ]
    both = plan_memory(RECURRENT, n_ctx=300)  # every layer has both
    assert both.caches[0].layers == (0, 1, 2, 3) and both.recurrent is not None
    assert both.recurrent.layers == (0, 1, 2, 3)


# --- identity -----------------------------------------------------------------------------------


def test_what_no_graph_knows_makes_no_other_plan():
    """Contexts that differ by less than a block share their graphs, and so their geometry."""
    assert plan_memory(HP, n_ctx=300) == plan_memory(HP, n_ctx=301)
    assert hash(plan_memory(HP, n_ctx=300)) == hash(plan_memory(HP, n_ctx=301))
    assert plan_memory(HP, n_ctx=300) != plan_memory(HP, n_ctx=600)
    assert plan_memory(HP, n_ctx=300) != plan_memory(HP, n_ctx=300, types=("f16", "f32"))
    unified = plan_memory(HP, n_ctx=300, n_seq_max=2, kv_unified=True)
    assert unified != plan_memory(HP, n_ctx=300, n_seq_max=3, kv_unified=True)


# --- latent attention ---------------------------------------------------------------------------

MLA = replace(
    HP,
    n_head_kv=1,
    head_dim_k=96,
    head_dim_v=64,
    mla=MLAParams(q_lora_rank=0, kv_lora_rank=64, head_dim_k=16, head_dim_v=16),
)


def test_a_latent_cache_has_no_values():
    plan = plan_memory(MLA, n_ctx=256, types=("q8_0", "q8_0"))
    (cache,) = plan.caches
    assert cache.v_in_k and cache.v_layout == ()
    assert plan.layout == (((4, 256, 96), np.int8), ((4, 256, 3), np.float16))
    assert plan.bytes_per_cell == 4 * 3 * 34 and plan.nbytes == 256 * 4 * 3 * 34
    assert MLA.mla is not None
    (cache,) = plan_memory(replace(MLA, mla=replace(MLA.mla, unfolded=True)), n_ctx=256).caches
    assert not cache.v_in_k and cache.v_layout[0][0] == (4, 256, 64)


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("hp", [HP, MAMBA, WINDOWED, MLA])
@pytest.mark.parametrize(("types", "which"), [(("q9", "f16"), "K"), (("f16", "F16"), "V")])
def test_unknown_types_are_refused(hp, types, which):
    with pytest.raises(UsageError, match=rf"^{which} of type .* is not supported; supported: f32"):
        plan_memory(hp, n_ctx=64, types=types)


@pytest.mark.parametrize("types", ["f16", ("f16",), ["f16", "f16"], ("f16", "f16", "f16"), 7])
def test_types_that_are_no_pair_of_names(types):
    with pytest.raises(UsageError, match=r"^the types of K and V are .*; allowed: two names"):
        plan_memory(HP, n_ctx=64, types=types)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_k04_quantized_types_need_whole_blocks(kind):
    narrow = replace(HP, head_dim_v=48)
    plan_memory(narrow, n_ctx=64, types=(kind, "f16"))
    with pytest.raises(UsageError, match=rf"V of type {kind} needs .* of 32 values.* have 48: use"):
        plan_memory(narrow, n_ctx=64, types=("f16", kind))
    with pytest.raises(UsageError, match=rf"K of type {kind} needs .* of 32 values.* have 80: use"):
        plan_memory(replace(HP, head_dim_k=80), n_ctx=64, types=(kind, "f16"))


def test_a_latent_cache_has_one_type():
    with pytest.raises(UsageError, match="K of type q8_0 and V of type f16: this model keeps both"):
        plan_memory(MLA, n_ctx=64, types=("q8_0", "f16"))


def test_small_blocks_for_tests(monkeypatch):
    """Other tests make windows roll in contexts of 48 by this."""
    monkeypatch.setattr(plans, "BLOCK", 4)
    plan = plan_memory(replace(WINDOWED, n_swa=4), n_ctx=48, n_ubatch=3)
    assert parts(plan) == [((1,), 0, 48, 48), ((0, 2, 3), 4, 8, 8)]
