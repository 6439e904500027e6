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
    ) -> None:
        self._llama = llama
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
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError(f"llama.cpp cannot make a context of {n_ctx} tokens")
        self._memory = llama.llama_get_memory(self._context)

    def fill(self, tokens: list[int]) -> None:
        """A new sequence that holds `tokens`."""
        self._llama.llama_memory_clear(self._memory, False)
        self._decode(tokens, self._n_batch)

    def run(self, keep: int, tokens: list[int], n_batch: int) -> int:
        """Go back to the first `keep` tokens, evaluate `tokens`, `n_batch` a call: nanoseconds."""
        if not self._llama.llama_memory_seq_rm(self._memory, 0, keep, -1):
            raise ValueError("llama.cpp cannot take this model's last tokens back")
        started = time.perf_counter_ns()
        self._decode(tokens, min(n_batch, self._n_batch))
        return time.perf_counter_ns() - started

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
    """The answers' stream; whatever else is printed, by native code too, goes nowhere."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return answers


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
