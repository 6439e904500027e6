"""The graph's side of one cache: where rows are written, that padding is not, what rows see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.graph.inputs import CacheRows
from minfer_jax.graph.params import CParams
from minfer_jax.memory.kv_view import KVView
from minfer_jax.memory.plan import CacheSpec

N_CELLS = 256


def spec(*, layers=1, heads=1, width=1, types=("f32", "f32"), v_in_k=False, d_v=None) -> CacheSpec:
    return CacheSpec(
        layers=tuple(range(layers)),
        n_head_kv=heads,
        head_dim_k=width,
        head_dim_v=d_v or width,
        v_in_k=v_in_k,
        types=types,
        window=0,
        n_stream=1,
        stream_cells=N_CELLS,
        stream_size=N_CELLS,
        n_seq=64,
    )


def full(layout, value) -> tuple[jax.Array, ...]:
    return tuple(jnp.full(shape, value, dtype) for shape, dtype in layout)


def int32(*rows) -> list[jax.Array]:
    return [jnp.asarray(row, jnp.int32) for row in rows]


def attend(cells, last, *, window=0, flash_attn=True, kind="f32", mapped=None):
    """One layer, one head of width 1: keys are all 0, so a row averages the values it sees."""
    n = len(cells)
    cache = spec(types=(kind, kind))
    rows = CacheRows(*int32(cells, [0] * n, last))
    values = jnp.arange(1.0, n + 1, dtype=jnp.float32).reshape(n, 1, 1)

    def run(k, v):
        cparams = CParams(n_ctx=200, flash_attn=flash_attn)
        view = KVView(cache, k, v, rows, mapped, cparams)
        out = view.attend(0, values * 0, values * 0, values, scale=1.0, window=window, cap=0.0)
        return out, view.regions

    before = full(cache.k_layout, -1), full(cache.v_layout, -1)
    out, (_, v) = jax.jit(run)(*before)
    return np.asarray(out)[:, 0, 0], np.asarray(v)[0, :, 0]


@pytest.mark.parametrize("flash_attn", [True, False])
def test_rows_see_cells_up_to_their_own(flash_attn):
    out, region = attend([0, 1, 2], [0, 1, 2], flash_attn=flash_attn)
    np.testing.assert_allclose(out, [1.0, 1.5, 2.0], rtol=1e-6)
    np.testing.assert_array_equal(region[:4], [1, 2, 3, -1])


@pytest.mark.parametrize("flash_attn", [True, False])
def test_window_counts_the_row_itself(flash_attn):
    out, _ = attend([0, 1, 2, 3], [0, 1, 2, 3], window=2, flash_attn=flash_attn)
    np.testing.assert_allclose(out, [1.0, 1.5, 2.5, 3.5], rtol=1e-6)


@pytest.mark.parametrize("flash_attn", [True, False])
def test_padding_writes_nowhere(flash_attn):
    """-1 would wrap to the last cell, and a clamped write would hit it too."""
    _, region = attend([0, N_CELLS, N_CELLS], [0, -1, -1], flash_attn=flash_attn)
    np.testing.assert_array_equal(region, [1] + [-1] * (N_CELLS - 1))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_region_keeps_its_type(kind):
    out, region = attend([0, 1], [0, 1], kind=kind)
    assert region.dtype == {"f16": np.float16, "bf16": np.uint16}[kind]
    np.testing.assert_array_equal(out, [1.0, 1.5])


@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize(("window", "want"), [(0, [1.5, 2, 3.5, 3.25]), (2, [1.5, 2, 4, 3.5])])
def test_mapped_rows_see_their_sequence_up_to_their_position(flash_attn, window, want):
    """Sequence 0 holds rows 0, 1 and 3 at positions 6, 5 and 7; sequence 40 row 2, and 3 as well.

    Row 0, at 6, sees 5 and 6; row 1 itself. Row 2 is of sequence 40 at position 8: it sees 7 and 8.
    Row 3 at 7 sees 5, 6 and 7, and another at 4 that lay there before.
    """
    cells = np.zeros((3, N_CELLS), np.int32)
    cells[0] = -1
    for cell, pos, words in ((9, 6, (1, 0)), (3, 5, (1, 0)), (4, 8, (0, 256)), (250, 7, (1, 256))):
        cells[:, cell] = pos, *words
    cells[:, 100] = 4, 1, 0  # holds -1
    where = tuple(int32([6, 5, 8, 7], [0, 0, 40, 0], cells))
    out, region = attend(
        [9, 3, 4, 250],
        [250] * 4,
        window=window,
        flash_attn=flash_attn,
        mapped=where,
    )
    assert region[[9, 3, 4, 250]].tolist() == [1, 2, 3, 4]
    seen = {
        0: [[1, 2, -1], [2, -1], [3, 4], [1, 2, 4, -1]],
        2: [[1, 2], [2, -1], [3, 4], [1, 4]],
    }[window]
    np.testing.assert_allclose(out, [np.mean(values) for values in seen], rtol=1e-6)


@pytest.mark.parametrize("flash_attn", [True, False])
def test_layers_lie_one_after_the_other(flash_attn):
    """Two layers of two heads of width 1: each writes and reads its own heads only."""
    cache = spec(layers=2, heads=2)
    rows = CacheRows(*int32([5], [5], [5]))

    def run(k, v):
        view = KVView(cache, k, v, rows, None, CParams(n_ctx=200, flash_attn=flash_attn))
        outs = []
        for layer in range(2):
            values = jnp.asarray([[[10.0], [20.0]]], jnp.float32) + layer
            outs.append(view.attend(layer, values, values, values, scale=1.0, window=0, cap=0.0))
        return outs, view.regions

    outs, regions = jax.jit(run)(full(cache.k_layout, -1), full(cache.v_layout, -1))
    np.testing.assert_array_equal(np.ravel(outs), [10, 20, 11, 21])
    for region in regions:
        np.testing.assert_array_equal(np.asarray(region)[:, 5, 0], [10, 20, 11, 21])
        assert np.count_nonzero(np.asarray(region) != -1) == 4


@pytest.mark.parametrize("types", [("q8_0", "f16"), ("f32", "q4_0")])
def test_every_plane_of_a_quantized_type_is_written_and_read(types):
    cache = spec(heads=2, width=32, types=types)
    rows = CacheRows(*int32([7, N_CELLS], [7, 0], [7, -1]))
    values = np.zeros((2, 2, 32), np.float32)
    values[0] = np.arange(-16, 16) / 2  # whole steps of half
    values[1] = np.inf  # padding

    def run(k, v):
        view = KVView(cache, k, v, rows, None, CParams(n_ctx=200))
        q = jnp.zeros((2, 2, 32), jnp.float32)
        args = {"scale": 1.0, "window": 0, "cap": 0.0}
        return view.attend(0, q, values, values, **args), view.regions

    before = full(cache.k_layout, 3), full(cache.v_layout, 3)
    out, regions = jax.jit(run)(*before)
    np.testing.assert_allclose(np.asarray(out)[0], values[0], atol=0.51 if "q4_0" in types else 0)
    assert len(regions) == 3
    for array in regions:
        elsewhere = np.delete(np.asarray(array), 7, axis=1)
        assert (elsewhere == 3).all() and not (np.asarray(array)[:, 7] == 3).all()


def test_values_that_are_a_part_of_their_keys():
    cache = spec(width=5, d_v=3, v_in_k=True)
    rows = CacheRows(*int32([0, 1], [0, 0], [0, 1]))
    keys = jnp.arange(10, dtype=jnp.float32).reshape(2, 1, 5)

    def run(k):
        view = KVView(cache, k, (), rows, None, CParams(n_ctx=200))
        return view.attend(0, keys * 0, keys, None, scale=1.0, window=0, cap=0.0), view.regions

    out, regions = jax.jit(run)(full(cache.k_layout, -1))
    np.testing.assert_allclose(np.asarray(out)[:, 0], [[0, 1, 2], [2.5, 3.5, 4.5]])
    (region,) = regions
    np.testing.assert_array_equal(np.asarray(region)[0, :2], keys[:, 0])
