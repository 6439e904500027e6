"""Sharing of work between threads: the same bits as on one, and no waiting for ever."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.gguf import GGMLType
from minfer_jax.ops.cpu.library import n_tiles
from minfer_jax.ops.cpu.tiled import TiledTensor, attend, linear

N_IN, N_OUT = 256, 768
N_HEAD, N_KV, HEAD, N_CELLS = 8, 2, 64, 2048
assert (N_HEAD + 2 * N_KV) * HEAD == N_OUT
PARALLEL = """
import hashlib
import threading
import jax
import numpy as np
from minfer_jax.ops.cpu.library import library
from test_ops_cpu_team import N_IN, regions, stack, weights

library().use({variant!r})
w, kv, step = weights(library()), regions(), jax.jit(stack)
xs = [np.random.default_rng(n).normal(size=(n, N_IN)).astype("f4") for n in (1, 2, 5, 40)]
expected = [np.asarray(step(x, w, kv)) for x in xs]
assert all(np.isfinite(y).all() and y.std() > 0 for y in expected)
wrong = []

def work(i):
    for _ in range({calls}):
        if not np.array_equal(np.asarray(step(xs[i], w, kv)), expected[i]):
            wrong.append(i)

threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not wrong, wrong
print(hashlib.sha256(b"".join(y.tobytes() for y in expected)).hexdigest())
"""


def weights(kernels):
    """Random Q8_0 matrices [N_OUT, N_IN] and [N_IN, N_OUT] in tiles, with scales of 1/256."""
    rng = np.random.default_rng(0)
    out = []
    for n_out, n_in in ((N_OUT, N_IN), (N_IN, N_OUT)):
        raw = rng.integers(0, 256, (n_out, n_in // 32, 34), np.uint8)
        raw[..., :2] = np.array([2.0**-8], np.float16).view(np.uint8)
        size = kernels.tile_bytes(GGMLType.Q8_0, n_in)
        tiles = np.empty(n_tiles(n_out) * size, np.uint8)
        kernels.pack([raw.reshape(n_out, -1)], GGMLType.Q8_0, n_in, tiles)
        out.append(TiledTensor(jnp.asarray(tiles), GGMLType.Q8_0, (n_out, n_in)))
    return out


def regions():
    """Random K and V."""
    rng = np.random.default_rng(3)
    shape = (2, N_KV, N_CELLS, HEAD)
    return tuple(jnp.asarray(x, jnp.float16) for x in rng.normal(size=shape).astype(np.float32))


def attention(qkv, regions, first):
    """Rows that write nothing and see every cell from `first` on."""
    n = len(qkv)
    turn = jnp.ones((n, HEAD // 4), jnp.float32)
    nowhere = jnp.full(n, N_CELLS, jnp.int32)
    rows = (nowhere, nowhere * 0 + first, nowhere - 1)
    out, *_ = attend(
        qkv,
        (turn, turn),
        rows,
        tuple((region,) for region in regions),
        [],
        kv_types=("f16", "f16"),
        layer=0,
        n_head=N_HEAD,
        n_head_kv=N_KV,
        interleaved=False,
        eps=1e-5,
        scale=0.125,
        window=0,
        cap=0.0,
    )
    return out[:, :N_IN]


def stack(x, w, regions):
    """Kernels that wait for each other, and pairs that XLA may run at once."""
    up, down = w
    for _ in range(3):
        left, right = linear(x, [up]), linear(-x, [up.rows(0, 400), up.rows(400, N_OUT)])
        seen = attention(left, regions, 0) - attention(right, regions, 9)
        x = x + (linear(jnp.tanh(left), [down]) - linear(jnp.tanh(right), [down])) / 8
        x = x + seen
    return x


def run_parallel(variant, calls, n_threads):
    """`calls` executions in each of four Python threads, in a process of its own.

    Returns a digest of what each of them gave.
    """
    tests = Path(__file__).parent
    env = {
        **os.environ,
        "PJRT_NPROC": str(n_threads),
        "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)]),
    }
    code = PARALLEL.format(variant=variant, calls=calls)
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("kernels", ["portable"], indirect=True)
def test_many_executions_at_once_end_with_the_bits_of_one_thread(kernels):
    """More threads than CPUs, too: then a helper may lose its CPU in the middle of a chunk."""
    alone = run_parallel(kernels.variants[0], 5, 1)
    assert len(alone) == 64
    for n_threads in (2, 7):
        assert run_parallel(kernels.variants[0], 50, n_threads) == alone
