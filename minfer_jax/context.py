"""`Context.decode`: the axis on which batch, memory and graphs meet.

A context is one conversation with one model: its KV memory, the logits of its last batch and its
counters. It knows nothing of text or sampling.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral

import numpy as np
from jax import Array

from minfer_jax.batch import Batch, Ubatch, bucket, check_batch, split_simple
from minfer_jax.device import Device, device_errors, host_memory
from minfer_jax.errors import UsageError
from minfer_jax.graph.inputs import rows_matrix
from minfer_jax.graph.params import CParams, GraphParams, GType
from minfer_jax.interrupts import interrupt_deferred
from minfer_jax.memory.kv import KVMemory
from minfer_jax.models.hparams import HParams
from minfer_jax.models.model import Geometry, Model
from minfer_jax.settings import Settings


@dataclass
class Perf:
    """Counters of a context. Times are wall-clock seconds without the building of graphs."""

    n_p_eval: int = 0
    """Tokens evaluated in ubatches of more than one row."""
    n_eval: int = 0
    """Tokens evaluated one at a time."""
    p_eval_seconds: float = 0.0
    eval_seconds: float = 0.0
    build_seconds: float = 0.0
    """Getting graphs (tracing, compiling, loading from disk) and, once, the regions."""


@dataclass(frozen=True)
class _Output:
    """The logits of one ubatch: which row of `logits` belongs to which token of the batch."""

    row_of: dict[int, int]
    logits: Array


class Context:
    """One sequence over one model. Not for use from two threads at once."""

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_ubatch: int = 512,
        exact: bool = False,
        flash_attn: bool = True,
        settings: Settings,
    ) -> None:
        check_sizes(n_ctx, n_ubatch)
        self.model = model
        self.n_ctx = n_ctx
        kind = "f32" if exact else "f16"
        self.memory = KVMemory(model.hp, n_ctx=n_ctx, kv_format=(kind, kind), device=model.device)
        self.n_ubatch = min(n_ubatch, self.memory.n_cells)
        self._cparams = CParams(
            n_ctx=self.memory.n_cells,
            backend=model.device.platform,
            flash_attn=flash_attn,
            fuse_qkv=settings.fuse_qkv,
            fuse_ffn=settings.fuse_ffn,
            kv_format=(kind, kind),
            exact=exact,
        )
        check_memory(model.hp, n_ctx, exact, model.weights.nbytes, model.device)
        geometry = Geometry(self.n_ubatch, self.memory.abstract_regions())
        self.graphs = model.graphs(geometry)
        self.perf = Perf()
        self._timing = settings.timing
        self._outputs: list[_Output] = []
        self._n_batch = 0

    def decode(self, batch: Batch, *, abort: Callable[[], bool] | None = None) -> int:
        """Evaluate a batch: 0 done, 1 no room in the context, 2 aborted between ubatches.

        Raises `BatchError` before anything changes if the batch is not valid. After 1 nothing has
        changed. After 2, and after an exception, the tokens of this call are forgotten; if a step
        failed with the regions donated to it, everything is, and the `MinferError` says so.
        """
        token, wanted = check_batch(batch, self.model.hp.n_vocab)
        if len(token) > self.memory.free_cells():
            return 1
        n_past = self.memory.n_past
        self._outputs, self._n_batch = [], len(token)
        try:
            for ubatch in split_simple(token, wanted, self.n_ubatch):
                if abort is not None and abort():
                    self._forget(n_past)
                    return 2
                self._run(ubatch)
        except BaseException:
            self._forget(n_past)
            raise
        return 0

    def logits(self, i: int = -1) -> np.ndarray:
        """Logits after token `i` of the last batch (negative: from its end): float32 [n_vocab].

        Raises `IndexError` if they were not asked for.
        """
        if not -self._n_batch <= i < self._n_batch:
            raise IndexError(f"token {i} is not in the last batch of {self._n_batch}")
        i %= self._n_batch
        for output in self._outputs:
            row = output.row_of.get(i)
            if row is not None:
                return np.asarray(output.logits)[row]
        raise IndexError(f"the logits of token {i} were not asked for")

    def all_logits(self) -> np.ndarray:
        """Every row of logits that the last batch asked for, in its order: float32 [n, n_vocab]."""
        n = sum(len(output.row_of) for output in self._outputs)
        rows = np.empty((n, self.model.hp.n_vocab), np.float32)
        start = 0
        for output in self._outputs:
            stop = start + len(output.row_of)
            wanted = list(output.row_of.values())
            # A vocabulary of 262k makes a megabyte a row: no copy beside the result.
            np.asarray(output.logits).take(wanted, axis=0, out=rows[start:stop], mode="clip")
            start = stop
        return rows

    def clear(self) -> None:
        """Forget all tokens and logits."""
        self._forget(0)

    def _forget(self, n_past: int) -> None:
        """Go back to `n_past` tokens, or to none if the regions are lost."""
        if self.memory.lost:
            self.memory.drop()
        self.memory.truncate(min(n_past, self.memory.n_past))
        self._outputs, self._n_batch = [], 0

    def _run(self, ubatch: Ubatch) -> None:
        """One call of one graph; the regions are bound again before anything can interrupt."""
        params = self._params(ubatch)
        started = time.perf_counter()
        with device_errors("a step could not be prepared"):
            entry = self.graphs.get(params)
            regions = self.memory.regions()
        built = time.perf_counter() - started
        self.perf.build_seconds += built
        inputs = self._inputs(ubatch, params)
        started = time.perf_counter()
        try:
            with device_errors("a step failed and the context was cleared"):
                with interrupt_deferred():
                    logits, regions = entry.compiled.run(
                        self.model.weights.leaves, regions, *inputs
                    )
                    self.memory.advance(regions, len(ubatch.token))
                logits.block_until_ready()
        except Exception:
            self.memory.drop()
            raise
        seconds = time.perf_counter() - started
        self._count(len(ubatch.token), seconds)
        if len(ubatch.out):
            rows = range(1) if params.n_out == 1 else ubatch.out.tolist()
            wanted = (ubatch.out + ubatch.start).tolist()
            self._outputs.append(_Output(dict(zip(wanted, rows, strict=True)), logits))
        if self._timing:
            print(
                f"ubatch: {len(ubatch.token)} of {params.n_tokens} rows, graph {entry.uid},"
                f" {seconds * 1e3:.2f} ms, build {built * 1e3:.0f} ms",
                file=sys.stderr,
            )

    def _params(self, ubatch: Ubatch) -> GraphParams:
        n = len(ubatch.token)
        n_tokens = bucket(n, self.n_ubatch)
        return GraphParams(
            n_tokens=n_tokens,
            n_out=1 if len(ubatch.out) <= 1 else n_tokens,
            gtype=GType.DECODE if n == 1 else GType.PREFILL,
            cparams=self._cparams,
            weights_version=self.model.weights_version,
        )

    def _inputs(self, ubatch: Ubatch, params: GraphParams) -> tuple[np.ndarray, np.ndarray]:
        n = len(ubatch.token)
        pos = np.arange(self.memory.n_past, self.memory.n_past + n, dtype=np.int32)
        rows = rows_matrix(
            params.n_tokens,
            n_cells=self.memory.n_cells,
            token=ubatch.token,
            pos=pos,
            cell=pos,
            first=np.zeros(n, np.int32),
            last=pos,
        )
        out_rows = np.zeros(params.n_out, np.int32)
        out_rows[: len(ubatch.out)] = ubatch.out
        return rows, out_rows

    def _count(self, n: int, seconds: float) -> None:
        if n == 1:
            self.perf.n_eval += 1
            self.perf.eval_seconds += seconds
        else:
            self.perf.n_p_eval += n
            self.perf.p_eval_seconds += seconds


def check_sizes(n_ctx: int, n_ubatch: int) -> None:
    """Raise `UsageError` for sizes that no context can have."""
    _check_range("n_ctx", n_ctx, 1, 1 << 24)
    _check_range("n_ubatch", n_ubatch, 1, 1 << 16)


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= value <= high:
        raise UsageError(f"{name} is {value!r}; allowed: {low} to {high}")


def check_memory(hp: HParams, n_ctx: int, exact: bool, weights_bytes: int, device: Device) -> None:
    """Refuse what the host cannot hold: to ask for it would end the process."""
    total = host_memory() if device.platform == "cpu" else None
    kv_bytes = n_ctx * hp.kv_bytes_per_cell(4 if exact else 2)
    if total is not None and weights_bytes + kv_bytes > total:
        raise UsageError(
            f"the weights need {weights_bytes / 2**30:.1f} GiB and n_ctx {n_ctx} needs"
            f" {kv_bytes / 2**30:.1f} GiB for keys and values, there are"
            f" {total / 2**30:.1f} GiB of memory: lower -c/--n-ctx, or use a smaller model"
        )
