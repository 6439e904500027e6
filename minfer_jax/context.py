"""`Context.decode`: the axis on which batch, memory and graphs meet.

A context is one or several sequences over one model: their KV memory, the logits of the last batch
and counters. It knows nothing of text or sampling.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral

import numpy as np
from jax import Array

from minfer_jax.batch import (
    Batch,
    CheckedBatch,
    Ubatch,
    bucket,
    check_batch,
    one_row_each,
    split_simple,
)
from minfer_jax.device import Device, device_errors, host_memory
from minfer_jax.errors import UsageError
from minfer_jax.graph.inputs import rows_matrix
from minfer_jax.graph.params import CParams, GraphParams, GType
from minfer_jax.interrupts import interrupt_deferred
from minfer_jax.memory.kv import KVMemory
from minfer_jax.models.hparams import HParams
from minfer_jax.models.model import Geometry, Model
from minfer_jax.settings import Settings

MAX_SEQUENCES = 256


@dataclass
class Perf:
    """Counters of a context. Times are wall-clock seconds without the building of graphs."""

    n_p_eval: int = 0
    """Tokens evaluated in ubatches that had several of one sequence."""
    n_eval: int = 0
    """Tokens evaluated in decode steps: one of a sequence at a time."""
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
    """Sequences 0 to `n_seq_max` - 1 over one model, each with `n_ctx // n_seq_max` places.

    For one caller at a time: a second thread that calls while one is within gets a `UsageError`.
    Operations on sequences take positions `p0` <= p < `p1`; a negative `p0` means from the
    beginning, a negative `p1` to the end.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_seq_max: int = 1,
        n_ubatch: int = 512,
        exact: bool = False,
        flash_attn: bool = True,
        settings: Settings,
    ) -> None:
        check_sizes(n_ctx, n_ubatch)
        _check_range("n_seq_max", n_seq_max, 1, min(n_ctx, MAX_SEQUENCES))
        self.model = model
        self.n_ctx = n_ctx
        kind = "f32" if exact else "f16"
        self.memory = KVMemory(
            model.hp,
            n_ctx=n_ctx,
            n_seq_max=n_seq_max,
            kv_format=(kind, kind),
            device=model.device,
        )
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
        check_memory(model.hp, self.memory.n_cells, exact, model.weights.nbytes, model.device)
        geometry = Geometry(self.n_ubatch, self.memory.abstract_regions())
        self.graphs = model.graphs(geometry)
        self.perf = Perf()
        self._timing = settings.timing
        self._outputs: list[_Output] = []
        self._n_batch = 0
        self._busy = threading.Lock()

    @property
    def n_seq_max(self) -> int:
        return self.memory.n_seq_max

    def decode(self, batch: Batch, *, abort: Callable[[], bool] | None = None) -> int:
        """Evaluate a batch: 0 done, 1 no room for a sequence, 2 aborted between ubatches.

        Raises `BatchError` before anything changes if the batch is not valid. After 1 nothing has
        changed. After 2, and after an exception, the tokens of this call are forgotten; if a step
        failed with the regions donated to it, everything is, and the `MinferError` says so.
        """
        with self._alone():
            before = self.memory.lengths
            checked = check_batch(batch, self.model.hp.n_vocab, before)
            if int(checked.pos.max()) >= self.memory.n_ctx_seq:
                return 1
            return self._decode(checked, before, abort)

    def _decode(
        self, batch: CheckedBatch, before: Sequence[int], abort: Callable[[], bool] | None
    ) -> int:
        self._outputs, self._n_batch = [], len(batch.token)
        try:
            for ubatch in split_simple(batch, self.n_ubatch):
                if abort is not None and abort():
                    self._forget(before)
                    return 2
                self._run(ubatch)
        except BaseException:
            self._forget(before)
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
        with self._alone():
            self._forget([0] * self.n_seq_max)

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> bool:
        """Forget the tokens of a sequence (-1: of every one) at positions p0 <= p < p1.

        False, and nothing changed, if tokens would be left behind the removed ones.
        """
        with self._alone():
            seqs = [self._checked(seq, lowest=-1)]
            if seq == -1:
                seqs = list(range(self.n_seq_max))
            p0, p1 = _check_position("p0", p0), _check_position("p1", p1)
            held = self.memory.lengths
            begin = max(p0, 0)
            for s in seqs:
                if begin < held[s] and 0 <= p1 < held[s] and begin < p1:
                    return False
            for s in seqs:
                if p1 < 0 or begin < p1:
                    self.memory.truncate(min(begin, held[s]), s)
            return True

    def seq_cp(self, source: int, target: int, p0: int = -1, p1: int = -1) -> None:
        """Make `target` hold what `source` holds before position p1, and nothing else.

        Copies cells. Raises `UsageError` for a p0 past the beginning: a sequence has no gaps.
        """
        with self._alone():
            source, target = self._checked(source), self._checked(target)
            p0, p1 = _check_position("p0", p0), _check_position("p1", p1)
            if p0 > 0:
                raise UsageError(f"a copy from position {p0} would begin with a gap; use 0")
            n = self.memory.n_past(source)
            if source != target:
                self._copy(source, target, n if p1 < 0 else min(p1, n))

    def seq_keep(self, seq: int) -> None:
        """Forget every sequence but this one."""
        with self._alone():
            kept = self._checked(seq)
            for s in range(self.n_seq_max):
                if s != kept:
                    self.memory.truncate(0, s)

    def seq_pos_min(self, seq: int) -> int:
        """The first position that a sequence holds; -1 if it is empty."""
        return 0 if self.memory.n_past(self._checked(seq)) else -1

    def seq_pos_max(self, seq: int) -> int:
        """The last position that a sequence holds; -1 if it is empty."""
        return self.memory.n_past(self._checked(seq)) - 1

    def _checked(self, seq: int, lowest: int = 0) -> int:
        _check_range("the sequence", seq, lowest, self.n_seq_max - 1)
        return int(seq)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else within: a step donates the regions that another would read."""
        if not self._busy.acquire(blocking=False):
            raise UsageError("the context is in use by another call: it takes one at a time")
        try:
            yield
        finally:
            self._busy.release()

    def _copy(self, source: int, target: int, n: int) -> None:
        try:
            with (
                device_errors("a copy failed and the context was cleared"),
                interrupt_deferred(),
            ):
                self.memory.copy(source, target, n)
        except Exception:
            self.memory.drop()
            self._outputs, self._n_batch = [], 0
            raise

    def _forget(self, lengths: Sequence[int]) -> None:
        """Go back to these many tokens of each sequence, or to none if the regions are lost."""
        if self.memory.lost:
            self.memory.drop()
        for seq, held in enumerate(self.memory.lengths):
            self.memory.truncate(min(lengths[seq], held), seq)
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
                    self.memory.advance(regions, ubatch.seq_id.tolist())
                logits.block_until_ready()
        except Exception:
            self.memory.drop()
            raise
        seconds = time.perf_counter() - started
        self._count(params.gtype, len(ubatch.token), seconds)
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
        decode = one_row_each(ubatch.seq_id)
        n_tokens = bucket(len(ubatch.token), self.n_ubatch, decode=decode)
        return GraphParams(
            n_tokens=n_tokens,
            n_out=1 if len(ubatch.out) <= 1 else n_tokens,
            gtype=GType.DECODE if decode else GType.PREFILL,
            cparams=self._cparams,
            weights_version=self.model.weights_version,
        )

    def _inputs(self, ubatch: Ubatch, params: GraphParams) -> tuple[np.ndarray, np.ndarray]:
        first = self.memory.first_cell(ubatch.seq_id)
        cell = first + ubatch.pos
        rows = rows_matrix(
            params.n_tokens,
            n_cells=self.memory.n_cells,
            token=ubatch.token,
            pos=ubatch.pos,
            cell=cell,
            first=first,
            last=cell,
        )
        out_rows = np.zeros(params.n_out, np.int32)
        out_rows[: len(ubatch.out)] = ubatch.out
        return rows, out_rows

    def _count(self, gtype: GType, n: int, seconds: float) -> None:
        if gtype is GType.DECODE:
            self.perf.n_eval += n
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


def _check_position(name: str, value: int) -> int:
    _check_range(name, value, -(1 << 31), (1 << 31) - 1)
    return int(value)


def check_memory(
    hp: HParams, n_cells: int, exact: bool, weights_bytes: int, device: Device
) -> None:
    """Refuse what the host cannot hold: to ask for it would end the process."""
    total = host_memory() if device.platform == "cpu" else None
    kv_bytes = n_cells * hp.kv_bytes_per_cell(4 if exact else 2)
    if total is not None and weights_bytes + kv_bytes > total:
        raise UsageError(
            f"the weights need {weights_bytes / 2**30:.1f} GiB and a context of {n_cells} places"
            f" {kv_bytes / 2**30:.1f} GiB for keys and values, there are"
            f" {total / 2**30:.1f} GiB of memory: lower -c/--n-ctx, or use a smaller model"
        )
