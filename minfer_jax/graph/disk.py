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
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxlib.xla_client import CompileOptions

from minfer_jax.device import threads

MAX_BYTES = 512 << 20
"""What all folders under a root may hold together; those used longest ago go first."""

_SUFFIX = ".graph"
_SUM_BYTES = hashlib.sha256().digest_size
_ROOMS = ("gguf", "graph", "memory", "models", "ops")
"""Rooms of this package whose source decides what a trace is."""
_IRRELEVANT = (
    "jax_compilation_cache",
    "jax_enable_compilation_cache",
    "jax_log",
    "jax_persistent_cache",
    "jax_platforms",  # the device in use is part of the key by itself
)
"""What names of jax's settings begin with that change no executable."""
_FAILURES = (
    jax.errors.JaxRuntimeError,
    pickle.PickleError,
    AttributeError,
    EOFError,
    ImportError,
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
        """The files that stand in for each other: the same model's and kind's, the newest last."""
        return self.path.name.rpartition("-")[0]


def enable(root: Path) -> Path | None:
    """The folder under `root` for graphs compiled here and now, made if need be.

    None if it cannot be used, or belongs to somebody else.
    """
    folder = root / cache_key()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.is_symlink() or (hasattr(os, "getuid") and folder.stat().st_uid != os.getuid()):
            return None
        folder.chmod(0o700)
    except OSError:
        return None
    return folder


def graph_file(
    root: Path, model: Path, kind: str, device: Any, identity: tuple[object, ...]
) -> GraphFile | None:
    """The place under `root` of a graph of `model`; None if there is no folder to be used.

    `identity` is all that the graph depends on beside the process's own settings, the device and
    this package's source; its parts' `repr` must tell them apart.
    """
    folder = enable(root)
    if folder is None:
        return None
    key = hashlib.sha256()
    for part in (*identity, *_surroundings(device)):
        text = repr(part).encode()
        key.update(len(text).to_bytes(8, "little") + text)
    return GraphFile(folder / f"{_line(model, kind)}-{key.hexdigest()[:32]}{_SUFFIX}", device)


def load(file: GraphFile) -> jax.stages.Compiled | None:
    """The executable, or None if it has to be compiled. A file that cannot be read is removed."""
    guess = _ahead.pop(file.line, None)
    compiled = guess[1].result() if guess is not None and guess[0] == file else _read(file)
    if compiled is not None:
        with suppress(OSError):
            os.utime(file.path)  # for `_newest` and `_evict`
    return compiled


def read_ahead(root: Path, model: Path, kinds: Iterable[str], device: Any) -> None:
    """Begin to load what `model` used last of each kind, beside the caller.

    A guess, which costs nothing that the caller waits for: `load` takes what was loaded only if it
    is asked for that very file. The interpreter's lock is free during most of it.
    """
    folder = enable(root)
    newest = [_newest(folder, _line(model, kind)) for kind in kinds] if folder else []
    files = [GraphFile(path, device) for path in newest if path is not None]
    _ahead.clear()
    if files:
        pool = ThreadPoolExecutor(len(files), thread_name_prefix="graphs")
        _ahead.update((file.line, (file, pool.submit(_read, file))) for file in files)
        pool.shutdown(wait=False)


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


_ahead: dict[str, tuple[GraphFile, Future[jax.stages.Compiled | None]]] = {}
"""What `read_ahead` has begun, by the line of files that it stands in."""
_hits = [0]


def _read(file: GraphFile) -> jax.stages.Compiled | None:
    try:
        data = file.path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(data[_SUM_BYTES:]).digest() != data[:_SUM_BYTES]:
        print(f"note: dropped a damaged file of a compiled graph: {file.path}", file=sys.stderr)
        _remove(file.path)
        return None
    try:
        from jax.experimental.serialize_executable import deserialize_and_load

        payload, in_tree, out_tree = pickle.loads(memoryview(data)[_SUM_BYTES:])
        return deserialize_and_load(
            payload,
            in_tree,
            out_tree,
            backend=file.device.client,
            execution_devices=[file.device],
        )
    except _FAILURES:
        _remove(file.path)
        return None


def _surroundings(device: Any) -> tuple[object, ...]:
    """What shapes an executable beside its graph: settings, device, source."""
    settings = {
        name: getattr(jax.config, name)
        for name in sorted(jax.config.values)
        if not name.startswith(_IRRELEVANT) and hasattr(jax.config, name)
    }
    return (
        settings,
        CompileOptions().SerializeAsString(),  # XLA_FLAGS, as XLA has understood them
        threads(),
        (device.platform, device.device_kind, device.id, device.client.platform_version),
        np.__version__,
        _source(),
    )


@cache
def _source() -> str:
    """A digest of the package's code that can change a trace, so that none outlives an edit."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for room in _ROOMS:
        for path in sorted((package / room).rglob("*.py")):
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _line(model: Path, kind: str) -> str:
    return f"{hashlib.sha256(os.fsencode(model)).hexdigest()[:12]}-{kind}"


def _newest(folder: Path, line: str) -> Path | None:
    try:
        found = [(path.stat().st_mtime_ns, path) for path in folder.glob(f"{line}-*{_SUFFIX}")]
    except OSError:  # removed meanwhile
        return None
    return max(found)[1] if found else None


def _evict(root: Path) -> None:
    """Remove the files that were used longest ago, of whatever version, beyond `MAX_BYTES`."""
    folders = [folder for folder in root.iterdir() if folder.is_dir() and not folder.is_symlink()]
    found = [(path.stat(), path) for folder in folders for path in folder.iterdir()]
    room = MAX_BYTES
    for status, path in sorted(found, key=lambda entry: entry[0].st_mtime_ns, reverse=True):
        room -= status.st_size
        if room < 0:
            _remove(path)


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
    wanted = ("flags", "Features", "model name", "CPU part")
    lines = {line for line in info.splitlines() if line.startswith(wanted)}
    return "\n".join(sorted(lines))
