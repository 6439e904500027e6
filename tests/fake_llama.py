"""A `llama_cpp` that records what it is asked, for tests of the peer."""

from __future__ import annotations

import json
import os
from pathlib import Path

_SOURCE = """
import json, os, sys
from types import SimpleNamespace

print("noise from the library", flush=True)
os.write(1, b"noise from native code\\n")

def _log(*words):
    with open(os.environ["FAKE_LLAMA_LOG"], "a") as log:
        print(json.dumps(words), file=log)

held = []

def llama_backend_init(): _log("init", os.getpid())
def llama_model_default_params(): return SimpleNamespace(n_gpu_layers=-1)
def llama_context_default_params(): return SimpleNamespace(flash_attn_type=-1, swa_full=True)
def llama_model_load_from_file(path, params):
    _log("model", path.decode(), params.n_gpu_layers)
    return 0 if b"broken" in path else 7
def llama_init_from_model(model, params):
    _log("context", vars(params))
    return 0 if params.n_ctx == 13 else 8
def llama_get_memory(context): return 9
def llama_memory_clear(memory, data):
    _log("clear", data)
    held.clear()
def llama_state_seq_get_size(context, seq): return len(held)
def llama_state_seq_get_data(context, state, size, seq):
    assert size == len(state) == len(held)
    state[:] = [token % 256 for token in held]
    return 0 if held == [55] else size
def llama_state_seq_set_data(context, state, size, seq):
    assert size == len(state) and not held
    _log("restore", seq, list(state))
    held.extend(state)
    return 0 if held == [66] else size
def llama_batch_get_one(array, n): return list(array[:n])
def llama_batch_init(n, embd, n_seq_max):
    assert embd == 0
    return SimpleNamespace(
        n_tokens=0, token=[None] * n, pos=[None] * n, n_seq_id=[None] * n, logits=[None] * n,
        seq_id=[[None] * n_seq_max for _ in range(n)],
    )
def llama_batch_free(batch): _log("free", batch.n_tokens)
def llama_free(context): _log("end", context)
def llama_memory_seq_cp(memory, source, target, p0, p1): _log("copy", source, target, p0, p1)
def llama_memory_seq_rm(memory, seq, p0, p1):
    _log("remove", seq, p0, p1)
    return p0 != 6
def llama_decode(context, batch):
    if not isinstance(batch, list):
        fields = batch.token, batch.pos, batch.n_seq_id, batch.seq_id, batch.logits
        _log("rows", batch.n_tokens, [list(row) for row in zip(*fields, strict=True)])
        return int(98 in batch.token)
    if batch == [99]:
        os.write(2, b"the last words\\n\\n")
        os._exit(3)
    _log("decode", batch)
    held.extend(batch)
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


def is_running(pid: int) -> bool:
    """Whether there is such a process, other than one that nobody has collected yet."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc/self").exists()


def read_log(path: Path) -> list[list]:
    """What was asked, in order."""
    return [json.loads(line) for line in path.read_text().splitlines()]
