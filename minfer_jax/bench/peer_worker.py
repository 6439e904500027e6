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
    "llama_batch_get_one",
    "llama_context_default_params",
    "llama_decode",
    "llama_get_memory",
    "llama_init_from_model",
    "llama_memory_clear",
    "llama_model_default_params",
    "llama_model_load_from_file",
    "llama_state_seq_get_data",
    "llama_state_seq_get_size",
    "llama_state_seq_set_data",
    "llama_synchronize",
)


class Peer:
    """One model and one context."""

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
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError(f"llama.cpp cannot make a context of {n_ctx} tokens")
        self._memory = llama.llama_get_memory(self._context)

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
            batch = self._llama.llama_batch_get_one(array, len(part))
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
