"""What a model's memory is made of: caches of keys and values, and recurrent states.

A plan is fixed for a context. Its host side allocates and keeps books by it, its graph side finds a
layer's arrays by it; neither looks at the model again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from minfer_jax.errors import UsageError
from minfer_jax.models.hparams import HParams
from minfer_jax.ops.attention import BLOCK
from minfer_jax.ops.kv_types import KV_TYPES

Layout = tuple[tuple[tuple[int, ...], Any], ...]
"""Shapes and types of arrays."""

WORD = 32
"""Sequences whose bits share an int32 of a cell's mask."""


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """One cache of keys and values, for the layers `layers`."""

    layers: tuple[int, ...]
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    v_in_k: bool = False
    """A value is the first part of its key (multi-head latent attention): there is no V."""
    types: tuple[str, str]
    window: int
    """Of a sliding-window cache that is smaller than the context: positions that a row sees.
    0: no cell is overwritten while its token is remembered."""
    n_stream: int
    """1 if all sequences share the cells, else one stream of cells for each of them."""
    stream_cells: int
    """Cells of a stream, in whole attention blocks."""
    stream_size: int = field(compare=False)
    """Of them, those that may be used. No graph knows: contexts that differ by less than a block
    share theirs."""
    n_seq: int
    """Sequences that a cell can belong to."""

    @property
    def n_cells(self) -> int:
        return self.n_stream * self.stream_cells

    @property
    def words(self) -> int:
        """Words of a cell's mask of sequences."""
        return math.ceil(self.n_seq / WORD)

    @property
    def k_layout(self) -> Layout:
        heads = len(self.layers) * self.n_head_kv
        return KV_TYPES[self.types[0]].arrays(heads, self.n_cells, self.head_dim_k)

    @property
    def v_layout(self) -> Layout:
        if self.v_in_k:
            return ()
        heads = len(self.layers) * self.n_head_kv
        return KV_TYPES[self.types[1]].arrays(heads, self.n_cells, self.head_dim_v)

    @property
    def bytes_per_cell(self) -> int:
        """Bytes of one token's keys and values in all of these layers."""
        k, v = (KV_TYPES[kind] for kind in self.types)
        head = k.bytes(self.head_dim_k) + (0 if self.v_in_k else v.bytes(self.head_dim_v))
        return len(self.layers) * self.n_head_kv * head


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec:
    """The states of the layers `layers`: an array per shape, [layers, slots, *shape] float32."""

    layers: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    n_slots: int
    n_snapshots: int = field(compare=False)
    """States behind its last one that a sequence can go back to."""

    @property
    def layout(self) -> Layout:
        return tuple(((len(self.layers), self.n_slots, *shape), "float32") for shape in self.shapes)

    @property
    def bytes_per_slot(self) -> int:
        return 4 * len(self.layers) * sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Caches first, recurrent states last. Without either a model remembers nothing (encoders)."""

    caches: tuple[CacheSpec, ...] = ()
    recurrent: RecurrentSpec | None = None

    @property
    def layout(self) -> Layout:
        """Arrays of all parts, in the order in which every graph takes and returns them."""
        arrays: Layout = ()
        for cache in self.caches:
            arrays += cache.k_layout + cache.v_layout
        return arrays + (self.recurrent.layout if self.recurrent else ())

    @property
    def bytes_per_cell(self) -> int:
        """Bytes that one token occupies in the caches."""
        return sum(cache.bytes_per_cell for cache in self.caches)

    def as_dict(self) -> dict[str, object]:
        """For reports: types, and sizes in bytes."""
        return {
            "type_k": self.caches[0].types[0] if self.caches else None,
            "type_v": self.caches[0].types[1] if self.caches else None,
            "bytes_per_token": self.bytes_per_cell,
            "bytes_per_sequence": self.recurrent.bytes_per_slot if self.recurrent else 0,
            "bytes": self.nbytes,
        }

    @property
    def nbytes(self) -> int:
        cells = sum(cache.n_cells * cache.bytes_per_cell for cache in self.caches)
        states = self.recurrent
        return cells + (states.n_slots * states.bytes_per_slot if states else 0)


def plan_memory(
    hp: HParams,
    *,
    n_ctx: int,
    n_seq_max: int = 1,
    kv_unified: bool = False,
    swa_full: bool = False,
    n_ubatch: int = 512,
    n_snapshots: int = 0,
    types: tuple[str, str] = ("f16", "f16"),
) -> MemoryPlan:
    """The memory of a model for a context of these sizes.

    Sliding-window layers hold `window * sequences + n_ubatch` cells, or all with `swa_full`. Raises
    `UsageError` for KV types that the model's heads cannot have.
    """
    check_names(types)
    layers = [] if hp.encoder else [il for il in range(hp.n_layer) if hp.attends(il)]
    n_stream = 1 if kv_unified else n_seq_max
    size = n_ctx // n_stream
    n_seq = n_seq_max if kv_unified else 1

    def cache(layers: list[int], window: int) -> CacheSpec:
        wanted = min(size, window * n_seq + n_ubatch) if window else size
        cells = math.ceil(wanted / BLOCK) * BLOCK
        rolls = window > 0 and cells < size
        spec = CacheSpec(
            layers=tuple(layers),
            n_head_kv=hp.n_head_kv,
            head_dim_k=hp.head_dim_k,
            head_dim_v=hp.head_dim_v,
            v_in_k=hp.mla is not None and not hp.mla.unfolded,
            types=types,
            window=window if rolls else 0,
            n_stream=n_stream,
            stream_cells=cells,
            stream_size=cells if rolls else size,
            n_seq=n_seq,
        )
        check_types(spec)
        return spec

    windowed = [] if swa_full else [il for il in layers if hp.window(il)]
    whole = [il for il in layers if il not in windowed]
    caches = [cache(whole, 0)] if whole else []
    caches += [cache(windowed, hp.n_swa)] if windowed else []
    if len(caches) == 2 and not caches[1].window:
        caches = [cache(layers, 0)]  # no smaller than the other: one cache serves both
    recurrent = tuple(il for il in range(hp.n_layer) if hp.recurs(il))
    states = RecurrentSpec(
        layers=recurrent,
        shapes=hp.states,
        # One that is being written, and the one that a failed call goes back to.
        n_slots=n_seq_max * (2 + n_snapshots),
        n_snapshots=n_snapshots,
    )
    return MemoryPlan(caches=tuple(caches), recurrent=states if recurrent else None)


def check_names(types: tuple[str, str]) -> None:
    """Raise `UsageError` for anything but the names of two types."""
    if not isinstance(types, tuple) or len(types) != 2:
        raise UsageError(f"the types of K and V are {types!r}; allowed: two names in a tuple")
    for name, kind in zip("KV", types, strict=True):
        if not isinstance(kind, str) or kind not in KV_TYPES:
            raise UsageError(
                f"{name} of type {kind!r} is not supported; supported: {', '.join(KV_TYPES)}"
            )


def check_types(spec: CacheSpec) -> None:
    """Raise `UsageError` for types of K and V that heads of these widths cannot have."""
    for name, kind, width in zip("KV", spec.types, (spec.head_dim_k, spec.head_dim_v), strict=True):
        if width % KV_TYPES[kind].multiple:
            raise UsageError(
                f"{name} of type {kind} needs heads of a multiple of"
                f" {KV_TYPES[kind].multiple} values; this model's have {width}: use f16"
            )
    if spec.v_in_k and spec.types[0] != spec.types[1]:
        raise UsageError(
            f"K of type {spec.types[0]} and V of type {spec.types[1]}: this model keeps both in one"
            " array; give them one type"
        )
