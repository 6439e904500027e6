"""Zeros in large pages: what they are is what jnp.zeros makes, wherever the memory comes from."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from minfer_jax.ops.cpu.pages import zeros

LAYOUT = (
    ((3, 5, 7), np.dtype(np.float16)),
    ((1,), np.dtype(np.int8)),
    ((4, 1 << 20), np.dtype(np.uint8)),
    ((3, (1 << 20) + 13), np.dtype(np.float32)),  # pieces and pages end where rows do not
)


@pytest.mark.usefixtures("native_library")
def test_memory_that_was_used_before_is_zero_in_every_type_and_size():
    device = jax.devices("cpu")[0]
    for _ in range(3):
        made = zeros(LAYOUT, device)
        for array, (shape, dtype) in zip(made, LAYOUT, strict=True):
            assert array.shape == shape and array.dtype == dtype
            assert array.devices() == {device}
            assert not np.asarray(array).any()
        # Dirty memory for the allocator to hand out again.
        filled = [jax.block_until_ready(array + np.ones((), array.dtype)) for array in made]
        del made, filled


def test_without_kernels_zeros_are_made_by_xla(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("minfer_jax.ops.cpu.pages.register_targets", lambda: False)
    made = zeros(LAYOUT, jax.devices("cpu")[0])
    assert [(a.shape, a.dtype) for a in made] == list(LAYOUT)
    assert not any(np.asarray(a).any() for a in made)
