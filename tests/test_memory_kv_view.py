"""The graph's side of the KV memory: where rows are written, and that padding is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.graph.inputs import Rows
from minfer_jax.graph.params import CParams
from minfer_jax.memory.kv_view import KVView

N_CELLS = 256


def attend(cells, last, *, window=0, flash_attn=True, dtype=jnp.float32):
    """One layer, one head of width 1: keys are all 0, so a row averages the values it sees."""
    n = len(cells)
    last = jnp.asarray(last, jnp.int32)
    rows = Rows(last * 0, last, jnp.asarray(cells, jnp.int32), last * 0, last)
    values = jnp.arange(1.0, n + 1, dtype=jnp.float32).reshape(n, 1, 1)

    def run(k, v):
        view = KVView([k, v], rows, CParams(n_ctx=200, flash_attn=flash_attn))
        out = view.attend(0, values * 0, values * 0, values, scale=1.0, window=window, cap=0.0)
        return out, view.regions

    before = jnp.full((1, N_CELLS, 1), -1.0, dtype)
    out, (_, v) = jax.jit(run)(before, before)
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


def test_region_keeps_its_type():
    _, region = attend([0], [0], dtype=jnp.float16)
    assert region.dtype == np.float16


@pytest.mark.parametrize("flash_attn", [True, False])
def test_layers_lie_one_after_the_other(flash_attn):
    """Two layers of two heads of width 1: each writes and reads its own heads only."""
    rows = Rows(*(jnp.asarray([x], jnp.int32) for x in (0, 5, 5, 5, 5)))

    def run(k, v):
        view = KVView([k, v], rows, CParams(n_ctx=200, flash_attn=flash_attn))
        outs = []
        for il in range(2):
            values = jnp.asarray([[[10.0], [20.0]]], jnp.float32) + il
            outs.append(view.attend(il, values, values, values, scale=1.0, window=0, cap=0.0))
        return outs, view.regions

    before = jnp.full((4, N_CELLS, 1), -1.0, jnp.float32)
    outs, regions = jax.jit(run)(before, before)
    np.testing.assert_array_equal(np.ravel(outs), [10, 20, 11, 21])
    for region in regions:
        np.testing.assert_array_equal(np.asarray(region)[:, 5, 0], [10, 20, 11, 21])
        assert np.count_nonzero(np.asarray(region) != -1) == 4
