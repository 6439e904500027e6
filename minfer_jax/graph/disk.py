"""Compiled graphs on disk, as executables that load without a trace or a compilation.

The folder is named after the versions of jax and jaxlib and the CPU's features: compiled host
code from another machine can crash here. It is readable by the user alone, because loading an
executable is running code. Each file starts with a checksum and is never changed once it is
there. Whatever fails here costs time and nothing else.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxlib.xla_client import CompileOptions

from minfer_jax.device import threads
from minfer_jax.settings import libtpu_flags

MAX_BYTES = 512 << 20
"""What all folders under a root may hold together; those used longest ago go first."""

_SUFFIX = ".graph"
_SUM_BYTES = hashlib.sha256().digest_size
_ROOMS = ("gguf", "graph", "memory", "models", "ops", "sampling")
"""Rooms of this package whose source decides what a trace is."""
_IRRELEVANT = (
    "jax_compilation_cache",
    "jax_compiler_detailed",
    "jax_cpu_enable_async_dispatch",  # how the client calls an executable
    "jax_debug_log",
    "jax_dump_ir",
    "jax_enable_compilation_cache",
    "jax_explain_cache_misses",
    "jax_include_debug_info_in_dumps",
    "jax_include_full_tracebacks",
    "jax_log",
    "jax_persistent_cache",
    "jax_platform",  # the device in use is part of the key by itself
    "jax_pprint",
    "jax_raise_persistent_cache_errors",
    "jax_traceback",
    "jax_tracer_error",
)
"""What names of jax's settings begin with that change no executable."""
_FAILURES = (
    jax.errors.JaxRuntimeError,
    pickle.PickleError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,  # of a device, by its id
    NotImplementedError,
    TypeError,
    ValueError,
)
"""What jax raises for executables that it cannot write or read, all according to why."""


@dataclass(frozen=True)
class GraphFile:
    """The place of one executable for `device`, whether it is there or not."""

    path: Path
    device: Any

    @property
    def line(self) -> str:
        """What the names of files that may stand in for each other begin with."""
        return self.path.name.rpartition("-")[0]


def enable(root: Path) -> Path | None:
    """The folder under `root` for graphs compiled here and now, made if need be.

    None if it cannot be used, or belongs to somebody else.
    """
    folder = root / cache_key()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.lstat()
        if folder.is_symlink() or (hasattr(os, "getuid") and status.st_uid != os.getuid()):
            return None
        if status.st_mode & 0o077:  # else left alone: it may be on a disk that is read-only
            folder.chmod(0o700)
    except OSError:
        return None
    return folder


def graph_file(
    root: Path, model: Path, kind: str, device: Any, identity: tuple[object, ...]
) -> GraphFile | None:
    """The place under `root` of a graph of `model`; None if there is no folder to be used.

    `kind` is common to graphs of which the one used last is a fair guess at the one used next.
    `identity` is all that the graph depends on beside the process's own settings, the device and
    this package's source; its parts' `repr` must tell them apart.
    """
    folder = enable(root)
    if folder is None:
        return None
    try:
        surroundings = _surroundings(device)
    except OSError:  # of the package's source
        return None
    key = hashlib.sha256()
    for part in (*identity, *surroundings):
        text = repr(part).encode()
        key.update(len(text).to_bytes(8, "little") + text)
    name = f"{_line(model, kind, device)}-{key.hexdigest()[:32]}{_SUFFIX}"
    return GraphFile(folder / name, device)


def newest(root: Path, model: Path, kinds: Sequence[str], device: Any) -> GraphFile | None:
    """The file of any of these kinds that was used last, whatever its graph's identity; None if
    there is none."""
    folder = enable(root)
    if folder is None:
        return None
    found: dict[Path, os.stat_result] = {}
    for kind in kinds:
        found |= _files(folder, f"{_line(model, kind, device)}-*{_SUFFIX}")
    path = max(found, key=lambda path: found[path].st_mtime_ns, default=None)
    return None if path is None else GraphFile(path, device)


def load(file: GraphFile) -> jax.stages.Compiled | None:
    """The executable, or None if it has to be compiled. A file that cannot be used is removed."""
    data = _contents(file)
    if data is None:
        return None
    if not _is_sound(data):
        print(f"note: dropped a damaged file of a compiled graph: {file.path}", file=sys.stderr)
    elif (compiled := _executable(data, file.device)) is not None:
        mark_used(file)
        return compiled
    _remove(file.path)
    return None


def peek(file: GraphFile) -> jax.stages.Compiled | None:
    """The executable, or None if there is none that can be used here and now.

    For guesses: the file stays as it is, because what cannot be used here may be good elsewhere.
    """
    data = _contents(file)
    return _executable(data, file.device) if data is not None and _is_sound(data) else None


def mark_used(file: GraphFile) -> None:
    """Make a file the newest of its line, and the last one to be evicted."""
    with suppress(OSError):
        os.utime(file.path)


def save(file: GraphFile, compiled: jax.stages.Compiled) -> None:
    """Write an executable that was compiled, not loaded, in this process."""
    from jax.experimental import serialize_executable

    path = file.path
    try:
        data = pickle.dumps(serialize_executable.serialize(compiled))
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as out:
            try:
                out.write(hashlib.sha256(data).digest() + data)
                out.close()
                os.replace(out.name, path)
            except BaseException:
                _remove(Path(out.name))
                raise
        _evict(path.parents[1])
    except (OSError, *_FAILURES):
        return


def jax_hits() -> int:
    """How many executables jax itself has loaded from a cache that the user gave it.

    On the CPU these cannot be written again: they would load, and then lack functions.
    """
    _listen()
    return _hits[0]


def cache_key() -> str:
    """The part of the folder's name that changes whenever old entries must not be loaded."""
    from jaxlib.version import __version__ as jaxlib_version

    features = hashlib.sha256(_cpu_features().encode()).hexdigest()[:12]
    return f"jax{jax.__version__}-jaxlib{jaxlib_version}-{platform.machine()}-{features}"


_hits = [0]


def _contents(file: GraphFile) -> memoryview | None:
    try:
        return memoryview(file.path.read_bytes())
    except OSError:
        return None


def _is_sound(data: memoryview) -> bool:
    return hashlib.sha256(data[_SUM_BYTES:]).digest() == data[:_SUM_BYTES]


def _executable(data: memoryview, device: Any) -> jax.stages.Compiled | None:
    try:
        from jax.experimental.serialize_executable import deserialize_and_load

        payload, in_tree, out_tree = pickle.loads(data[_SUM_BYTES:])
        return deserialize_and_load(
            payload, in_tree, out_tree, backend=device.client, execution_devices=[device]
        )
    except _FAILURES:
        return None


def _surroundings(device: Any) -> tuple[object, ...]:
    """What shapes an executable beside its graph: settings, device, source."""
    settings = {
        # Those that jax calls flags are no attributes.
        name: getattr(jax.config, name, jax.config.values[name])
        for name in sorted(jax.config.values)
        if not name.startswith(_IRRELEVANT)
    }
    return (
        settings,
        CompileOptions().SerializeAsString(),  # XLA_FLAGS, as XLA has understood them
        libtpu_flags(),
        threads(),
        (device.platform, device.device_kind, device.id, device.client.platform_version),
        np.__version__,
        _version(),
        _source(),
    )


@cache
def _version() -> str | None:
    try:
        return version("minfer-jax")
    except PackageNotFoundError:  # run from its source
        return None


@cache
def _source() -> str:
    """A digest of the package's code that can change a trace, so that none outlives an edit."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for room in _ROOMS:
        for path in sorted((package / room).rglob("*.py")):
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _line(model: Path, kind: str, device: Any) -> str:
    return f"{hashlib.sha256(os.fsencode(model)).hexdigest()[:12]}-{device.platform}-{kind}"


def _evict(root: Path) -> None:
    """Remove the files that were used longest ago, of whatever version, beyond `MAX_BYTES`."""
    folders = [folder for folder in root.iterdir() if folder.is_dir() and not folder.is_symlink()]
    found = {path: status for folder in folders for path, status in _files(folder, "*").items()}
    room = MAX_BYTES
    for path in sorted(found, key=lambda path: found[path].st_mtime_ns, reverse=True):
        room -= found[path].st_size
        if room < 0:
            _remove(path)


def _files(folder: Path, pattern: str) -> dict[Path, os.stat_result]:
    """Those that are there, and stay so: other processes remove files, too."""
    found = {}
    with suppress(OSError):
        for path in folder.glob(pattern):
            with suppress(OSError):
                found[path] = path.stat()
    return found


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


@cache
def _listen() -> None:
    def count(event: str, **_: object) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            _hits[0] += 1

    jax.monitoring.register_event_listener(count)


@cache
def _cpu_features() -> str:
    """Whatever the system says of the CPU's model and instruction sets."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return f"{platform.processor()} {platform.version()}"
    wanted = ("flags", "Features", "model name", "CPU implementer", "CPU part", "isa")
    lines = {line for line in info.splitlines() if line.startswith(wanted)}
    return "\n".join(sorted(lines))
