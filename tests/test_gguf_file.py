"""open_gguf and GGUFFile: unreadable paths, lifetime of views, typed access to metadata."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from gguf_builder import Tensor, f32_tensor, typed, write_gguf

from minfer_jax.errors import GGUFError
from minfer_jax.gguf import open_gguf

KV = {
    "i": 7,
    "neg": -3,
    "wide": typed("u64", 2**40),
    "f": 0.5,
    "inf": float("inf"),
    "yes": True,
    "s": "text",
    "ints": np.arange(3, dtype="<i8"),
    "floats": [0.5, 1.0],
    "bools": [True, False],
    "texts": ["a", "b"],
    "nested": [[1], [2]],
}


@pytest.fixture
def file(tmp_path):
    tensors = [f32_tensor("w", np.arange(6).reshape(2, 3)), Tensor("u", (8,), 99, bytes(8))]
    return open_gguf(write_gguf(tmp_path / "x.gguf", KV, tensors))


def test_paths_and_size(file, tmp_path):
    path = tmp_path / "x.gguf"
    assert (file.path, file.paths, file.nbytes) == (path, (path,), path.stat().st_size)
    assert open_gguf(str(path)).path == path


def test_raw_is_a_read_only_view_of_the_map(file):
    first, second = file.raw("w"), file.raw("w")
    assert first.view("<f4").tolist() == [0, 1, 2, 3, 4, 5]
    assert np.shares_memory(first, second)
    with pytest.raises(ValueError):
        first[0] = 1


def test_raw_of_unknown_name_or_type(file):
    with pytest.raises(GGUFError, match=r"x\.gguf: missing tensor 'nope'"):
        file.raw("nope")
    with pytest.raises(GGUFError, match=r"x\.gguf: tensor 'u' has type id 99"):
        file.raw("u")


def test_views_outlive_the_file(file):
    with file as same:
        raw, ints = same.raw("w"), same.metadata["ints"]
    with pytest.raises(GGUFError, match="is closed"):
        file.raw("w")
    file.close()
    path = file.path
    del file, same
    gc.collect()
    path.unlink()
    assert raw.view("<f4").sum() == 15 and ints.tolist() == [0, 1, 2]


def test_values_of_the_right_type(file):
    assert file.get_int("i") == 7
    assert file.get_int("neg", lo=-3, hi=-3) == -3
    assert file.get_int("wide") == 2**40
    assert file.get_float("f", lo=0.5, hi=0.5) == 0.5
    assert type(file.get_float("i")) is float
    assert file.get_bool("yes") is True
    assert file.get_str("s") == "text"
    assert file.get_array("ints", kind="int", n=3).tolist() == [0, 1, 2]
    assert file.get_array("floats", kind="float").tolist() == [0.5, 1.0]
    assert file.get_array("bools", kind="bool").tolist() == [True, False]
    assert file.get_array("texts", kind="str") == ["a", "b"]
    assert len(file.get_array("nested")) == 2


def test_missing_keys(file):
    for get in (file.get_int, file.get_float, file.get_bool, file.get_str, file.get_array):
        with pytest.raises(GGUFError, match=r"x\.gguf: missing key 'nope'"):
            get("nope")
        assert get("nope", None) is None
    # A default is returned as it is, whatever the bounds.
    assert file.get_int("nope", 0, lo=1) == 0


@pytest.mark.parametrize(
    ("get", "key", "options", "text"),
    [
        ("get_int", "yes", {}, "is the bool True, allowed: an integer"),
        ("get_int", "f", {}, "is 0.5, allowed: an integer"),
        ("get_int", "i", {"hi": 6}, "is 7, allowed: an integer of at most 6"),
        ("get_int", "neg", {"lo": 0}, "is -3, allowed: an integer of at least 0"),
        ("get_int", "wide", {"lo": 1, "hi": 9}, f"is {2**40}, allowed: an integer from 1 to 9"),
        ("get_int", "ints", {}, "is an array of 3 int64, allowed: an integer"),
        ("get_float", "yes", {}, "is the bool True, allowed: a finite number"),
        ("get_float", "inf", {}, "is inf, allowed: a finite number"),
        ("get_float", "f", {"lo": 1.0}, "is 0.5, allowed: a finite number of at least 1.0"),
        ("get_bool", "i", {}, "is 7, allowed: a bool"),
        ("get_str", "i", {}, "is 7, allowed: a string"),
        ("get_str", "texts", {}, "is an array of 2 strings, allowed: a string"),
        ("get_array", "s", {}, "is the string 'text', allowed: an array"),
        ("get_array", "floats", {"kind": "int"}, "array of 2 float32, allowed: an array (int)"),
        ("get_array", "ints", {"kind": "str"}, "array of 3 int64, allowed: an array (str)"),
        ("get_array", "texts", {"n": 3}, "is an array of 2 strings, allowed: an array of 3"),
        ("get_array", "nested", {"kind": "int"}, "is an array of 2 arrays, allowed"),
    ],
)
def test_values_of_the_wrong_type(file, get, key, options, text):
    with pytest.raises(GGUFError) as error:
        getattr(file, get)(key, **options)
    message = str(error.value)
    assert message.startswith(f"{file.path}: key {key!r} is ") and text in message


def test_wrong_values_with_a_default_are_still_errors(file):
    with pytest.raises(GGUFError):
        file.get_int("s", 3)


def test_paths_that_cannot_be_read(tmp_path):
    empty = tmp_path / "empty.gguf"
    empty.touch()
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    for path, text in [
        (tmp_path / "none.gguf", "no such file"),
        (tmp_path, "is a directory"),
        (empty, "empty"),
        (fifo, "not a regular file"),
        (tmp_path / ("x" * 300), "cannot be opened"),
        ("nul\0byte", "cannot be opened"),
    ]:
        with pytest.raises(GGUFError, match=text):
            open_gguf(path)


def test_a_file_without_permission_is_a_gguf_error(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "x.gguf")

    def denied(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(GGUFError, match=r"x\.gguf: cannot be opened: Permission denied"):
        open_gguf(path)
