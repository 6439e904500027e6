"""XLA's persistent compilation cache, in a folder of our own that is safe to share a disk with.

The folder is named after the versions of jax and jaxlib and the CPU's features: compiled host
code from another machine can crash here. It is readable by the user alone, because loading a
cached executable is running code.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

_counts = {"/jax/compilation_cache/cache_hits": 0, "/jax/compilation_cache/cache_misses": 0}
_listening = False
_ours: Path | None = None


def enable(root: Path) -> Path | None:
    """Keep compiled graphs under `root`; the folder in use, or None if it cannot be used.

    A cache folder that the user has configured in jax is left as it is. A folder that cannot be
    written, or that belongs to somebody else, means no cache, never an error.
    """
    global _ours
    _listen()
    # jax adds its flags to `config` at run time.
    configured = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    folder = root / cache_key()
    if configured and Path(configured) != folder:
        return Path(configured)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
            return None
        folder.chmod(0o700)
    except OSError:
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # The defaults skip what compiles in under a second, which is most of our graphs.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _ours = folder
    return folder


@contextmanager
def guarded() -> Iterator[None]:
    """Around compilations: a cache that cannot be read or written costs time, nothing else.

    jax writes entries in place and never again, so that one cut short by a full disk or a killed
    process would be read, and warned of, in every later run. Our folder is then emptied.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    failures = [w for w in caught if "persistent compilation cache" in str(w.message)]
    for w in caught:
        if w not in failures:
            warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
    if failures and _ours is not None:
        for entry in _ours.iterdir():
            entry.unlink(missing_ok=True)
        print(f"note: emptied the cache of compiled graphs: {failures[0].message}", file=sys.stderr)


def cache_key() -> str:
    """The part of the folder's name that changes whenever old entries must not be loaded."""
    from jaxlib.version import __version__ as jaxlib_version

    features = hashlib.sha256(_cpu_features().encode()).hexdigest()[:12]
    return f"jax{jax.__version__}-jaxlib{jaxlib_version}-{platform.machine()}-{features}"


def lookups() -> tuple[int, int]:
    """Hits and misses of the cache since `enable` was first called in this process."""
    hits, misses = _counts.values()
    return hits, misses


def _listen() -> None:
    global _listening
    if not _listening:
        jax.monitoring.register_event_listener(_count)
        _listening = True


def _count(event: str, **_: object) -> None:
    if event in _counts:
        _counts[event] += 1


def _cpu_features() -> str:
    """Whatever the system says of the CPU's model and instruction sets."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return f"{platform.processor()} {platform.version()}"
    wanted = ("flags", "Features", "model name", "CPU part")
    lines = {line for line in info.splitlines() if line.startswith(wanted)}
    return "\n".join(sorted(lines))
