"""Running ubatches: which graph, what it is fed, and what came out."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jax import Array

from minfer_jax.batch import Ubatch, bucket, encode_bucket, out_bucket
from minfer_jax.choosing import Chooser, loop_inputs
from minfer_jax.device import device_errors
from minfer_jax.graph.cache import GraphCache
from minfer_jax.graph.inputs import StepInputs, rows_matrix
from minfer_jax.graph.params import CParams, GraphParams, GType
from minfer_jax.interrupts import interrupt_deferred
from minfer_jax.memory.memory import Claim, Memory
from minfer_jax.models.model import Model
from minfer_jax.perf import Perf
from minfer_jax.settings import Settings


@dataclass(frozen=True)
class Stepper:
    """Calls graphs of one context on ubatches for which room has been claimed."""

    model: Model
    store: Memory
    graphs: GraphCache
    cparams: CParams
    """What all of the context's graphs have in common."""
    n_ubatch: int
    perf: Perf
    settings: Settings

    def run(
        self, ubatch: Ubatch, claim: Claim, chooser: Chooser | None
    ) -> tuple[Array, Sequence[int]]:
        """One call of one graph: its output, and which rows of that belong to `ubatch.out`."""
        params = self._params(ubatch, chooser)
        inputs = self._inputs(ubatch, claim, params)
        gathered = params.n_out < params.n_tokens
        rows = range(len(ubatch.out)) if gathered else ubatch.out.tolist()
        if chooser:
            index = ubatch.index[ubatch.out].tolist()
            inputs = inputs._replace(sample=chooser.inputs(index, rows, params.n_out))
        return self._execute(params, inputs, len(ubatch)), rows

    def run_loop(self, steps: Sequence[Ubatch], chooser: Chooser, ends: np.ndarray) -> np.ndarray:
        """One call of one graph on steps of as many rows each: the tokens chosen int32 [done, n].

        Claims of steps that were not done are taken back.
        """
        claims: list[Claim] = []
        fed: list[StepInputs] = []
        params = None
        for step in steps:
            claim = self.store.next_claim(step)
            wanted = self._params(step, chooser, looped=True)
            if params is not None and wanted != params:  # cells are not one run any more
                self.store.undo(claim)
                break
            params = wanted
            claims.append(claim)
            fed.append(self._inputs(step, claim, params))
        assert params is not None
        n = len(steps[0])
        sample = chooser.inputs(range(n), range(n), params.n_out)
        out = np.asarray(self._execute(params, loop_inputs(fed, sample, ends), n))
        done = int(out[-1, 0])
        for claim in reversed(claims[done:]):
            self.store.undo(claim)
        self.perf.count_loop(n, done)
        return out[:done, :n]

    def _execute(self, params: GraphParams, inputs: StepInputs, n_rows: int) -> Array:
        """Call the graph; the regions are bound again before anything can interrupt."""
        started = time.perf_counter()
        with device_errors("a step could not be prepared"):
            before = self.graphs.counters.copy()
            entry = self.graphs.get(params)
            regions = self.store.regions()
        built = time.perf_counter() - started
        self.perf.count_graph(before, self.graphs.counters, built)
        started = time.perf_counter()
        with device_errors("a step failed"):
            with interrupt_deferred():
                output, regions = entry.compiled.run(self.model.weights.leaves, regions, inputs)
                self.store.take_back(regions)
            output.block_until_ready()
        seconds = time.perf_counter() - started
        self.perf.count_step(params.gtype, n_rows, seconds)
        if self.settings.timing:
            print(
                f"ubatch: {n_rows} of {params.n_tokens} rows, graph {entry.uid},"
                f" {seconds * 1e3:.2f} ms, build {built * 1e3:.0f} ms",
                file=sys.stderr,
            )
        return output

    def _params(
        self, ubatch: Ubatch, chooser: Chooser | None, *, looped: bool = False
    ) -> GraphParams:
        n = len(ubatch)
        if self.model.hp.encoder:
            gtype = GType.ENCODE
            n_tokens = n_out = encode_bucket(n, self.n_ubatch)
        else:
            gtype = GType.DECODE if ubatch.one_row_each else GType.PREFILL
            n_tokens = bucket(n, self.n_ubatch, decode=gtype is GType.DECODE)
            n_out = n_tokens if looped else out_bucket(len(ubatch.out), n_tokens)
        return GraphParams(
            n_tokens=n_tokens,
            n_out=n_out,
            gtype=GType.DECODE_LOOP if looped else gtype,
            cparams=self._topology(ubatch, chooser),
            weights_version=self.model.weights_version,
        )

    def _topology(self, ubatch: Ubatch, chooser: Chooser | None) -> CParams:
        """What of it a ubatch and its samplers decide."""
        mapped = not self.store.straight(ubatch)
        embd = ubatch.embd is not None
        if not mapped and not embd and not chooser:
            return self.cparams
        kind = chooser.kind if chooser else None
        return replace(self.cparams, kv_map=mapped, embd_input=embd, sampler=kind)

    def _inputs(self, ubatch: Ubatch, claim: Claim, params: GraphParams) -> StepInputs:
        plan, mapped, n = self.store.plan, params.cparams.kv_map, params.n_tokens
        parts = self.store.rows(ubatch, claim, mapped)
        n_caches = len(plan.caches)
        sizes = [cache.n_cells for cache in plan.caches]
        rows = rows_matrix(
            n,
            ubatch.token,
            ubatch.pos,
            self.store.numbers(ubatch),
            list(zip(parts[:n_caches], sizes, strict=True)),
            (parts[-1], plan.recurrent.n_slots) if plan.recurrent else None,
        )
        out_rows = np.zeros(params.n_out, np.int32)
        out_rows[: len(ubatch.out)] = ubatch.out
        embd = None
        if ubatch.embd is not None:
            embd = np.zeros((n, self.model.hp.n_embd), np.float32)
            embd[: len(ubatch)] = ubatch.embd
        return StepInputs(rows, out_rows, self.store.maps(mapped), embd)
