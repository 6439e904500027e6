"""The host's side of the KV memory: sizes, cursor, regions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.errors import ModelError
from minfer_jax.memory.kv import KVMemory
from minfer_jax.models.hparams import HParams
from minfer_jax.ops.rope_spec import RopeSpec

HP = HParams(
    arch="llama",
    n_vocab=8,
    n_ctx_train=64,
    n_embd=8,
    n_layer=3,
    n_head=4,
    n_head_kv=2,
    head_dim_k=4,
    head_dim_v=6,
    n_ff=8,
    norm_eps=1e-5,
    rope=RopeSpec(style="half", n_rot=4),
    attn_scale=0.5,
)


def memory(n_ctx: int = 300, kinds: tuple[str, str] = ("f16", "f32")) -> KVMemory:
    return KVMemory(HP, n_ctx=n_ctx, kv_format=kinds, device=jax.devices()[0])


def test_regions_are_rounded_up_to_the_attention_block():
    assert [memory(n).n_cells for n in (1, 255, 256, 257, 300)] == [256, 256, 256, 512, 512]


def test_one_region_of_k_and_one_of_v_hold_every_layer():
    m = memory()
    shapes = [(r.shape, r.dtype) for r in m.regions()]
    assert shapes == [((3 * 2, 512, 4), jnp.float16), ((3 * 2, 512, 6), jnp.float32)]
    assert [(a.shape, a.dtype) for a in m.abstract_regions()] == shapes
    assert HP.kv_bytes_per_cell(2) == 3 * 2 * (4 + 6) * 2


def test_cursor():
    m = memory()
    assert (m.n_past(), m.free_cells()) == (0, 300)
    m.advance(m.regions(), [0] * 7)
    assert (m.n_past(), m.free_cells()) == (7, 293)
    m.truncate(5)
    assert m.n_past() == 5
    for bad in (-1, 6):
        with pytest.raises(ValueError, match="cannot truncate"):
            m.truncate(bad)
    m.truncate(0)
    assert m.n_past() == 0


def test_truncating_keeps_the_regions_and_dropping_does_not():
    m = memory()
    regions = m.regions()
    m.truncate(0)
    assert m.regions() is regions
    m.advance(regions, [0] * 3)
    m.drop()
    assert m.n_past() == 0 and m.regions() is not regions


def test_donated_regions_that_never_came_back_are_lost():
    m = memory()
    assert not m.lost
    jax.jit(lambda r: r + 1, donate_argnums=0)(m.regions()[0])
    assert m.lost
    m.drop()
    assert not m.lost and not m.regions()[0].is_deleted()


def test_unknown_type_is_refused():
    with pytest.raises(ModelError, match="KV type 'q9' is not supported; supported: f16, f32"):
        memory(kinds=("f16", "q9"))


def streams(n_seq_max: int = 3, n_ctx: int = 900) -> KVMemory:
    return KVMemory(
        HP, n_ctx=n_ctx, n_seq_max=n_seq_max, kv_format=("f16", "f32"), device=jax.devices()[0]
    )


def test_streams_share_the_cells_evenly():
    m = streams()
    assert (m.n_ctx_seq, m.n_cells, m.n_seq_max) == (300, 3 * 512, 3)
    assert m.first_cell(np.array([0, 2, 1], np.int32)).tolist() == [0, 1024, 512]
    assert m.first_cell(np.array([2], np.int32)).dtype == np.int32
    m.advance(m.regions(), [2, 0, 2])
    assert m.lengths == (1, 0, 2) and [m.n_past(i) for i in range(3)] == [1, 0, 2]
    assert m.free_cells(2) == 298
    m.truncate(1, 2)
    assert m.lengths == (1, 0, 1)
    m.drop()
    assert m.lengths == (0, 0, 0)


def test_copying_replaces_what_a_stream_held():
    m = streams()
    filled = tuple(
        jnp.broadcast_to(jnp.arange(r.shape[1], dtype=r.dtype)[None, :, None], r.shape) + 0
        for r in m.regions()
    )
    m.advance(filled, [0] * 5 + [1] * 9)
    m.copy(0, 1, 4)
    assert m.lengths == (5, 4, 0)
    k, v = (np.asarray(r) for r in m.regions())
    for region in (k, v):
        for stream in (0, 1):
            cells = region[:, 512 * stream : 512 * stream + 512]
            expected = np.broadcast_to(np.arange(512)[None, :, None], cells.shape)
            np.testing.assert_array_equal(cells, expected)
        np.testing.assert_array_equal(region[2, 1024:, 1], np.arange(1024, 1536))
    regions = m.regions()
    m.copy(2, 1, 0)  # nothing to copy
    assert m.lengths == (5, 0, 0) and m.regions() is regions
