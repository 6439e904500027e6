"""The peer's process: llama.cpp through llama-cpp-python's low-level functions.

Run by its path, with whichever Python has `llama_cpp`, so it imports nothing of this package.
One JSON object a line: requests on stdin, an answer to each on stdout. It ends with its stdin.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
import time
from typing import Any, TextIO

_N_BATCH = 2048  # llama-bench's own
_SEQUENCE = 0

# What `Peer` calls, and older versions do not all have.
_NEEDED = (
    "llama_backend_init",
    "llama_batch_free",
    "llama_batch_get_one",
    "llama_batch_init",
    "llama_context_default_params",
    "llama_decode",
    "llama_free",
    "llama_get_memory",
    "llama_init_from_model",
    "llama_memory_clear",
    "llama_memory_seq_cp",
    "llama_memory_seq_rm",
    "llama_model_default_params",
    "llama_model_load_from_file",
    "llama_state_seq_get_data",
    "llama_state_seq_get_size",
    "llama_state_seq_set_data",
    "llama_synchronize",
)


class Peer:
    """One model and a context at a time."""

    def __init__(
        self,
        llama: Any,
        *,
        model: str,
        n_ctx: int,
        n_ubatch: int,
        n_threads: int,
        n_gpu_layers: int,
        type_kv: int,
    ) -> None:
        """`type_kv` is the ggml type of keys and values."""
        self._llama = llama
        self._depth, self._state = 0, (ctypes.c_uint8 * 0)()
        self._n_batch = max(_N_BATCH, n_ubatch)
        llama.llama_backend_init()
        model_params = llama.llama_model_default_params()
        model_params.n_gpu_layers = n_gpu_layers
        self._model = llama.llama_model_load_from_file(os.fsencode(model), model_params)
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {model}")
        params = llama.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = self._n_batch
        params.n_ubatch = n_ubatch
        params.n_threads = n_threads
        params.n_threads_batch = n_threads
        params.type_k = type_kv
        params.type_v = type_kv
        # As llama-bench has it: layers with a window keep no more tokens than they see.
        params.swa_full = False
        self._params = params
        self._context = self._new_context()
        self._memory = llama.llama_get_memory(self._context)

    def open(self, n_ctx: int, n_seq_max: int, kv_unified: bool) -> None:
        """A context of these sizes in place of the one that there is."""
        self._llama.llama_free(self._context)
        self._context = None
        self._params.n_ctx = n_ctx
        self._params.n_seq_max = n_seq_max
        self._params.kv_unified = kv_unified
        self._context = self._new_context()
        self._memory = self._llama.llama_get_memory(self._context)

    def _new_context(self) -> Any:
        context = self._llama.llama_init_from_model(self._model, self._params)
        if not context:
            raise ValueError(f"llama.cpp cannot make a context of {self._params.n_ctx} tokens")
        return context

    def fill(self, tokens: list[int]) -> None:
        """A new sequence that holds `tokens`, and that `run` can go back to."""
        self._llama.llama_memory_clear(self._memory, False)
        self._decode(tokens, self._n_batch)
        self._depth = len(tokens)
        if tokens:
            self._save()

    def run(self, keep: int, tokens: list[int], n_batch: int) -> int:
        """Go back to the `keep` tokens of `fill`, evaluate `tokens`, `n_batch` a call: nanoseconds.

        Layers with a window may have overwritten what those tokens need, so all of it is restored,
        as llama-bench does.
        """
        if keep != self._depth:
            raise ValueError(f"{keep} tokens are to be kept, the sequence began with {self._depth}")
        self._llama.llama_memory_clear(self._memory, False)
        if keep:
            self._restore()
        started = time.perf_counter_ns()
        self._decode(tokens, min(n_batch, self._n_batch))
        return time.perf_counter_ns() - started

    def run_batched(self, prompts: list[list[int]], steps: list[list[int]]) -> list[int]:
        """Evaluate the prompts, one for each sequence or one for all, then steps of a token for
        each: nanoseconds of both.

        As in llama-batched-bench, what shares a prompt is under neither clock.
        """
        n_seq, n_prompt = len(steps[0]), len(prompts[0])
        prefill = [
            (token, pos, seq, pos == n_prompt - 1)
            for seq, prompt in enumerate(prompts)
            for pos, token in enumerate(prompt)
        ]
        generation = [
            [(token, n_prompt + i, seq, True) for seq, token in enumerate(step)]
            for i, step in enumerate(steps)
        ]
        self._llama.llama_memory_clear(self._memory, False)
        prefill_ns = self._run_rows(
            [prefill[i : i + self._n_batch] for i in range(0, len(prefill), self._n_batch)]
        )
        if len(prompts) < n_seq:
            self._share(n_prompt, n_seq)
        return [prefill_ns, self._run_rows(generation)]

    def _share(self, n_prompt: int, n_seq: int) -> None:
        """Give the prompt of sequence 0 to the others."""
        for seq in range(1, n_seq):
            self._llama.llama_memory_seq_cp(self._memory, _SEQUENCE, seq, -1, -1)
        if self._params.kv_unified:
            return
        # Streams are copied in the next call, which is to be one that no clock sees.
        self._run_rows([[(0, n_prompt, _SEQUENCE, True)]])
        if not self._llama.llama_memory_seq_rm(self._memory, _SEQUENCE, n_prompt, -1):
            raise ValueError("llama.cpp cannot share this model's prompt but in unified cells")

    def _run_rows(self, batches: list[list[tuple[int, int, int, bool]]]) -> int:
        """Evaluate batches of (token, position, sequence, whether logits are wanted): nanoseconds
        of the evaluation alone."""
        made = [self._batch(rows) for rows in batches]
        try:
            started = time.perf_counter_ns()
            for batch in made:
                self._evaluate(batch)
            return time.perf_counter_ns() - started
        finally:
            for batch in made:
                self._llama.llama_batch_free(batch)

    def _batch(self, rows: list[tuple[int, int, int, bool]]) -> Any:
        batch = self._llama.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (token, pos, seq, wanted) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = pos
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = seq
            batch.logits[i] = wanted
        return batch

    def _save(self) -> None:
        size = self._llama.llama_state_seq_get_size(self._context, _SEQUENCE)
        self._state = (ctypes.c_uint8 * size)()
        if not self._llama.llama_state_seq_get_data(self._context, self._state, size, _SEQUENCE):
            raise ValueError("llama.cpp cannot copy this model's state")

    def _restore(self) -> None:
        size = len(self._state)
        if not self._llama.llama_state_seq_set_data(self._context, self._state, size, _SEQUENCE):
            raise ValueError("llama.cpp cannot restore this model's state")

    def _decode(self, tokens: list[int], n_batch: int) -> None:
        for i in range(0, len(tokens), n_batch):
            part = tokens[i : i + n_batch]
            array = (ctypes.c_int32 * len(part))(*part)
            self._evaluate(self._llama.llama_batch_get_one(array, len(part)))

    def _evaluate(self, batch: Any) -> None:
        code = self._llama.llama_decode(self._context, batch)
        if code:
            raise ValueError(f"llama_decode returned {code}")
        self._llama.llama_synchronize(self._context)


def main() -> None:
    answers = _quiet()
    try:
        package = importlib.import_module("llama_cpp")
        llama = importlib.import_module("llama_cpp.llama_cpp")
    except (ImportError, OSError, RuntimeError) as error:
        _answer(answers, {"missing": f"{error}"})
        return
    if absent := [name for name in _NEEDED if not hasattr(llama, name)]:
        _answer(answers, {"missing": f"version {package.__version__} has no {absent[0]}"})
        return
    _answer(answers, {"name": "llama.cpp", "version": package.__version__})
    peer: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        try:
            if do == "load":
                peer, result = Peer(llama, **request), None
            else:
                result = getattr(peer, do)(**request)
        except ValueError as error:
            _answer(answers, {"error": str(error)})
        else:
            _answer(answers, {"result": result})


def _quiet() -> TextIO:
    """The answers' stream; whatever else is printed, by native code too, goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
