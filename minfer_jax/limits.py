"""What sizes a context can have, and what the machine can hold."""

from __future__ import annotations

from numbers import Integral

from minfer_jax.device import Device, host_memory
from minfer_jax.errors import UsageError
from minfer_jax.memory.plan import MemoryPlan

MAX_SEQUENCES = 256
N_BATCH = 2048
"""Rows of a batch, at most, unless a context says otherwise."""


def default_kv_types(exact: bool) -> tuple[str, str]:
    """Types of K and V unless others are asked for."""
    return ("f32", "f32") if exact else ("f16", "f16")


def check_sizes(n_ctx: int, n_batch: int, n_ubatch: int) -> None:
    """Raise `UsageError` for sizes that no context can have."""
    check_range("n_ctx", n_ctx, 1, 1 << 24)
    check_range("n_batch", n_batch, 1, 1 << 24)
    check_range("n_ubatch", n_ubatch, 1, 1 << 16)


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raise `UsageError` unless a number is a whole one of low to high."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= value <= high:
        raise UsageError(f"{name} is {value!r}; allowed: {low} to {high}")


def check_memory(plan: MemoryPlan, weights_bytes: int, device: Device) -> None:
    """Refuse what the host cannot hold: to ask for it would end the process."""
    total = host_memory() if device.platform == "cpu" else None
    if total is not None and weights_bytes + plan.nbytes > total:
        raise UsageError(
            f"the weights need {weights_bytes / 2**30:.1f} GiB and the context"
            f" {plan.nbytes / 2**30:.1f} GiB for what it remembers, there are"
            f" {total / 2**30:.1f} GiB of memory: lower -c/--n-ctx, or use a smaller model"
        )
