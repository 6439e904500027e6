"""The graph's side of a memory: which cache or which states a layer has, and their arrays."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from minfer_jax.graph.inputs import CacheRows, Rows, StateRows, StepInputs
from minfer_jax.graph.params import CParams, GType
from minfer_jax.memory.kv_view import KVView
from minfer_jax.memory.plan import MemoryPlan, RecurrentSpec


def n_fields(plan: MemoryPlan) -> int:
    """Rows of the matrix that tells a step of its rows."""
    n = len(Rows._fields) + len(CacheRows._fields) * len(plan.caches)
    return n + (len(StateRows._fields) if plan.recurrent else 0)


class MemoryView:
    """The regions of one trace, part by part.

    Their order never changes: donation pairs buffers by shape in the order of the outputs, and any
    other order would copy every region in every step.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        regions: Sequence[Array],
        inputs: StepInputs,
        cparams: CParams,
        gtype: GType,
    ) -> None:
        fields = list(inputs.rows)
        rows = Rows(*fields[: len(Rows._fields)])
        at, start, maps = len(Rows._fields), 0, iter(inputs.maps)
        self._caches: dict[int, tuple[KVView, int]] = {}
        self._views: list[KVView] = []
        for spec in plan.caches:
            n_k, n_v = len(spec.k_layout), len(spec.v_layout)
            mapped = cparams.kv_map or bool(spec.window)
            view = KVView(
                spec,
                tuple(regions[start : start + n_k]),
                tuple(regions[start + n_k : start + n_k + n_v]),
                CacheRows(*fields[at : at + 3]),
                (rows.pos, rows.seq, jnp.asarray(next(maps))) if mapped else None,
                cparams,
            )
            self._views.append(view)
            self._caches |= {il: (view, i) for i, il in enumerate(spec.layers)}
            start, at = start + n_k + n_v, at + 3
        self._states = None
        if plan.recurrent:
            state_rows = StateRows(*fields[at : at + 2])
            self._states = StatesView(plan.recurrent, regions[start:], state_rows, gtype)

    @property
    def regions(self) -> tuple[Array, ...]:
        views = [*self._views, *([self._states] if self._states else [])]
        return tuple(region for view in views for region in view.regions)

    def cache(self, il: int) -> tuple[KVView, int]:
        """The cache of layer `il`, and the number that the layer has in it."""
        return self._caches[il]

    @property
    def states(self) -> StatesView:
        """The recurrent states."""
        assert self._states is not None
        return self._states


class StatesView:
    """States [layers, slots, *shape] of one trace.

    Rows are seen as [s, t]: in a decode step every row is a sequence of its own, in a prefill all
    rows are of one.
    """

    def __init__(
        self, spec: RecurrentSpec, regions: Sequence[Array], rows: StateRows, gtype: GType
    ) -> None:
        self._index = {il: i for i, il in enumerate(spec.layers)}
        self._regions = list(regions)
        n = rows.read.shape[0]
        self.shape = (1, n) if gtype is GType.PREFILL else (n, 1)
        """Sequences, and rows of each."""
        self.real = (rows.written < spec.n_slots).reshape(self.shape)
        """Which rows are not padding: bool [s, t]."""
        # The first row of a sequence is always a real one, or all of the sequence is padding.
        self._read = rows.read.reshape(self.shape)[:, 0]
        self._written = rows.written.reshape(self.shape)[:, 0]

    @property
    def regions(self) -> tuple[Array, ...]:
        return tuple(self._regions)

    def load(self, il: int) -> tuple[Array, ...]:
        """The states of layer `il`: float32 [s, *shape] each, zeros for a sequence that begins."""
        load = self._load_one if self.shape[0] == 1 else self._load_each
        with jax.named_scope("load_states"):
            return tuple(load(region, self._index[il]) for region in self._regions)

    def _load_each(self, region: Array, layer: int) -> Array:
        return region.at[np.int32(layer), self._read].get(mode="fill", fill_value=0)

    def _load_one(self, region: Array, layer: int) -> Array:
        """The same of one sequence, behind a condition, whose result is computed once.

        A slice would become part of all that reads it, the store of the new state among them, and
        XLA's CPU compiler would copy the whole region for that, in every layer.
        """
        slot, shape = self._read[0], region.shape[2:]

        def held(region: Array) -> Array:
            at = (np.int32(layer), slot, *[np.int32(0)] * len(shape))
            return lax.dynamic_slice(region, at, (1, 1, *shape))[0]

        def nothing(region: Array) -> Array:
            return jnp.zeros((1, *shape), region.dtype)

        return lax.cond(slot < np.int32(region.shape[1]), held, nothing, region)

    def store(self, il: int, states: Sequence[Array]) -> None:
        """Keep the states after this ubatch."""
        with jax.named_scope("store_states"):
            for i, state in enumerate(states):
                region = self._regions[i]
                assert state.shape[1:] == region.shape[2:], (state.shape, region.shape)
                self._regions[i] = region.at[np.int32(self._index[il]), self._written].set(
                    state.astype(jnp.float32), mode="drop"
                )
