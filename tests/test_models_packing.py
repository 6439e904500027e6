"""Memory of packed matrices, and which form is chosen for a device."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from minfer_jax.models.packing import WeightForm, aligned, padded_rows, weight_form


@pytest.fixture(scope="module")
def device():
    return jax.devices("cpu")[0]


@pytest.mark.parametrize("shapes", [[(3, 5)], [(3, 5), (1, 5), (4, 5)], [(7,)], [(2, 3, 5)]])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32])
def test_host_memory_is_taken_as_it_is(shapes, dtype, device):
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 100, (*s[:-1], 2 * s[-1])).astype(dtype)[..., ::2] for s in shapes]
    expected = np.concatenate(parts)
    for _ in range(8):  # whatever the allocator's alignment is
        host = aligned(expected.shape, np.dtype(dtype), parts)
        assert host.ctypes.data % 64 == 0 and host.flags.c_contiguous
        assert not host.flags.writeable
        np.testing.assert_array_equal(host, expected)
        array = jax.device_put(host, device)
        assert array.unsafe_buffer_pointer() == host.ctypes.data
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize(("exact", "kernels"), [(False, "auto"), (True, "auto"), (False, "xla")])
def test_accelerators_get_planes(exact, kernels):
    gpu = SimpleNamespace(id=0, platform="gpu", device_kind="")
    assert weight_form(gpu, exact=exact, kernels=kernels) is WeightForm.PLANES


def test_tensors_begin_a_tile():
    assert [padded_rows(WeightForm.TILED, n) for n in (1, 16, 17)] == [16, 16, 32]
    assert [padded_rows(WeightForm.UNROLLED, n) for n in (1, 16, 17)] == [1, 16, 17]
