"""`Context.decode`: the axis on which batch, memory and graphs meet.

A context is one or several sequences over one model: their memory, the outputs of the last batch
and counters. It knows nothing of text, and of sampling only that chains can run in a graph.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np

from minfer_jax import saving
from minfer_jax.batch import (
    Batch,
    CheckedBatch,
    Ubatch,
    check_batch,
    describe,
    split_equal,
    split_simple,
)
from minfer_jax.choosing import Chooser, loop_ends, loop_steps
from minfer_jax.device import device_errors
from minfer_jax.errors import BatchError, MinferError, UsageError
from minfer_jax.graph.inputs import LOOP_STEPS
from minfer_jax.graph.params import CParams
from minfer_jax.history import History
from minfer_jax.interrupts import interrupt_deferred
from minfer_jax.limits import (
    MAX_SEQUENCES,
    N_BATCH,
    check_memory,
    check_range,
    check_sizes,
    default_kv_types,
)
from minfer_jax.memory.memory import END, Memory
from minfer_jax.memory.plan import plan_memory
from minfer_jax.memory.state_format import read_file, write_file
from minfer_jax.models.model import Geometry, Model
from minfer_jax.ops.attention import BLOCK
from minfer_jax.outputs import Outputs
from minfer_jax.perf import Perf
from minfer_jax.sampling import Sampler
from minfer_jax.sequences import Sequences
from minfer_jax.settings import Settings
from minfer_jax.stepper import Stepper


class Context:
    """Sequences 0 to `n_seq_max` - 1 over one model.

    With `kv_unified` they share `n_ctx` cells and a prefix that they share is stored once; without,
    each has `n_ctx // n_seq_max` cells of its own. `memory` has the operations on sequences.

    For one caller at a time: a second thread that calls while one is within gets a `UsageError`.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_seq_max: int = 1,
        n_batch: int = N_BATCH,
        n_ubatch: int = 512,
        kv_unified: bool = False,
        kv_types: tuple[str, str] | None = None,
        swa_full: bool = False,
        n_snapshots: int = 0,
        embeddings: bool = False,
        exact: bool = False,
        flash_attn: bool = True,
        settings: Settings,
    ) -> None:
        check_sizes(n_ctx, n_batch, n_ubatch)
        check_range("n_seq_max", n_seq_max, 1, min(n_ctx, MAX_SEQUENCES))
        check_range("n_snapshots", n_snapshots, 0, 64)
        self.model = model
        self.n_ctx = n_ctx
        self.n_seq_max = n_seq_max
        self.n_ctx_seq = n_ctx if kv_unified else n_ctx // n_seq_max
        """Tokens that a sequence can hold."""
        self.n_batch = n_batch
        self.n_ubatch = min(n_ubatch, n_batch, -(-n_ctx // BLOCK) * BLOCK)
        self.kv_types = kv_types or default_kv_types(exact)
        plan = plan_memory(
            model.hp,
            n_ctx=n_ctx,
            n_seq_max=n_seq_max,
            kv_unified=kv_unified,
            swa_full=swa_full,
            n_ubatch=self.n_ubatch,
            n_snapshots=n_snapshots,
            types=self.kv_types,
        )
        check_memory(plan, model.weights.nbytes, model.device)
        self.store = Memory(plan, model.device, n_seq_max)
        self.embeddings_only = embeddings or model.hp.encoder is not None
        cparams = CParams(
            n_ctx=max((cache.n_cells for cache in plan.caches), default=0),
            backend=model.device.platform,
            flash_attn=flash_attn,
            fuse_qkv=settings.fuse_qkv,
            fuse_ffn=settings.fuse_ffn,
            kv_format=self.kv_types,
            exact=exact,
            embeddings=self.embeddings_only,
        )
        self.graphs = model.graphs(Geometry(self.n_ubatch, plan, self.store.abstract_regions()))
        self.history = History(n_seq_max)
        self.lost: tuple[int, ...] = ()
        """Sequences that the last call had to forget as a whole, as it could not go back."""
        what, width = ("logits", model.hp.n_vocab)
        if self.embeddings_only:
            what, width = ("embeddings", model.hp.n_embd)
        self.outputs = Outputs(what, width)
        self.chosen = Outputs("tokens chosen in the graph", 1, np.int32)
        self._perf = Perf()
        self._stepper = Stepper(
            model, self.store, self.graphs, cparams, self.n_ubatch, self._perf, settings
        )
        self._settings = settings
        self._busy = threading.Lock()

    @property
    def memory(self) -> Sequences:
        """The operations on sequences."""
        # Made when asked for: kept, it would keep the context until a garbage collection.
        return Sequences(self)

    # --- evaluating -----------------------------------------------------------------------------

    def decode(
        self,
        batch: Batch,
        *,
        samplers: Sequence[Sampler] = (),
        abort: Callable[[], bool] | None = None,
    ) -> int:
        """Evaluate a batch: 0 done, 1 no room in the memory, 2 aborted between ubatches.

        With `samplers`, one for each output that the batch asks for, in its order, each of another
        sequence, tokens are chosen in the graph: `sampled` gives them, and there are no logits. The
        samplers have then accepted them. All need the same `kind_of`.

        Raises `BatchError` before anything changes if the batch is not valid. After 1 nothing has
        changed. After 2, and after an exception, the tokens of this call are forgotten. Where that
        cannot be, as what they overwrote is gone, whole sequences are forgotten and named in
        `lost`. If a step fails with the regions donated to it, what was there before is evaluated
        again; the `MinferError` says of which sequences that could not be done.
        """
        with self.alone():
            checked = self._checked(batch)
            chooser = self._chooser(checked, samplers) if samplers else None
            ubatches = self._split(checked)
            if self._settings.batch_debug:
                print(describe(ubatches), file=sys.stderr)
            status = self._attempt(
                checked, ubatches, lambda: self._evaluate(ubatches, abort, chooser)
            )
            if status:
                return status
            self.history.extend(checked)
            self.outputs.n_batch = self.chosen.n_batch = len(checked)
            if chooser:
                chooser.accept(self.chosen.all().T)
            return 0

    def decode_loop(
        self,
        batch: Batch,
        samplers: Sequence[Sampler],
        n_steps: int,
        *,
        ends: Collection[int] = (),
    ) -> tuple[int, np.ndarray]:
        """Up to `n_steps` decode steps in one call, each fed with what the one before it chose.

        The batch has one row of each of its sequences, and `samplers` one for each of them. Cells
        for all steps are reserved first; fewer steps are done where there is no room for all, and
        LOOP_STEPS at most. It ends after the step in which any sequence comes to one of `ends`.

        Returns 0, or 1 without room for a step, and the tokens chosen: int32 [steps done, n], of
        which the last ones have not been evaluated. Samplers have accepted them, but for a -1,
        which stands where nothing could be chosen, as in a row of NaN. Errors as of `decode`.
        """
        check_range("n_steps", n_steps, 1, 1 << 31)
        with self.alone():
            checked = self._checked(batch)
            chooser = self._chooser(replace(checked, wanted=np.ones(len(checked), bool)), samplers)
            steps = loop_steps(checked, min(n_steps, LOOP_STEPS), self.n_ubatch)
            last = loop_ends(ends, self.model.hp.n_vocab)
            status = 1
            chosen = np.empty((0, len(checked)), np.int32)

            def run() -> int:
                nonlocal chosen
                chosen = self._stepper.run_loop(steps, chooser, last)
                return 0

            while steps and (status := self._attempt(checked, steps, run)):
                steps = steps[: len(steps) // 2]
            if status:
                return status, chosen
            for step, done in zip(steps, [checked.token, *chosen[:-1]], strict=False):
                self.history.extend(replace(checked, token=done, pos=step.pos))
            chooser.accept(chosen)
            return 0, chosen

    def _attempt(
        self, checked: CheckedBatch, ubatches: Sequence[Ubatch], run: Callable[[], int]
    ) -> int:
        """Run what evaluates these ubatches, as a whole or not at all; the status of `decode`."""
        self.lost = ()
        self.apply_shifts()
        ends = self.store.ends()
        if not self.store.begin(ubatches):
            return 1
        self.forget_outputs()
        try:
            status = run()
            if status:
                self._go_back(checked, ends)
        except BaseException as error:
            if not self.store.lost:
                self._go_back(checked, ends)
                raise
            if not isinstance(error, Exception):  # an interrupt: nobody wants to wait now
                self.clear_all()
                raise
            raise MinferError(f"{error}; {self._restore(ends)}") from error
        finally:
            self.store.end()
        return status

    def _chooser(self, checked: CheckedBatch, samplers: Sequence[Sampler]) -> Chooser:
        if self.embeddings_only:
            raise UsageError("this context makes embeddings, of which no token can be chosen")
        return Chooser(checked, samplers, self.model.hp.n_vocab)

    def _checked(self, batch: Batch) -> CheckedBatch:
        hp = self.model.hp
        ends = [0] * self.n_seq_max if hp.encoder else self.store.ends()
        checked = check_batch(
            batch,
            n_vocab=hp.n_vocab,
            n_embd=hp.n_embd,
            n_past=ends,
            n_batch=self.n_batch,
            alike=self.store.alike if self.store.shareable else None,
        )
        if hp.encoder and len(checked) > self.n_ubatch:
            raise BatchError(
                f"the batch has {len(checked)} tokens, which see each other: at most n_ubatch ="
                f" {self.n_ubatch} can be evaluated together"
            )
        return checked

    def _split(self, checked: CheckedBatch) -> list[Ubatch]:
        split = split_equal if self.store.states else split_simple
        return split(checked, self.n_ubatch)

    def _evaluate(
        self,
        ubatches: Sequence[Ubatch],
        abort: Callable[[], bool] | None,
        chooser: Chooser | None = None,
    ) -> int:
        for ubatch in ubatches:
            if abort is not None and abort():
                return 2
            output, rows = self._stepper.run(ubatch, self.store.next_claim(ubatch), chooser)
            outputs = self.chosen if chooser else self.outputs
            outputs.add(ubatch.index[ubatch.out].tolist(), output, rows)
        return 0

    def _go_back(self, batch: CheckedBatch, ends: Sequence[int]) -> None:
        """Forget the tokens of this call, and sequences that cannot go on without them."""
        self.forget_outputs()
        touched = sorted({seq for row in batch.seqs for seq in row})
        self.lost = tuple(seq for seq in touched if not self.store.go_back(seq, ends[seq]))
        for seq in self.lost:
            self.history.remove(seq, 0, END)

    def _restore(self, ends: Sequence[int]) -> str:
        """Evaluate again what the lost regions held: says how far that went."""
        self.store.drop()
        tokens = {seq: self.history.tokens(seq) for seq in range(self.n_seq_max) if ends[seq]}
        lost = [seq for seq, held in tokens.items() if held is None]
        self.history.clear()
        try:
            for seq, held in sorted(tokens.items(), key=lambda item: len(item[1] or ())):
                self._evaluate_again(seq, held or [])
        except MinferError:
            self.store.drop()
            self.history.clear()
            lost = list(tokens)
        self.forget_outputs()
        self.lost = tuple(lost)
        if len(lost) == len(tokens):
            return "the context was cleared"
        again = "what the context held was evaluated again"
        return again + (f", but for sequences {', '.join(map(str, lost))}" if lost else "")

    def _evaluate_again(self, seq: int, tokens: Sequence[int]) -> None:
        """Bring a sequence back, from another one that begins alike where that costs nothing."""
        done = 0
        for other in range(self.n_seq_max) if self.store.unified else ():
            held = self.history.tokens(other) or []
            same = (a == b for a, b in zip(held, tokens, strict=False))
            n = sum(takewhile(bool, same))
            if n > done and other != seq and self.store.can_share(other, 0, n):
                self.store.share(other, seq, 0, n)
                self.history.copy(other, seq, 0, n)
                done = n
        for start in range(done, len(tokens), self.n_batch):
            part = tokens[start : start + self.n_batch]
            checked = self._checked(Batch(token=part, seq_id=[seq] * len(part)))
            ubatches = self._split(checked)
            if not self.store.begin(ubatches) or self._evaluate(ubatches, None):
                raise MinferError(f"no room to evaluate sequence {seq} again")
            self.history.extend(checked)

    # --- outputs --------------------------------------------------------------------------------

    def logits(self, i: int = -1) -> np.ndarray:
        """Logits after token `i` of the last batch (negative: from its end): float32 [n_vocab].

        Raises `IndexError` if they were not asked for.
        """
        self._refuse_output("logits", of_embeddings=False)
        return self.outputs.row(i)

    def sampled(self, i: int = -1) -> int:
        """What the graph chose after token `i` of the last batch (negative: from its end); -1 where
        nothing can be chosen. Raises `IndexError` if nothing was to be chosen there."""
        return int(self.chosen.row(i)[0])

    def all_logits(self) -> np.ndarray:
        """Every row of logits that the last batch asked for, in its order: float32 [n, n_vocab]."""
        self._refuse_output("logits", of_embeddings=False)
        return self.outputs.all()

    def embeddings(self) -> np.ndarray:
        """Hidden states behind the last norm of every token that the last batch asked for, in its
        order: float32 [n, n_embd]."""
        self._refuse_output("embeddings", of_embeddings=True)
        return self.outputs.all()

    def _refuse_output(self, what: str, *, of_embeddings: bool) -> None:
        if self.embeddings_only != of_embeddings:
            made = "embeddings" if self.embeddings_only else "logits"
            raise UsageError(f"this context makes {made}, not {what}: see `embeddings` of context")

    def forget_outputs(self) -> None:
        """No output of an earlier batch can be asked for any more."""
        self.outputs.forget()
        self.chosen.forget()

    def perf(self) -> Perf:
        """The counters, which go on counting."""
        return self._perf

    # --- for `Sequences` and state files --------------------------------------------------------

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else within: a step donates the regions that another would read."""
        if not self._busy.acquire(blocking=False):
            raise UsageError("the context is in use by another call: it takes one at a time")
        try:
            yield
        finally:
            self._busy.release()

    @contextmanager
    def changing_regions(self, what: str) -> Iterator[None]:
        """A program over whole regions runs; if it fails with them donated to it, all is lost."""
        try:
            with device_errors(f"{what} failed"), interrupt_deferred():
                yield
        except BaseException as error:
            if not self.store.lost:
                raise
            self.clear_all()
            if not isinstance(error, Exception):
                raise
            raise MinferError(f"{error}; the context was cleared") from error

    def clear_all(self) -> None:
        """Forget everything, the regions too."""
        self.lost = tuple(seq for seq in range(self.n_seq_max) if self.store.pos_max(seq) >= 0)
        self.store.drop()
        self.history.clear()
        self.forget_outputs()

    def apply_shifts(self) -> None:
        """Rotate the keys of cells whose positions have changed."""
        if self.store.shifted:
            with self.changing_regions("a shift of positions"):
                self.store.apply_shifts(self.model.hp, self.model.rope_factors())

    # --- states ---------------------------------------------------------------------------------

    def state_save(
        self,
        seq: int | None = None,
        path: str | os.PathLike[str] | None = None,
        *,
        beside: Any = None,
    ) -> bytes:
        """All that the context remembers, or one sequence, with the outputs of the last batch, and
        `beside`, anything that JSON can hold, such as a sampler's `state()`.

        With `path` it is also written to a file, which is replaced as a whole or, with a
        `StateError`, not at all. Of one sequence only the output of its last token is saved, if it
        is among those of the last batch.
        """
        if path is not None and not isinstance(path, str | os.PathLike):
            raise UsageError(f"path is {path!r}, not a path")
        with self.alone():
            data = saving.save(self, self._checked_seq(seq), beside)
        if path is not None:
            write_file(path, data)
        return data

    def state_load(
        self,
        source: bytes | bytearray | memoryview | str | os.PathLike[str],
        seq: int | None = None,
    ) -> Any:
        """Go on from what `state_save` returned or wrote: of the whole context, which replaces
        everything, or of one sequence, which becomes sequence `seq` of this context. Returns what
        was saved `beside` it.

        The context may have other sizes than the one that was saved, but for the same model and
        types of K and V. The outputs are then those saved: a single sequence's last token is row 0.
        Raises `StateError`, and nothing has changed, for data that is damaged or foreign, and if
        it does not fit.
        """
        with self.alone():
            number = self._checked_seq(seq)
            if not isinstance(source, bytes | bytearray | memoryview | str | os.PathLike):
                raise UsageError(f"a state is bytes or a path, not {type(source).__name__}")
            data = read_file(source) if isinstance(source, str | os.PathLike) else source
            return saving.load(self, data, number)

    def _checked_seq(self, seq: int | None) -> int | None:
        if seq is None:
            return None
        check_range("seq", seq, 0, self.n_seq_max - 1)
        return int(seq)
