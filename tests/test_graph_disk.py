"""Executables on disk: what comes back, what must not, who may read it, what it may cost."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

from minfer_jax.graph import disk

MODEL = Path("a/model.gguf")


def double(x):
    return jnp.tanh(x) * np.float32(2.0)


def compiled() -> jax.stages.Compiled:
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    return jax.jit(lambda x: double(x)).lower(x).compile()


def place(root: Path, *identity: object, kind: str = "decode", model: Path = MODEL):
    file = disk.graph_file(root, model, kind, jax.devices()[0], identity)
    assert file is not None
    return file


@pytest.fixture(autouse=True)
def nothing_read_ahead():
    yield
    disk._ahead.clear()


def test_what_was_saved_is_loaded(tmp_path):
    file = place(tmp_path, "x")
    assert disk.load(file) is None
    disk.save(file, compiled())
    loaded = disk.load(file)
    assert loaded is not None
    x = jnp.arange(8, dtype=jnp.float32)
    np.testing.assert_array_equal(loaded(x), double(x))
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]


SCRIPT = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from minfer_jax.graph import disk
file = disk.graph_file(Path(sys.argv[1]), Path("m.gguf"), "decode", jax.devices()[0], ("x",))
found = disk.load(file)
print(file.path.name, found is not None)
if found is None:
    found = jax.jit(lambda x: x * 2 + 1).lower(jnp.ones(3)).compile()
    disk.save(file, found)
print(found(jnp.ones(3)))
"""


def run(root: Path, **env: str) -> list[str]:
    command = [sys.executable, "-c", SCRIPT, str(root)]
    environment = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", **env}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return result.stdout.splitlines()


def test_another_process_loads_it(tmp_path):
    name, first = run(tmp_path)[0].split()
    again, second = run(tmp_path)[0].split()
    assert (name, first, second) == (again, "False", "True")
    assert run(tmp_path)[1] == "[3. 3. 3.]"


@pytest.mark.parametrize(
    "env",
    [
        {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"},
        {"JAX_DEFAULT_MATMUL_PRECISION": "float32"},
        {"JAX_ENABLE_X64": "1"},
    ],
    ids=str,
)
def test_settings_of_the_compiler_are_part_of_the_name(tmp_path, env):
    name = run(tmp_path)[0].split()[0]
    other, found = run(tmp_path, **env)[0].split()
    assert other != name and found == "False"


def test_settings_that_change_no_code_are_not(tmp_path):
    name = run(tmp_path)[0].split()[0]
    assert run(tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "theirs"))[0].split()[0] == name


def test_the_name_tells_graphs_apart(tmp_path, monkeypatch):
    files = [
        place(tmp_path, "x"),
        place(tmp_path, "y"),
        place(tmp_path, "x", "y"),
        place(tmp_path, 1, 23),
        place(tmp_path, 12, 3),
        place(tmp_path, "x", kind="prefill"),
        place(tmp_path, "x", model=Path("b/model.gguf")),
    ]
    monkeypatch.setattr(disk, "threads", lambda: 77)
    files.append(place(tmp_path, "x"))
    monkeypatch.undo()
    monkeypatch.setattr(disk, "_source", lambda: "edited")
    files.append(place(tmp_path, "x"))
    monkeypatch.undo()
    assert len({file.path for file in files}) == len(files)
    assert place(tmp_path, "x") == files[0]


def test_the_source_that_a_trace_comes_from_is_read(tmp_path, monkeypatch):
    rooms = ("gguf", "graph", "memory", "models", "ops/cpu", "cli")
    for room in rooms:
        (tmp_path / room).mkdir(parents=True)
        (tmp_path / room / "module.py").write_text("1")
    monkeypatch.setattr(disk, "__file__", str(tmp_path / "graph" / "disk.py"))
    digests = []
    for room in ("", *rooms):
        if room:
            (tmp_path / room / "module.py").write_text(f"{room} edited")
        digests.append(disk._source.__wrapped__())
    assert len(set(digests[:-1])) == len(rooms)  # one before, and one for each room but the last
    assert digests[-1] == digests[-2]


@pytest.mark.parametrize("damage", [lambda data: data[:100], lambda data: data[:-1] + b"x"])
def test_a_damaged_file_is_dropped_with_a_note(tmp_path, capfd, damage):
    file = place(tmp_path, "x")
    disk.save(file, compiled())
    file.path.write_bytes(damage(file.path.read_bytes()))
    assert disk.load(file) is None
    note = f"note: dropped a damaged file of a compiled graph: {file.path}\n"
    assert capfd.readouterr().err == note
    assert not file.path.exists()
    assert disk.load(file) is None
    assert capfd.readouterr().err == ""


def test_an_executable_that_jax_refuses_is_dropped(tmp_path, monkeypatch, capfd):
    from jax.experimental import serialize_executable

    file = place(tmp_path, "x")
    disk.save(file, compiled())

    def refuse(*_args, **_options):
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: other version")

    monkeypatch.setattr(serialize_executable, "deserialize_and_load", refuse)
    assert disk.load(file) is None and not file.path.exists()
    assert capfd.readouterr().err == ""


def test_a_platform_without_serialization_compiles(tmp_path, monkeypatch):
    from jax.experimental import serialize_executable

    def unsupported(_compiled):
        raise ValueError("Compilation does not support serialization")

    monkeypatch.setattr(serialize_executable, "serialize", unsupported)
    file = place(tmp_path, "x")
    disk.save(file, compiled())
    assert disk.load(file) is None and list(file.path.parent.iterdir()) == []


def test_a_disk_that_cannot_be_written_costs_nothing_else(tmp_path, monkeypatch):
    file = place(tmp_path, "x")

    def full(source, _target):
        assert Path(source).parent == file.path.parent
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    disk.save(file, compiled())
    assert list(file.path.parent.iterdir()) == []


def test_an_interrupt_leaves_no_part_behind(tmp_path, monkeypatch):
    file = place(tmp_path, "x")

    def interrupt(_source, _target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        disk.save(file, compiled())
    assert list(file.path.parent.iterdir()) == []


def age(path: Path, seconds: int) -> None:
    os.utime(path, (1e9 - seconds, 1e9 - seconds))


def test_files_used_longest_ago_go_first(tmp_path, monkeypatch):
    files = [place(tmp_path, name) for name in "abc"]
    for i, file in enumerate(files):
        disk.save(file, compiled())
        age(file.path, 100 - i)
    other = tmp_path / "other-version" / "old"
    other.parent.mkdir()
    other.write_bytes(b"123")
    age(other, 1000)
    outside = tmp_path.parent / "kept"
    outside.mkdir()
    (outside / "file").write_bytes(b"123")
    age(outside / "file", 1000)
    (tmp_path / "link").symlink_to(outside)
    disk.load(files[0])  # which makes it the newest
    size = files[0].path.stat().st_size
    monkeypatch.setattr(disk, "MAX_BYTES", 2 * size + size // 2)
    disk._evict(tmp_path)
    assert [file.path.exists() for file in files] == [True, False, True]
    assert not other.exists() and (outside / "file").exists()


def test_the_model_s_last_files_are_read_ahead(tmp_path):
    old, last, prefill = place(tmp_path, "a"), place(tmp_path, "b"), place(tmp_path, kind="prefill")
    other = place(tmp_path, "a", model=Path("other.gguf"))
    for i, file in enumerate((old, last, prefill, other)):
        disk.save(file, compiled())
        age(file.path, 100 - i)
    disk.read_ahead(tmp_path, MODEL, ("decode", "prefill", "encode"), jax.devices()[0])
    assert {file for file, _ in disk._ahead.values()} == {last, prefill}
    last.path.unlink()  # it is in memory, or will be
    future = disk._ahead[last.line][1]
    assert disk.load(last) is future.result()
    disk.load(old)
    assert list(disk._ahead) == [prefill.line]


def test_a_wrong_guess_is_forgotten(tmp_path):
    old, last = place(tmp_path, "a"), place(tmp_path, "b")
    for i, file in enumerate((old, last)):
        disk.save(file, compiled())
        age(file.path, 100 - i)
    disk.read_ahead(tmp_path, MODEL, ("decode",), jax.devices()[0])
    guess = disk._ahead[last.line][1].result()
    assert guess is not None and disk.load(old) not in (None, guess)
    assert disk._ahead == {}


def test_nothing_to_read_ahead(tmp_path):
    disk.read_ahead(tmp_path, MODEL, ("decode",), jax.devices()[0])
    (tmp_path / "file").write_text("")
    disk.read_ahead(tmp_path / "file", MODEL, ("decode",), jax.devices()[0])
    assert disk._ahead == {}


def test_folder_is_private_and_named_after_what_matters(tmp_path):
    folder = place(tmp_path, "x").path.parent
    assert folder == tmp_path / disk.cache_key()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert f"jax{jax.__version__}-jaxlib{jaxlib.__version__}-" in folder.name


def test_files_are_private(tmp_path):
    file = place(tmp_path, "x")
    disk.save(file, compiled())
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_cpu_features_are_part_of_the_key(monkeypatch):
    monkeypatch.setattr(disk, "_cpu_features", lambda: "flags: avx2")
    first = disk.cache_key()
    monkeypatch.setattr(disk, "_cpu_features", lambda: "flags: avx2 avx512f")
    assert disk.cache_key() != first


def test_an_unusable_folder_means_no_cache(tmp_path):
    (tmp_path / "file").write_text("")
    assert disk.enable(tmp_path / "file") is None
    (tmp_path / "theirs").mkdir()
    (tmp_path / disk.cache_key()).symlink_to(tmp_path / "theirs")
    assert disk.enable(tmp_path) is None
    assert disk.graph_file(tmp_path, MODEL, "decode", jax.devices()[0], ()) is None
