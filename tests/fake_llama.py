"""A `llama_cpp` that records what it is asked, for tests of the peer."""

from __future__ import annotations

import json
from pathlib import Path

_SOURCE = """
import json, os, sys
from types import SimpleNamespace

print("noise from the library", flush=True)
os.write(1, b"noise from native code\\n")

def _log(*words):
    with open(os.environ["FAKE_LLAMA_LOG"], "a") as log:
        print(json.dumps(words), file=log)

def llama_backend_init(): _log("init")
def llama_model_default_params(): return SimpleNamespace(n_gpu_layers=-1)
def llama_context_default_params(): return SimpleNamespace(n_ctx=512, flash_attn_type=-1)
def llama_model_load_from_file(path, params):
    _log("model", path.decode(), params.n_gpu_layers)
    return 0 if b"broken" in path else 7
def llama_init_from_model(model, params):
    _log("context", vars(params))
    return 0 if params.n_ctx == 13 else 8
def llama_get_memory(context): return 9
def llama_memory_clear(memory, data): _log("clear", data)
def llama_memory_seq_rm(memory, seq, p0, p1):
    _log("keep", seq, p0, p1)
    return p0 != 66
def llama_batch_get_one(array, n): return list(array[:n])
def llama_decode(context, batch):
    if batch == [99]: os._exit(3)
    _log("decode", batch)
    return 1 if batch == [98] else 0
def llama_synchronize(context): _log("wait")
"""


def write_fake_llama(folder: Path) -> Path:
    """Write the package into `folder`, which belongs on the PYTHONPATH; returns the log's path,
    which belongs in FAKE_LLAMA_LOG."""
    package = folder / "llama_cpp"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "9.9.9"\n')
    (package / "llama_cpp.py").write_text(_SOURCE)
    return folder / "log.jsonl"


def read_log(path: Path) -> list[list]:
    """What was asked, in order."""
    return [json.loads(line) for line in path.read_text().splitlines()]
