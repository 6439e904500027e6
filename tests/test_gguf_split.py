"""Split models: any part opens all; parts that are missing or do not belong are named."""

import re

import numpy as np
import pytest
from gguf_builder import Tensor, f32_tensor, typed, write_gguf, write_split

from minfer_jax.errors import GGUFError
from minfer_jax.gguf import open_gguf


def tensor(i: int) -> Tensor:
    return f32_tensor(f"t{i}", np.full(4, i))


@pytest.fixture
def parts(tmp_path):
    tensors = [[tensor(0), tensor(1)], [tensor(2)], [tensor(3)]]
    return write_split(tmp_path, {"general.name": "first"}, tensors)


def part_keys(number: int, count: int, total: int) -> dict:
    return {
        "split.no": typed("u16", number),
        "split.count": typed("u16", count),
        "split.tensors.count": typed("i32", total),
    }


def refused(path, *texts: str) -> None:
    with pytest.raises(GGUFError) as error:
        open_gguf(path)
    for text in texts:
        assert text in str(error.value)


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_any_part_opens_all(parts, opened):
    file = open_gguf(parts[opened])
    assert file.path == parts[opened] and file.paths == tuple(parts)
    assert file.nbytes == sum(p.stat().st_size for p in parts)
    assert file.metadata["general.name"] == "first"
    assert [(t.name, t.shard) for t in file.tensors.values()] == [
        ("t0", 0),
        ("t1", 0),
        ("t2", 1),
        ("t3", 2),
    ]
    for i in range(4):
        assert file.raw(f"t{i}").view("<f4").tolist() == [i] * 4


def test_a_link_to_a_part_is_resolved_by_its_own_name(parts, tmp_path):
    # Hub caches keep parts under their hash and link them under their names.
    links = tmp_path / "links"
    links.mkdir()
    for i, part in enumerate(parts):
        blob = part.rename(tmp_path / f"blob{i}")
        (links / part.name).symlink_to(blob)
    assert len(open_gguf(links / parts[1].name).tensors) == 4


def test_a_count_of_one_needs_no_special_name(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", part_keys(0, 1, 1), [tensor(0)])
    assert open_gguf(path).paths == (path,)


@pytest.mark.parametrize("missing", [0, 2])
def test_missing_part(parts, missing):
    parts[missing].unlink()
    refused(parts[1], f"{parts[missing].name}: no such file", f"part {missing + 1} of 3")


def test_name_must_fit_the_keys(parts, tmp_path):
    renamed = parts[0].rename(tmp_path / "renamed.gguf")
    refused(renamed, "'split.no' 0", "'split.count' 3", "NAME-00001-of-00003.gguf")
    swapped = parts[1].rename(parts[0])
    refused(swapped, "'split.no' 1", "NAME-00002-of-00003.gguf")


def test_wrong_split_no_in_another_part(parts):
    write_gguf(parts[2], part_keys(1, 3, 4), [tensor(3)])
    refused(parts[0], parts[2].name, "'split.no' is 1, expected 2")


def test_wrong_split_count_in_another_part(parts):
    write_gguf(parts[2], part_keys(2, 4, 4), [tensor(3)])
    refused(parts[0], parts[2].name, "'split.count' is 4, expected 3")


def test_part_without_split_keys(parts):
    write_gguf(parts[1], {}, [tensor(2)])
    refused(parts[0], parts[1].name, "missing key 'split.no'")


def test_duplicate_tensor_across_parts(parts):
    write_gguf(parts[2], part_keys(2, 3, 4), [tensor(1)])
    refused(parts[0], parts[2].name, "tensor 't1' is also in", parts[0].name)


def test_total_number_of_tensors(parts):
    write_gguf(parts[2], part_keys(2, 3, 4), [tensor(3), tensor(4)])
    refused(parts[1], "'split.tensors.count' is 4", "hold 5 tensors")


def test_damage_in_a_part_names_that_part(parts):
    parts[1].write_bytes(parts[1].read_bytes()[:-32])
    refused(parts[0], parts[1].name, "tensor 't2'")


@pytest.mark.parametrize("count", [typed("u32", 0), typed("u64", 2**40), "3", True])
def test_split_count_out_of_range(tmp_path, count):
    keys = part_keys(0, 2, 1) | {"split.count": count}
    path = write_gguf(tmp_path / "m-00001-of-00002.gguf", keys, [tensor(0)])
    refused(path, "key 'split.count' is", "allowed: 1 to 99999")


def test_split_no_beyond_count(tmp_path):
    path = write_gguf(tmp_path / "m-00003-of-00002.gguf", part_keys(2, 2, 1), [tensor(0)])
    with pytest.raises(GGUFError, match=re.escape("'split.no' is 2, allowed: 0 to 1")):
        open_gguf(path)
