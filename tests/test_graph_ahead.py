"""Guesses: which files are read ahead, and that a wrong one costs nothing."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from minfer_jax.graph import disk
from minfer_jax.graph.ahead import Ahead

MODEL = Path("a/model.gguf")
CPU = jax.devices("cpu")[0]


def saved(root: Path, *identity: object, kind: str = "decode", seconds_ago: int = 0):
    file = disk.graph_file(root, MODEL, kind, CPU, identity)
    assert file is not None
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    disk.save(file, jax.jit(lambda x: x + np.float32(1)).lower(x).compile())
    os.utime(file.path, (1e9 - seconds_ago, 1e9 - seconds_ago))
    return file


def ahead_of(root: Path, *kinds: str) -> Ahead:
    return Ahead(root, MODEL, [[kind] for kind in kinds], CPU)


def arrived(ahead: Ahead, file: disk.GraphFile) -> jax.stages.Compiled | None:
    return ahead._guesses[file.line][1].result()


def test_what_was_used_last_of_each_kind_is_read_ahead(tmp_path):
    saved(tmp_path, "a", seconds_ago=9)
    last, prefill = saved(tmp_path, "b"), saved(tmp_path, kind="prefill")
    ahead = ahead_of(tmp_path, "decode", "prefill", "encode")
    assert ahead.files == {last, prefill}
    guess = arrived(ahead, last)
    assert guess is not None
    last.path.unlink()  # it is in memory
    assert ahead.load(last) is guess
    assert ahead.files == {prefill}
    assert ahead.load(last) is None


def test_of_kinds_that_stand_for_each_other_only_the_last_one_is_read(tmp_path):
    saved(tmp_path, "a", seconds_ago=9)
    loop = saved(tmp_path, "a", kind="decode_loop")
    prefill = saved(tmp_path, kind="prefill", seconds_ago=99)
    ahead = Ahead(tmp_path, MODEL, [["decode", "decode_loop"], ["prefill"]], CPU)
    assert ahead.files == {loop, prefill}


def test_a_right_guess_counts_as_a_use(tmp_path):
    file = saved(tmp_path, "a")
    assert ahead_of(tmp_path, "decode").load(file) is not None
    assert file.path.stat().st_mtime > 1e9


def test_it_is_waited_for(tmp_path, monkeypatch):
    file = saved(tmp_path, "a")
    loaded, go = disk.load(file), threading.Event()

    def slow(_file):
        assert go.wait(30)
        return loaded

    monkeypatch.setattr(disk, "peek", slow)
    ahead = ahead_of(tmp_path, "decode")
    threading.Timer(0.05, go.set).start()
    assert ahead.load(file) is loaded


def test_a_wrong_guess_is_forgotten_and_harms_nothing(tmp_path):
    old, last = saved(tmp_path, "a", seconds_ago=9), saved(tmp_path, "b")
    ahead = ahead_of(tmp_path, "decode")
    guess = arrived(ahead, last)
    assert guess is not None and ahead.load(old) not in (None, guess)
    assert ahead.files == set() and last.path.exists()


def test_a_guess_that_came_to_nothing_is_read_properly(tmp_path, monkeypatch):
    file = saved(tmp_path, "a")
    monkeypatch.setattr(disk, "peek", lambda file: None)
    ahead = ahead_of(tmp_path, "decode")
    assert arrived(ahead, file) is None and ahead.load(file) is not None


def test_a_damaged_file_is_dropped_by_who_wants_it(tmp_path, capfd):
    file = saved(tmp_path, "a")
    file.path.write_bytes(file.path.read_bytes()[:-1] + b"x")
    ahead = ahead_of(tmp_path, "decode")
    assert arrived(ahead, file) is None
    assert file.path.exists() and capfd.readouterr().err == ""
    assert ahead.load(file) is None
    assert not file.path.exists()
    assert capfd.readouterr().err.startswith("note: dropped a damaged file")


def test_nothing_to_read_ahead(tmp_path):
    assert ahead_of(tmp_path, "decode").files == set()
    (tmp_path / "file").write_text("")
    assert ahead_of(tmp_path / "file", "decode").files == set()


SCRIPT = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from minfer_jax.graph import disk
from minfer_jax.graph.ahead import Ahead
root, cpu = Path(sys.argv[1]), jax.devices()[0]
if sys.argv[2] == "with targets":
    from minfer_jax.ops.cpu.library import register_targets
    register_targets()
ahead = Ahead(root, Path("m.gguf"), [["decode"]], cpu)
print([future.result() is not None for _, future in ahead._guesses.values()])
if not ahead.files:
    from minfer_jax.ops.cpu.library import target
    file = disk.graph_file(root, Path("m.gguf"), "decode", cpu, ())
    F32 = jax.ShapeDtypeStruct((1, 8), jnp.float32)
    call = jax.ffi.ffi_call(target("add_normed"), F32)
    disk.save(file, jax.jit(call).lower(F32).compile())
"""


def test_an_executable_whose_native_target_is_missing_stays(tmp_path, native_library):
    """As a process without the kernels, or one that wants another form, finds it."""

    def run(how: str) -> str:
        command = [sys.executable, "-c", SCRIPT, str(tmp_path), how]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert run("with targets") == "[]"
    (path,) = tmp_path.rglob("*.graph")
    assert run("without") == "[False]" and path.exists()
    assert run("with targets") == "[True]"
