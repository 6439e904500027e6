"""A model that can be run: hyperparameters, weights on a device, and its tables of graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import jax
from jax import Array

from minfer_jax.device import Device
from minfer_jax.gguf import GGUFFile
from minfer_jax.graph import disk
from minfer_jax.graph.ahead import Ahead
from minfer_jax.graph.cache import GraphCache, GraphEntry
from minfer_jax.graph.compile import CompiledGraph, Step, compile_step, verify_structural
from minfer_jax.graph.inputs import LOOP_ENDS, LOOP_STEPS, LoopInputs, StepInputs
from minfer_jax.graph.params import GraphParams, GType
from minfer_jax.memory.plan import MemoryPlan
from minfer_jax.memory.view import MemoryView, n_fields
from minfer_jax.models.decode_loop import decode_loop
from minfer_jax.models.forward import ROPE_FACTORS, Forward
from minfer_jax.models.native_forward import NativeForward
from minfer_jax.models.packing import WeightForm
from minfer_jax.models.registry import architecture
from minfer_jax.models.weights import Progress, load_weights
from minfer_jax.ops.cpu.library import register_targets
from minfer_jax.sampling.in_graph import blank_inputs, choose
from minfer_jax.settings import Settings

_ONE_OF_EACH = ((GType.PREFILL,), (GType.DECODE, GType.DECODE_LOOP), (GType.ENCODE,))
"""Of each of these groups of graphs, a run needs one soon: that which the last one used."""


@dataclass(frozen=True)
class Geometry:
    """What is fixed for a context and shapes its graphs, beside `CParams`: the key of a table."""

    n_ubatch: int
    plan: MemoryPlan
    """The parts of the memory."""
    regions: tuple[jax.ShapeDtypeStruct, ...]
    """Shapes and types of their arrays."""


class Model:
    """Weights and graphs of one file. Contexts of equal geometry share a table of graphs."""

    def __init__(
        self,
        file: GGUFFile,
        *,
        device: Device,
        form: WeightForm,
        settings: Settings,
        progress: Progress | None = None,
        on_build: Callable[[GraphEntry, str], None] | None = None,
    ) -> None:
        self.path: Path = file.path
        self.device = device
        self._family = architecture(file)
        self.hp = self._family.hparams(file)
        self._form = form
        self._forward = NativeForward if form is WeightForm.TILED else Forward
        if form is WeightForm.TILED:
            register_targets()  # before an executable that names them is loaded
        kinds = [[self._kind(gtype) for gtype in group] for group in _ONE_OF_EACH]
        self._ahead = Ahead(settings.xla_dir, file.path, kinds, device)  # while weights are packed
        # With a bias, a cap or a scale behind the head, its products are not yet at the distances
        # that tell a likely token from an unlikely one.
        plain_head = (
            not self.hp.final_softcap
            and self.hp.logit_scale == 1.0
            and "output.bias" not in file.tensors
        )
        self.weights = load_weights(
            file, self._family.tensors(self.hp), device, form, progress, split_head=plain_head
        )
        self.weights_version = 0
        self._settings = settings
        self._on_build = on_build
        self._tables: WeakValueDictionary[Geometry, GraphCache] = WeakValueDictionary()

    def graphs(self, geometry: Geometry) -> GraphCache:
        """The table of graphs for contexts of this geometry; it lives as long as one of them."""
        table = self._tables.get(geometry)
        if table is None:
            table = GraphCache(
                partial(self._build, geometry),
                reuse=not self._settings.reuse_disabled,
                on_build=self._on_build,
            )
            self._tables[geometry] = table
        return table

    def rope_factors(self) -> Array | None:
        """What divides the frequencies of rotations: float32 [n_rot / 2]; None without."""
        view = self.weights.view(self.weights.leaves)
        return view.vector(ROPE_FACTORS) if ROPE_FACTORS in view else None

    def make_step(self, plan: MemoryPlan) -> Step:
        """A new function of one step: the whole forward pass of one ubatch."""

        def step(
            params: GraphParams,
            weights: tuple[Array, ...],
            regions: tuple[Array, ...],
            inputs: StepInputs,
        ) -> tuple[Any, Any]:
            view = self.weights.view(weights)

            def forward(regions: Sequence[Array], inputs: StepInputs) -> tuple[Array, Sequence]:
                memory = MemoryView(plan, regions, inputs, params.cparams, params.gtype)
                trace = self._forward(self.hp, params, view, inputs, memory)
                return self._family.graph(self.hp, trace), memory.regions

            kind = params.cparams.sampler
            if kind is None:
                return forward(regions, inputs)
            if params.gtype is GType.DECODE_LOOP:
                return decode_loop(forward, kind, regions, inputs)
            logits, written = forward(regions, inputs)
            return choose(logits, kind, inputs.sample)[:, None], written

        return step

    def abstract_inputs(self, plan: MemoryPlan, params: GraphParams) -> StepInputs:
        """Shapes and types of what a step is fed, to trace with."""
        sharding = jax.sharding.SingleDeviceSharding(self.device)

        def array(*shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        n, cparams = params.n_tokens, params.cparams
        mapped = [cache for cache in plan.caches if cparams.kv_map or cache.window]
        looped = params.gtype is GType.DECODE_LOOP
        steps = (LOOP_STEPS,) if looped else ()
        kind = cparams.sampler
        sample = blank_inputs(kind, params.n_out) if kind else None
        return StepInputs(
            array(*steps, n_fields(plan), n),
            array(params.n_out),
            tuple(array(*steps, 1 + cache.words, cache.n_cells) for cache in mapped),
            array(n, self.hp.n_embd, dtype="float32") if cparams.embd_input else None,
            jax.tree.map(lambda x: array(*x.shape, dtype=str(x.dtype)), sample),
            LoopInputs(array(), array(LOOP_ENDS)) if looped else None,
        )

    def _build(self, geometry: Geometry, params: GraphParams) -> CompiledGraph:
        inputs = self.abstract_inputs(geometry.plan, params)
        args = (self.weights.leaves, geometry.regions, inputs)
        make_step = partial(self.make_step, geometry.plan)
        if self._settings.verify_graph:
            verify_structural(make_step, params, args)
        file = self._graph_file(geometry, params)
        return compile_step(make_step, params, args, file, self._ahead.load)

    def _graph_file(self, geometry: Geometry, params: GraphParams) -> disk.GraphFile | None:
        """Where the graph is kept on disk: named after everything that a trace of it reads."""
        view = self.weights.view(self.weights.leaves)
        identity = (
            params,
            geometry,
            self.hp,
            self._forward.__name__,
            jax.tree.structure(view.arrays),
            view.ranges,
            [(leaf.shape, leaf.dtype) for leaf in self.weights.leaves],
        )
        root, kind = self._settings.xla_dir, self._kind(params.gtype)
        return disk.graph_file(root, self.path, kind, self.device, identity)

    def _kind(self, gtype: GType) -> str:
        """Of which graphs one may stand in for another, as far as the disk can tell."""
        return f"{self._form.value}-{gtype.value}"
