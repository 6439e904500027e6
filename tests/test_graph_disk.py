"""Executables on disk: what comes back, what must not, who may read it, what it may cost."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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


@pytest.fixture(scope="module")
def plain_name(tmp_path_factory) -> str:
    return run(tmp_path_factory.mktemp("root"))[0].split()[0]


@pytest.mark.parametrize(
    "env",
    [
        {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"},
        {"JAX_DEFAULT_MATMUL_PRECISION": "float32"},
        {"JAX_ENABLE_X64": "1"},
        {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        {"LIBTPU_INIT_ARGS": "--xla_tpu_rwb_fusion=false"},
        {"PJRT_NPROC": "7"},
    ],
    ids=str,
)
def test_settings_of_the_compiler_are_part_of_the_name(tmp_path, env, plain_name):
    assert run(tmp_path, **env)[0].split()[0] != plain_name


@pytest.fixture
def updated():
    """`jax.config.update`, undone afterwards."""
    before = {}

    def update(name: str, value: object) -> None:
        before[name] = jax.config.values[name]
        jax.config.update(name, value)

    yield update
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("jax_compilation_cache_dir", "theirs"),
        ("jax_compiler_detailed_logging_min_ops", 7),
        ("jax_cpu_enable_async_dispatch", False),
        ("jax_debug_log_modules", "jax"),
        ("jax_dump_ir_to", "dump"),
        ("jax_explain_cache_misses", True),
        ("jax_include_debug_info_in_dumps", False),
        ("jax_include_full_tracebacks_in_locations", False),
        ("jax_logging_level", "ERROR"),
        ("jax_persistent_cache_min_compile_time_secs", 7.0),
        ("jax_platform_name", "cpu"),
        ("jax_pprint_use_color", False),
        ("jax_raise_persistent_cache_errors", True),
        ("jax_traceback_filtering", "off"),
        ("jax_tracer_error_num_traceback_frames", 7),
    ],
)
def test_settings_that_change_no_code_are_not(tmp_path, updated, setting, value):
    file = place(tmp_path, "x")
    updated(setting, value)
    assert place(tmp_path, "x") == file


@pytest.mark.parametrize(
    ("setting", "value"),
    [("jax_disable_most_optimizations", True), ("jax_default_matmul_precision", "highest")],
)
def test_settings_are_read_as_they_are_when_it_compiles(tmp_path, updated, setting, value):
    file = place(tmp_path, "x")
    updated(setting, value)
    assert place(tmp_path, "x") != file


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
    for part in ("_source", "_version"):
        monkeypatch.setattr(disk, part, lambda: "edited")
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


def test_a_source_that_cannot_be_read_means_no_cache(tmp_path, monkeypatch):
    def unreadable():
        raise PermissionError("forward.py")

    monkeypatch.setattr(disk, "_source", unreadable)
    assert disk.graph_file(tmp_path, MODEL, "decode", jax.devices()[0], ()) is None


def test_a_package_that_is_not_installed_has_no_version(monkeypatch):
    assert disk._version.__wrapped__() == importlib.metadata.version("minfer-jax")

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(disk, "version", missing)
    assert disk._version.__wrapped__() is None


@pytest.mark.parametrize("damage", [lambda data: data[:100], lambda data: data[:-1] + b"x"])
def test_a_damaged_file_is_dropped_with_a_note(tmp_path, capfd, damage):
    file = place(tmp_path, "x")
    disk.save(file, compiled())
    file.path.write_bytes(damage(file.path.read_bytes()))
    assert disk.peek(file) is None
    assert file.path.exists() and capfd.readouterr().err == ""
    assert disk.load(file) is None
    note = f"note: dropped a damaged file of a compiled graph: {file.path}\n"
    assert capfd.readouterr().err == note
    assert not file.path.exists()
    assert disk.load(file) is None
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "refusal", [jax.errors.JaxRuntimeError("INVALID_ARGUMENT: other version"), KeyError(3)], ids=str
)
def test_an_executable_that_jax_refuses_is_dropped(tmp_path, monkeypatch, capfd, refusal):
    from jax.experimental import serialize_executable

    file = place(tmp_path, "x")
    disk.save(file, compiled())

    def refuse(*_args, **_options):
        raise refusal

    monkeypatch.setattr(serialize_executable, "deserialize_and_load", refuse)
    assert disk.peek(file) is None and file.path.exists()
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


def test_the_file_that_was_used_last_is_the_newest(tmp_path):
    cpu = jax.devices()[0]
    assert disk.newest(tmp_path, MODEL, ["decode"], cpu) is None
    old, last, prefill = place(tmp_path, "a"), place(tmp_path, "b"), place(tmp_path, kind="prefill")
    other = place(tmp_path, "a", model=Path("other.gguf"))
    for i, file in enumerate((old, last, prefill, other)):
        disk.save(file, compiled())
        age(file.path, 100 - i)
    assert disk.newest(tmp_path, MODEL, ["decode"], cpu) == last
    assert disk.newest(tmp_path, MODEL, ["prefill"], cpu) == prefill
    assert disk.newest(tmp_path, MODEL, ["decode", "prefill", "encode"], cpu) in (last, prefill)
    gpu = SimpleNamespace(platform="gpu")
    assert disk.newest(tmp_path, MODEL, ["decode"], gpu) is None
    disk.load(old)
    assert disk.newest(tmp_path, MODEL, ["decode"], cpu) == old
    (tmp_path / "file").write_text("")
    assert disk.newest(tmp_path / "file", MODEL, ["decode"], cpu) is None


def test_files_that_others_remove_meanwhile_are_passed_over(tmp_path, monkeypatch):
    files = [place(tmp_path, name) for name in "abc"]
    for i, file in enumerate(files):
        disk.save(file, compiled())
        age(file.path, 100 - i)
    status = Path.stat

    def vanishing(path, **options):
        if path == files[2].path:
            raise FileNotFoundError(path)
        return status(path, **options)

    monkeypatch.setattr(Path, "stat", vanishing)
    assert disk.newest(tmp_path, MODEL, ["decode"], jax.devices()[0]) == files[1]
    monkeypatch.setattr(disk, "MAX_BYTES", files[1].path.stat().st_size)
    disk._evict(tmp_path)
    monkeypatch.undo()
    assert [file.path.exists() for file in files] == [False, True, True]


def test_folder_is_private_and_named_after_what_matters(tmp_path):
    folder = place(tmp_path, "x").path.parent
    assert folder == tmp_path / disk.cache_key()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert f"jax{jax.__version__}-jaxlib{jaxlib.__version__}-" in folder.name


def test_a_private_folder_on_a_disk_that_is_read_only_is_used(tmp_path, monkeypatch):
    folder = place(tmp_path, "x").path.parent

    def read_only(path, mode):
        raise OSError(30, "Read-only file system", path)

    monkeypatch.setattr(Path, "chmod", read_only)
    assert disk.enable(tmp_path) == folder
    monkeypatch.undo()
    folder.chmod(0o755)
    assert disk.enable(tmp_path) == folder and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    monkeypatch.setattr(Path, "chmod", read_only)
    assert disk.enable(tmp_path) is None


def test_files_are_private(tmp_path):
    file = place(tmp_path, "x")
    disk.save(file, compiled())
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_cpu_features_are_part_of_the_key(monkeypatch):
    monkeypatch.setattr(disk, "_cpu_features", lambda: "flags: avx2")
    first = disk.cache_key()
    monkeypatch.setattr(disk, "_cpu_features", lambda: "flags: avx2 avx512f")
    assert disk.cache_key() != first


@pytest.mark.parametrize(
    "line",
    ["flags\t\t: sse2", "CPU implementer\t: 0x41", "isa\t\t: rv64imafdcv", "Features\t: dotprod"],
)
def test_what_the_system_says_of_a_cpu(line, monkeypatch):
    text = f"processor\t: 0\n{line}\ncpu MHz\t\t: 2596.1\n\nprocessor\t: 1\n{line}\n"
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    assert disk._cpu_features.__wrapped__() == line


def test_an_unusable_folder_means_no_cache(tmp_path):
    (tmp_path / "file").write_text("")
    assert disk.enable(tmp_path / "file") is None
    (tmp_path / "theirs").mkdir()
    (tmp_path / disk.cache_key()).symlink_to(tmp_path / "theirs")
    assert disk.enable(tmp_path) is None
    assert disk.graph_file(tmp_path, MODEL, "decode", jax.devices()[0], ()) is None
