"""Parsing of one file: field reports G01 G02 G04 G07 G08, the gguf package as oracle, fuzzing."""

import struct
import sys
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_builder import RawValue, Tensor, f32_tensor, gguf_bytes, typed, value_bytes, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax.errors import GGUFError
from minfer_jax.gguf import GGMLType, open_gguf
from minfer_jax.gguf.reader import read_shard

F32, Q4_0 = 0, 2
ONE = [Tensor("t", (8,), F32, bytes(range(32)))]


@pytest.fixture
def opened(tmp_path):
    """bytes -> the parsed file."""

    def read(data: bytes):
        path = tmp_path / "x.gguf"
        path.write_bytes(data)
        return read_shard(path)

    return read


@pytest.fixture
def refused(opened):
    """bytes -> the message of the GGUFError that they must raise: one line with the file's name."""

    def message(data: bytes) -> str:
        with pytest.raises(GGUFError) as error:
            opened(data)
        text = str(error.value)
        assert "x.gguf: " in text and "\n" not in text
        return text

    return message


# What a good file gives


def test_agrees_with_the_gguf_package_on_a_file_it_wrote(tmp_path):
    path = tmp_path / "oracle.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 255)
    writer.add_int8("a.i8", -128)
    writer.add_uint16("a.u16", 65535)
    writer.add_int16("a.i16", -32768)
    writer.add_uint32("a.u32", 4294967295)
    writer.add_int32("a.i32", -2147483648)
    writer.add_uint64("a.u64", 2**64 - 1)
    writer.add_int64("a.i64", -(2**63))
    writer.add_float32("a.f32", 0.1)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.true", True)
    writer.add_bool("a.false", False)
    writer.add_string("a.text", "naïve 日本語\n")
    writer.add_array("l.int", [1, -2, 3])
    writer.add_array("l.float", [0.5, -1.5])
    writer.add_array("l.bool", [True, False, True])
    writer.add_array("l.text", ["", "a", "é", "\u2581the"])
    writer.add_array("l.nested", [[1, 2], [3], [4, 5, 6]])
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((3, 64), np.float32)
    blocks = gguf.quants.quantize(matrix, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("m", matrix)
    writer.add_tensor("q", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("cube", rng.standard_normal((2, 3, 5)).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    ours = open_gguf(path)
    oracle = gguf.GGUFReader(path)
    fields = {k: f for k, f in oracle.fields.items() if not k.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for key, value in ours.metadata.items():
        if key == "l.nested":  # the oracle flattens these
            assert [v.tolist() for v in value] == [[1, 2], [3], [4, 5, 6]]
        else:
            expected = fields[key].contents()
            assert type(value) is type(expected) or isinstance(value, np.ndarray)
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected
    assert ours.version == 3 and ours.alignment == oracle.alignment
    assert list(ours.tensors) == [t.name for t in oracle.tensors]
    for tensor in oracle.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert (info.type, info.nbytes) == (tensor.tensor_type, tensor.n_bytes)
        assert info.offset == tensor.data_offset
        assert ours.raw(tensor.name).tobytes() == tensor.data.tobytes()


def test_version_2_reads_as_version_3(opened):
    assert opened(gguf_bytes({"a": 1}, ONE, version=2)).metadata == {"a": 1}


def test_number_arrays_are_read_only_views_of_the_map(opened):
    shard = opened(gguf_bytes({"pad": "x", "n": np.arange(1000, dtype="<i4")}))
    values = shard.metadata["n"]
    assert values.tolist() == list(range(1000))
    assert np.shares_memory(values, shard.data)
    assert not values.flags.writeable


def test_empty_arrays(opened):
    kv = {k: typed(k, []) for k in ("u8", "f64", "bool", "string", "array")}
    assert [len(v) for v in opened(gguf_bytes(kv)).metadata.values()] == [0] * 5


def test_broken_utf8_can_be_had_back(opened):
    raw = b"\xff\xfe ok \xe2\x82"
    shard = opened(gguf_bytes({"s": raw, "l": typed("string", [raw, b"a"]), b"k\xff": 1}))
    assert shard.metadata["s"].encode("utf-8", "surrogateescape") == raw
    assert shard.metadata["l"][0].encode("utf-8", "surrogateescape") == raw
    assert list(shard.metadata)[2].encode("utf-8", "surrogateescape") == b"k\xff"


def test_gaps_and_any_order_of_tensor_data_are_fine(opened):
    tensors = [
        Tensor("b", (8,), F32, bytes(32), offset=64),
        Tensor("a", (8,), F32, bytes(64), offset=0),
    ]
    shard = opened(gguf_bytes({}, tensors))
    assert shard.tensors["b"].offset == shard.tensors["a"].offset + 64


def test_a_vocabulary_only_file_needs_no_data_section(opened):
    assert opened(gguf_bytes({"a": 1})).tensors == {}


# What is not GGUF at all


def test_wrong_magic_is_said_plainly(refused):
    assert "not a GGUF file" in refused(gguf_bytes(magic=b"GGUX"))
    assert "git-lfs" in refused(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    assert "before GGUF" in refused(b"tjgg" + bytes(60))
    assert "web page" in refused(b"<!DOCTYPE html><html>")


def test_other_versions_and_byte_order(refused):
    assert "version 1 is not supported" in refused(gguf_bytes(version=1))
    assert "version 4 is not supported" in refused(gguf_bytes(version=4))
    assert "version 0 is not supported" in refused(gguf_bytes(version=0))
    assert "big-endian" in refused(gguf_bytes(version=3 << 24))


# G01: sizes that wrap around


@pytest.mark.parametrize(
    "dims",
    [
        (2**32, 2**32 + 1),
        (2**62 + 1,),
        (2**64 - 1,),
        (2**62 - 1,),
        (2**63, 2),
        (2**32, 2**32),
        (2**16, 2**16, 2**16, 2**16),
    ],
)
def test_g01_dimensions_whose_product_or_padding_wraps(refused, dims):
    message = refused(gguf_bytes({}, [Tensor("wrap", dims, F32, bytes(32))]))
    assert "tensor 'wrap'" in message


@pytest.mark.parametrize("n_dims", [5, 10**6, 0])
def test_g01_number_of_dimensions(refused, n_dims):
    data = gguf_bytes({}, [Tensor("t", (1,) * min(n_dims, 5), F32, bytes(64), n_dims=n_dims)])
    assert f"tensor 't' has {n_dims} dimensions" in refused(data)


@pytest.mark.parametrize("count", [2**63, 2**40, 2**64 - 1])
def test_g01_counts_are_refused_before_any_allocation(refused, count):
    cases = [gguf_bytes({"a": 1}, n_kv=count), gguf_bytes({"a": 1}, n_tensors=count)]
    for vtype in (0, 7, 8, 9, 12):
        cases.append(gguf_bytes({"a": RawValue(struct.pack("<IIQ", 9, vtype, count))}))
    cases.append(gguf_bytes({"a": RawValue(struct.pack("<IQ", 8, count))}))
    cases.append(gguf_bytes({"a": RawValue(struct.pack("<IIQQ", 9, 8, 1, count))}))
    tracemalloc.start()
    for data in cases:
        refused(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_g01_key_and_name_lengths(refused):
    assert "metadata key 0" in refused(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + bytes(99))
    assert "name of tensor 0" in refused(b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 2**63) + bytes(99))


def test_a_dimension_of_zero(refused):
    assert "tensor 't' has dimensions [0]" in refused(gguf_bytes({}, [Tensor("t", (0,), F32)]))


# G02: general.alignment


@pytest.mark.parametrize("alignment", [0, 3, 0x80000000, 1 << 21])
def test_g02_alignment_must_be_a_sane_power_of_two(refused, alignment):
    message = refused(gguf_bytes({}, ONE, alignment=alignment, pad=32))
    assert f"'general.alignment' is {alignment}, allowed: a power of two" in message


@pytest.mark.parametrize("type_", ["u64", "i32", "u16"])
def test_g02_alignment_must_be_u32(refused, type_):
    message = refused(gguf_bytes({}, ONE, alignment=64, alignment_type=type_))
    assert f"of type {type_}, allowed: u32" in message


@pytest.mark.parametrize("alignment", [1, 8, 64, 1 << 20])
def test_g02_alignment_moves_the_data(opened, alignment):
    shard = opened(gguf_bytes({}, ONE, alignment=alignment))
    info = shard.tensors["t"]
    assert shard.alignment == alignment and info.offset % alignment == 0
    assert shard.data[info.offset : info.offset + 32].tolist() == list(range(32))


# G04: names


def test_g04_empty_key(refused):
    assert "key 0 is empty" in refused(gguf_bytes({"": 1}))


def test_g04_duplicate_key(refused):
    assert "duplicate key 'a'" in refused(gguf_bytes([("a", 1), ("b", 1), ("a", 1)]))


def test_g04_duplicate_tensor(refused):
    assert "duplicate tensor name 't'" in refused(gguf_bytes({}, ONE * 2))


def test_g04_empty_tensor_name(refused):
    assert "name of tensor 0 is empty" in refused(
        gguf_bytes({}, [Tensor("", (8,), F32, bytes(32))])
    )


def test_g04_tensor_name_of_64_bytes(opened, refused):
    assert "64 bytes long" in refused(gguf_bytes({}, [Tensor("n" * 64, (8,), F32, bytes(32))]))
    assert "n" * 63 in opened(gguf_bytes({}, [Tensor("n" * 63, (8,), F32, bytes(32))])).tensors


# G07: data that is not there


def test_g07_offset_past_the_end(refused):
    for offset in (32, 2**40, 2**64 - 32):
        data = gguf_bytes({}, [Tensor("far", (8,), F32, bytes(32), offset=offset)])
        assert "tensor 'far' ends at byte" in refused(data)


def test_g07_unaligned_offset(refused):
    data = gguf_bytes({}, [Tensor("odd", (8,), F32, bytes(96), offset=4)])
    assert "tensor 'odd' is at offset 4, not a multiple of 32" in refused(data)


def test_g07_overlap(refused):
    tensors = [
        Tensor("a", (16,), F32, bytes(64)),
        Tensor("b", (8,), F32, bytes(64), offset=32),
    ]
    assert "'a' and 'b' overlap" in refused(gguf_bytes({}, tensors))
    tensors[1].offset = 0
    assert "overlap" in refused(gguf_bytes({}, tensors))


def test_g07_a_valid_file_cut_anywhere_is_refused(refused):
    data = gguf_bytes({"a": "text", "l": ["x", "yy"]}, ONE)
    for end in range(1, len(data)):
        refused(data[:end])


def test_g07_missing_padding_after_the_last_tensor_is_fine(opened):
    tensors = [f32_tensor("a", np.arange(3)), f32_tensor("b", np.arange(5))]
    data = gguf_bytes({}, tensors, pad_last=False)
    shard = opened(data)
    assert shard.tensors["b"].offset + 20 == len(data)


# P07: checks that slow loading


def test_p07_no_python_or_numpy_call_per_element(tmp_path):
    n = 20_000
    kv = {"tokens": [f"token {i}" for i in range(n)], "scores": np.zeros(n, np.float32)}
    path = write_gguf(tmp_path / "x.gguf", kv)
    calls = {"call": 0, "numpy": 0}

    def count(frame, event, callee):
        calls["call"] += event == "call"
        module = getattr(type(getattr(callee, "__self__", None)), "__module__", "")
        calls["numpy"] += event == "c_call" and module.startswith("numpy")

    sys.setprofile(count)
    try:
        file = open_gguf(path)
    finally:
        sys.setprofile(None)
    assert file.metadata["tokens"][-1] == f"token {n - 1}"
    assert 0 < calls["call"] < 500 and calls["numpy"] < 50


# G08: types


@pytest.mark.parametrize("type_id", [99, 4, 31, 2**32 - 1])
def test_g08_unknown_type_lists_but_does_not_read(tmp_path, type_id):
    tensors = [Tensor("new", (33,), type_id, bytes(32)), f32_tensor("old", np.arange(8))]
    file = open_gguf(write_gguf(tmp_path / "x.gguf", {"a": 1}, tensors))
    info = file.tensors["new"]
    assert file.metadata == {"a": 1}
    assert (info.type, info.type_id, info.nbytes, info.shape) == (None, type_id, None, (33,))
    assert file.raw("old").nbytes == 32
    with pytest.raises(GGUFError, match=f"tensor 'new' has type id {type_id}"):
        file.raw("new")


def test_g08_unknown_type_must_lie_inside_the_file(refused):
    assert "'new'" in refused(gguf_bytes({}, [Tensor("new", (8,), 99, bytes(32), offset=32)]))
    tensors = [Tensor("new", (8,), 99, bytes(32)), Tensor("b", (8,), F32, offset=0)]
    assert "overlap" in refused(gguf_bytes({}, tensors))


def test_g08_mxfp4_is_known(opened):
    info = opened(gguf_bytes({}, [Tensor("t", (32, 2), 39, bytes(34))])).tensors["t"]
    assert (info.type, info.nbytes) == (GGMLType.MXFP4, 34)


def test_g08_row_length_is_whole_blocks(refused):
    message = refused(gguf_bytes({}, [Tensor("odd", (33, 32), Q4_0, bytes(1024))]))
    assert "tensor 'odd' of type Q4_0 (id 2) has rows of 33 values" in message


# Values


def test_unknown_value_types(refused):
    assert "key 'a' has value type 13" in refused(gguf_bytes({"a": RawValue(b"\r\0\0\0" * 4)}))
    array = RawValue(struct.pack("<IIQ", 9, 77, 0))
    assert "key 'a' has element type 77" in refused(gguf_bytes({"a": array}))


def test_bools_are_zero_or_one(refused):
    assert "byte 2, allowed: 0 or 1" in refused(gguf_bytes({"a": RawValue(b"\7\0\0\0\2")}))
    array = RawValue(struct.pack("<IIQ", 9, 7, 3) + b"\0\1\xff")
    assert "byte 255, allowed: 0 or 1" in refused(gguf_bytes({"a": array}))


def test_nesting_is_bounded(opened, refused):
    def nested(depth: int) -> RawValue:
        return RawValue(struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * (depth - 1) + leaf)

    leaf = value_bytes([1, 2])[4:]
    assert opened(gguf_bytes({"a": nested(4)})).metadata["a"][0][0][0].tolist() == [1, 2]
    for depth in (5, 100_000):
        assert "nests arrays deeper than 4" in refused(gguf_bytes({"a": nested(depth)}))


# Fuzzing: any bytes at all either open or raise GGUFError

VALID = gguf_bytes(
    {
        "general.architecture": "llama",
        "a.int": 7,
        "a.bool": True,
        "a.texts": ["one", "two", "", "four"],
        "a.floats": [0.5, 1.5],
        "a.nested": [[1], [2, 3]],
    },
    [
        f32_tensor("w", np.ones((2, 4))),
        Tensor("q", (32, 2), Q4_0, bytes(36)),
        Tensor("u", (8,), 99, bytes(8)),
    ],
    alignment=32,
)
EDGES = [0, 1, 2**7, 2**31, 2**32 - 1, 2**62 + 1, 2**63, 2**64 - 1]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "x.gguf"


def opens_or_refuses(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        file = open_gguf(path)
    except GGUFError as error:
        assert "\n" not in str(error)
        return
    for name, info in file.tensors.items():
        if info.nbytes is not None:
            assert len(file.raw(name).tobytes()) == info.nbytes


def test_the_fuzzed_file_is_valid(scratch):
    scratch.write_bytes(VALID)
    assert list(open_gguf(scratch).tensors) == ["w", "q", "u"]


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200), framed=st.booleans())
def test_random_bytes(scratch, data, framed):
    opens_or_refuses(scratch, b"GGUF\3\0\0\0" + data if framed else data)


@settings(max_examples=500, deadline=None)
@given(
    edits=st.lists(
        st.tuples(st.integers(4, len(VALID) - 8), st.sampled_from(EDGES), st.sampled_from("BIQ")),
        min_size=1,
        max_size=3,
    ),
    cut=st.integers(0, 40),
)
def test_mutated_valid_file(scratch, edits, cut):
    data = bytearray(VALID)
    for at, value, code in edits:
        form = struct.Struct("<" + code)
        form.pack_into(data, at, value & ((1 << 8 * form.size) - 1))
    opens_or_refuses(scratch, bytes(data[: len(data) - cut]))


def test_every_byte_of_the_header_changed(scratch):
    for at in range(len(VALID) - 128):
        for value in (0, 1, 0x7F, 0xFF, VALID[at] ^ 1):
            opens_or_refuses(scratch, VALID[:at] + bytes([value]) + VALID[at + 1 :])
