"""States as bytes: what was written is read back, and nothing else is taken for a state."""

import hashlib
import json
import os
import stat
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax.errors import StateError, UsageError
from minfer_jax.memory.plan import CacheSpec, MemoryPlan, RecurrentSpec
from minfer_jax.memory.state_format import (
    SavedCache,
    SavedOutputs,
    SavedSequence,
    SavedState,
    SavedStream,
    decode,
    encode,
    model_form,
    read_file,
    write_file,
)

SPEC = CacheSpec(
    layers=(0, 2),
    n_head_kv=1,
    head_dim_k=2,
    head_dim_v=1,
    types=("f32", "f16"),
    window=0,
    n_stream=1,
    stream_cells=256,
    stream_size=200,
    n_seq=3,
)
STATES = RecurrentSpec(layers=(1,), shapes=((2,), (1, 2)), n_slots=6, n_snapshots=0)
PLAN = MemoryPlan(caches=(SPEC,), recurrent=STATES)
FORM = model_form(PLAN, "cafe", n_vocab=8, n_embd=5)
N_PREFIX, N_SUM = 24, 32
RNG = np.random.default_rng(5)

K = RNG.random((2, 4, 2), np.float32)
V = RNG.random((2, 4, 1), np.float32).astype(np.float16)
CACHE = SavedCache(
    layers=(0, 2),
    streams=(SavedStream(n=4, size=200, head=9, whole=True),),
    cell=np.array([3, 4, 5, 8], np.int32),
    pos=np.array([0, 1, 2, 2], np.int32),
    mask=np.array([[0b101, 0b101, 0b001, 0b100]], np.uint32),
    rows=(K, V),
)
OUTPUTS = SavedOutputs(
    n_batch=6,
    index=np.array([2, 5], np.int32),
    rows=RNG.random((2, 8), np.float32),
    embeddings=False,
)
STATE = SavedState(
    single=False,
    sequences=(
        SavedSequence(np.array([7, 0, 1], np.int32), 3, state=0, last_row=5),
        SavedSequence(np.zeros(0, np.int32), 0),
        SavedSequence(None, 3, state=1, last_row=2),
    ),
    caches=(CACHE,),
    states=(RNG.random((1, 2, 2), np.float32), RNG.random((1, 2, 1, 2), np.float32)),
    n_states=2,
    outputs=OUTPUTS,
)
DATA = encode(STATE, FORM)


def header(data=DATA):
    n = struct.unpack_from("<I", data, 12)[0]
    return json.loads(data[N_PREFIX : N_PREFIX + n])


def sealed(fields, arrays=None):
    """A state of these parts, whose checksum is right."""
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    if arrays is None:
        arrays = DATA[N_PREFIX + struct.unpack_from("<I", DATA, 12)[0] : -N_SUM]
    body = struct.pack("<8sIIQ", DATA[:8], 2, len(text), len(arrays)) + text + arrays
    return body + hashlib.blake2b(body, digest_size=N_SUM).digest()


def test_what_was_saved_is_read_back():
    state = decode(DATA, FORM)
    assert (state.single, state.n_states) == (False, 2)
    for got, want in zip(state.sequences, STATE.sequences, strict=True):
        assert (got.end, got.state, got.last_row) == (want.end, want.state, want.last_row)
        assert (got.tokens is None) == (want.tokens is None)
    assert state.sequences[0].tokens.tolist() == [7, 0, 1]
    (cache,) = state.caches
    assert (cache.layers, cache.streams) == (CACHE.layers, CACHE.streams)
    for got, want in [
        (cache.cell, CACHE.cell),
        (cache.pos, CACHE.pos),
        (cache.mask, CACHE.mask),
        *zip(cache.rows, CACHE.rows, strict=True),
        *zip(state.states, STATE.states, strict=True),
        (state.outputs.index, OUTPUTS.index),
        (state.outputs.rows, OUTPUTS.rows),
    ]:
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    assert (state.outputs.n_batch, state.outputs.embeddings) == (6, False)
    assert [cache.held(s).tolist() for s in range(3)] == [[1, 1, 1, 0], [0] * 4, [1, 1, 0, 1]]


@pytest.mark.parametrize("beside", [None, {"draws": 3, "mu": [0.25]}, ["text", 1]])
def test_what_a_caller_puts_beside_it_comes_back(beside):
    assert decode(encode(replace(STATE, beside=beside), FORM), FORM).beside == beside


@pytest.mark.parametrize("beside", [{1, 2}, np.float32(1), "x" * (1 << 20)])
def test_what_no_header_can_hold_is_refused(beside):
    with pytest.raises(UsageError, match="beside a state"):
        encode(replace(STATE, beside=beside), FORM)


def test_the_layout_of_the_bytes():
    n = struct.unpack_from("<I", DATA, 12)[0]
    n_tokens, n_cells, n_rows, n_states = 4 * 3, 4 * (4 + 4 + 4), 2 * 4 * (2 * 4 + 2), 4 * 8
    n_arrays = n_tokens + n_cells + n_rows + n_states + 4 * (2 + 2 * 8)
    assert DATA[:8] == b"minfer\x9dS"
    assert struct.unpack_from("<IIQ", DATA, 8) == (2, n, n_arrays)
    assert len(DATA) == N_PREFIX + n + n_arrays + N_SUM
    assert DATA[N_PREFIX + n :][:12] == struct.pack("<3i", 7, 0, 1)
    assert hashlib.blake2b(DATA[:-N_SUM], digest_size=32).digest() == DATA[-N_SUM:]
    assert decode(bytearray(DATA), FORM).n_states == 2
    assert decode(memoryview(b"".join(bytes([b, 0]) for b in DATA))[::2], FORM).n_states == 2


def test_an_empty_state():
    plan = replace(PLAN, caches=(), recurrent=None)
    form = model_form(plan, "cafe", n_vocab=8, n_embd=5)
    nothing = SavedOutputs(0, np.zeros(0, np.int32), np.zeros((0, 8), np.float32), False)
    empty = SavedState(
        single=True,
        sequences=(SavedSequence(np.zeros(0, np.int32), 0),),
        caches=(),
        states=(),
        n_states=0,
        outputs=nothing,
    )
    data = encode(empty, form)
    state = decode(data, form)
    assert (state.sequences[0].end, state.caches, state.states) == (0, (), ())
    assert header(data)["kv_types"] == []


def test_every_changed_byte_is_noticed():
    for i in range(len(DATA)):
        for flip in (1, 0x80, 0xFF):
            changed = bytearray(DATA)
            changed[i] ^= flip
            with pytest.raises(StateError) as error:
                decode(changed, FORM)
            assert "\n" not in str(error.value)


def test_every_truncation_is_noticed():
    for n in range(len(DATA)):
        with pytest.raises(StateError, match="not a state" if n < 8 else "cut off"):
            decode(DATA[:n], FORM)
    with pytest.raises(StateError, match="followed by something else"):
        decode(DATA + b"\0", FORM)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200), st.booleans())
def test_noise_is_no_state(noise, begins_alike):
    with pytest.raises(StateError):
        decode(DATA[:8] * begins_alike + noise, FORM)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(DATA) - 1), st.integers(1, 255)), min_size=1))
def test_random_flips_are_noticed(flips):
    changed = bytearray(DATA)
    for at, flip in flips:
        changed[at] ^= flip
    if bytes(changed) != DATA:
        with pytest.raises(StateError):
            decode(changed, FORM)


@pytest.mark.parametrize(
    ("data", "form", "message"),
    [
        (b"GGUF" + DATA[4:], FORM, "this is not a state that minfer-jax has saved"),
        (b"", FORM, "this is not a state"),
        (DATA[:8] + b"\1" + DATA[9:], FORM, "the state is of version 1; this program reads 2"),
        (DATA[:12] + b"\xff\xff\xff\xff" + DATA[16:], FORM, "a header of 4294967295 bytes"),
        (DATA, replace(FORM, digest="beef"), "the state was saved with another model"),
        (
            DATA,
            replace(FORM, cache=replace(SPEC, types=("f16", "f16"))),
            r"K and V of types \['f32', 'f16'\]; this context has \['f16', 'f16'\]",
        ),
    ],
)
def test_what_is_foreign_is_said_in_one_line(data, form, message):
    with pytest.raises(StateError, match=message) as error:
        decode(data, form)
    assert "\n" not in str(error.value)


def patched(path, value):
    """The header with one field changed."""
    fields = header()
    at = fields
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return fields


PATHS = [
    ("model",),
    ("kv_types",),
    ("single",),
    ("sequences",),
    ("sequences", 0),
    *(("sequences", 0, key) for key in ("end", "plain", "state", "last_row")),
    ("caches",),
    ("caches", 0),
    ("caches", 0, "layers"),
    ("caches", 0, "streams"),
    *(("caches", 0, "streams", 0, key) for key in ("n", "size", "head", "whole")),
    ("states",),
    ("outputs",),
    *(("outputs", key) for key in ("n_batch", "n", "width", "embeddings")),
]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(map(str, path)))
@pytest.mark.parametrize("value", [None, "x", -2, 1 << 70, 1.5, [], {}, [None], 200, True])
def test_a_wrong_field_is_refused_though_the_checksum_is_right(path, value):
    if (path[-1], value) in [("size", 200), ("n_batch", 200), ("plain", True), ("whole", True)]:
        return  # which it is, or could be
    with pytest.raises(StateError):
        decode(sealed(patched(path, value)), FORM)


def test_a_sealed_state_is_sound():
    assert decode(sealed(header()), FORM).n_states == 2


@pytest.mark.parametrize("text", [b"", b"[" * 100_000, b"\xff", b"1" * 5000, b"[]", b"{"])
def test_a_header_that_is_none(text):
    with pytest.raises(StateError, match="damaged"):
        decode(sealed(text), FORM)


def changed(**fields):
    return replace(STATE, **fields)


def cache(**fields):
    return changed(caches=(replace(CACHE, **fields),))


def stream(**fields):
    return cache(streams=(replace(CACHE.streams[0], **fields),))


def outputs(**fields):
    return changed(outputs=replace(OUTPUTS, **fields))


def first(**fields):
    return changed(sequences=(replace(STATE.sequences[0], **fields), *STATE.sequences[1:]))


@pytest.mark.parametrize(
    ("state", "what"),
    [
        (cache(cell=np.array([3, 4, 5, -1], np.int32)), "cells"),
        (cache(cell=np.array([3, 4, 5, 200], np.int32)), "cells"),
        (cache(cell=np.array([3, 4, 5, 3], np.int32)), "cells"),
        (cache(pos=np.array([-1, 1, 2, 2], np.int32)), "positions"),
        (cache(pos=np.array([0, 1, 2, 2**31 - 1], np.int32)), "positions"),
        (cache(pos=np.array([0, 1, 2, 3], np.int32)), "the end of a sequence"),
        (cache(mask=np.array([[5, 5, 1, 0]], np.uint32)), "the sequences of cells"),
        (cache(mask=np.array([[5, 5, 1, 12]], np.uint32)), "the sequences of cells"),
        (cache(mask=np.array([[5, 5, 1, 6]], np.uint32)), "the end of a sequence"),
        (cache(layers=(0, 1)), "its layers"),
        (stream(head=200), "head"),
        (stream(size=3, head=0), "n of"),
        (first(tokens=np.array([7, 0, 8], np.int32)), "tokens"),
        (first(tokens=np.array([7, 0, -1], np.int32)), "tokens"),
        (first(state=-1), "the recurrent state of a sequence"),
        (first(state=2), "state"),
        (first(last_row=6), "the last row of a sequence"),
        (first(tokens=None, end=4), "the end of a sequence"),
        (outputs(index=np.array([5, 2], np.int32)), "its outputs"),
        (outputs(index=np.array([2, 2], np.int32)), "its outputs"),
        (outputs(index=np.array([2, 6], np.int32)), "its outputs"),
        (outputs(index=np.array([-1, 5], np.int32)), "its outputs"),
        (outputs(embeddings=True), "its outputs"),
        (outputs(rows=np.zeros((2, 9), np.float32)), "its outputs"),
        (changed(single=True), "its number of sequences"),
        (changed(caches=(CACHE, CACHE)), "its layers"),
        (changed(caches=()), "its layers"),
    ],
)
def test_a_state_that_cannot_be_is_refused(state, what):
    with pytest.raises(StateError, match=f"damaged: {what}"):
        decode(encode(state, FORM), FORM)


def test_streams_hold_one_sequence_each():
    parts = [replace(CACHE.streams[0], n=n) for n in (1, 0, 3)]
    pos, good = np.array([2, 0, 1, 2], np.int32), [[1, 4, 4, 4]]
    split = replace(CACHE, streams=tuple(parts), pos=pos, mask=np.array(good, np.uint32))
    assert decode(encode(changed(caches=(split,)), FORM), FORM).caches[0].streams == tuple(parts)
    # Cells are counted from the beginning of their stream.
    twice = replace(split, cell=np.array([3, 3, 5, 8], np.int32))
    decode(encode(changed(caches=(twice,)), FORM), FORM)
    for bad in ([[4, 4, 4, 4]], [[1, 5, 4, 4]], [[1, 1, 4, 4]]):
        wrong = replace(split, mask=np.array(bad, np.uint32))
        with pytest.raises(StateError, match="the sequences of cells"):
            decode(encode(changed(caches=(wrong,)), FORM), FORM)
    with pytest.raises(StateError, match="the streams of a cache"):
        decode(encode(cache(streams=(parts[0], parts[2])), FORM), FORM)


def test_masks_of_more_sequences_than_a_word_has_bits():
    end = SavedSequence(None, 3, state=0)
    many = (end, *[SavedSequence(None, 0)] * 38, end)
    mask = np.zeros((2, 4), np.uint32)
    mask[0], mask[1] = [1, 1, 1, 0], [0, 0, 0, 1 << 7]
    state = changed(sequences=many, caches=(replace(CACHE, mask=mask),))
    got = decode(encode(state, FORM), FORM).caches[0]
    assert got.held(39).tolist() == [False, False, False, True]
    assert got.held(0).tolist() == [True, True, True, False]
    mask[1, 3] = 1 << 8
    with pytest.raises(StateError, match="the sequences of cells"):
        decode(encode(state, FORM), FORM)


# --- files --------------------------------------------------------------------------------------


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "state"
    write_file(path, b"old")
    write_file(str(path), b"new, and longer")
    assert read_file(path) == b"new, and longer"
    assert os.listdir(tmp_path) == ["state"]
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600  # what was said is private


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch, step):
    path = tmp_path / "state"
    write_file(path, b"old")

    def fail(*names):
        assert step == "fsync" or Path(names[0]).parent == tmp_path  # else it could be no rename
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"minfer_jax.memory.state_format.os.{step}", fail)
        with pytest.raises(StateError, match="could not be written: No space left on device"):
            write_file(path, b"new")
    assert read_file(path) == b"old"
    assert os.listdir(tmp_path) == ["state"]


def test_paths_that_cannot_be(tmp_path):
    gone = tmp_path / "no" / "state"
    with pytest.raises(StateError, match=r"no.state: the state could not be written: No such"):
        write_file(gone, b"")
    with pytest.raises(StateError, match=r"no.state: the state could not be read: No such"):
        read_file(gone)
    with pytest.raises(StateError, match="could not be read"):
        read_file(tmp_path)
    with pytest.raises(StateError, match="could not be written"):
        write_file(tmp_path, b"")
    for name in ("a\0b",):
        with pytest.raises(StateError, match="null"):
            read_file(tmp_path / name)
        with pytest.raises(StateError, match="null"):
            write_file(tmp_path / name, b"")
    assert os.listdir(tmp_path) == []
