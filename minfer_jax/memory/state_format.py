"""States as bytes: a header that says what there is, raw arrays, and a checksum over both.

Knows neither books nor regions. A state comes from anywhere: every number read from one is checked
before it is used, and what is wrong raises `StateError`.

    magic 8 | version u32 | size of header u32 | size of arrays u64 | header | arrays | checksum 32
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from minfer_jax.errors import StateError, UsageError
from minfer_jax.memory.plan import WORD, CacheSpec, MemoryPlan, RecurrentSpec

MAGIC = b"minfer\x9dS"
VERSION = 2
MAX_POSITION = (1 << 31) - 2

_PREFIX = struct.Struct("<8sIIQ")
_SUM_BYTES = 32
_MAX_HEADER = 1 << 20
_MAX_CELLS = 1 << 25
_MAX_SEQUENCES = 1 << 12
_MAX_ROWS = 1 << 24
_INT = np.dtype("<i4")
_MASK = np.dtype("<u4")
_FLOAT = np.dtype("<f4")

ArrayForm = tuple[tuple[int, ...], np.dtype]


@dataclass(frozen=True)
class ModelForm:
    """What a model and the types of its keys and values fix of a state."""

    digest: str
    """Of the model."""
    n_vocab: int
    n_embd: int
    cache: CacheSpec | None
    """Any of the model's caches: they differ in layers and cells only."""
    layers: tuple[int, ...]
    """Those that have keys and values, ascending."""
    recurrent: RecurrentSpec | None

    @property
    def kv_types(self) -> tuple[str, ...]:
        """None for a model without keys and values."""
        return self.cache.types if self.cache else ()

    def rows(self, n_layers: int, n: int) -> list[ArrayForm]:
        """Arrays that hold the keys and values of `n` cells: [heads, n, ...] each."""
        if self.cache is None:
            return []
        spec = replace(self.cache, layers=(0,) * n_layers, n_stream=1, stream_cells=n)
        return [(shape, _little(dtype)) for shape, dtype in spec.k_layout + spec.v_layout]

    def states(self, n: int) -> list[ArrayForm]:
        """Arrays that hold `n` recurrent states: float32 [layers, n, ...] each."""
        if self.recurrent is None:
            return []
        layers = len(self.recurrent.layers)
        return [((layers, n, *shape), _FLOAT) for shape in self.recurrent.shapes]


def model_form(plan: MemoryPlan, digest: str, *, n_vocab: int, n_embd: int) -> ModelForm:
    """The form of the states of a context with this plan."""
    layers = sorted(il for cache in plan.caches for il in cache.layers)
    cache = plan.caches[0] if plan.caches else None
    return ModelForm(digest, n_vocab, n_embd, cache, tuple(layers), plan.recurrent)


@dataclass(frozen=True)
class SavedStream:
    """How the cells of one stream lay."""

    n: int
    """Cells saved."""
    size: int
    """Cells that the stream had."""
    head: int
    """Where its search for empty cells began."""
    whole: bool
    """Whether no other cell of it was in use."""


@dataclass(frozen=True)
class SavedCache:
    """Tokens of one cache, stream by stream: N cells in all."""

    layers: tuple[int, ...]
    streams: tuple[SavedStream, ...]
    """One for all sequences, or one for each of them."""
    cell: np.ndarray
    """Of its stream: int32 [N]."""
    pos: np.ndarray
    """int32 [N]"""
    mask: np.ndarray
    """Sequences of each cell: uint32 [words, N], bit 32w + b of sequence 32w + b of the state."""
    rows: Iterable[np.ndarray]
    """Keys, then values: [heads, N, ...] each, as the regions have them. Read once to encode."""

    def held(self, seq: int) -> np.ndarray:
        """Which cells hold a token of a sequence of the state: bool [N]."""
        return (self.mask[seq // WORD] >> np.uint32(seq % WORD) & np.uint32(1)).astype(bool)


@dataclass(frozen=True)
class SavedSequence:
    """One sequence, beside its cells."""

    tokens: np.ndarray | None
    """int32 [end]; None if it is no plain list of tokens."""
    end: int
    """Its next position; 0: it is empty."""
    state: int = -1
    """Which of the recurrent states is its own."""
    last_row: int = -1
    """Row of the outputs' batch that is its last token; -1: none is."""


@dataclass(frozen=True)
class SavedOutputs:
    """What the last batch, of `n_batch` rows, has put out."""

    n_batch: int
    index: np.ndarray
    """Rows whose output there is: int32 [n], ascending."""
    rows: np.ndarray
    """Logits or embeddings: float32 [n, width]."""
    embeddings: bool


@dataclass(frozen=True)
class SavedState:
    """A whole context, or with `single` one sequence, which is number 0 of the state."""

    single: bool
    sequences: tuple[SavedSequence, ...]
    caches: tuple[SavedCache, ...]
    states: Iterable[np.ndarray]
    """Recurrent states: float32 [layers, k, ...] each. Read once to encode."""
    n_states: int
    outputs: SavedOutputs
    beside: Any = None
    """What its caller has put beside it: anything that JSON can hold."""


# --- writing ------------------------------------------------------------------------------------


def encode(state: SavedState, form: ModelForm) -> bytes:
    """The state as bytes."""
    header = _header(state, form)
    try:
        text = json.dumps(header, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"what is to be saved beside a state is no JSON: {error}") from error
    if len(text) > _MAX_HEADER:
        raise UsageError(f"what is to be saved beside a state has {len(text)} bytes: too many")
    forms = _forms(_Record(header, "header"), form)
    prefix = _PREFIX.pack(MAGIC, VERSION, len(text), sum(map(_nbytes, forms)))
    checksum = hashlib.blake2b(digest_size=_SUM_BYTES)
    out = BytesIO()  # whose value is handed out without a copy
    for part in (prefix, text):
        out.write(part)
        checksum.update(part)
    for array, (shape, dtype) in zip(_arrays(state), forms, strict=True):
        assert array.shape == shape, (array.shape, shape)
        flat = np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8).data
        out.write(flat)
        checksum.update(flat)
    out.write(checksum.digest())
    return out.getvalue()


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, or leave what was there as it is and raise `StateError`."""
    target = Path(path)
    try:
        with tempfile.NamedTemporaryFile(
            dir=target.parent, prefix=f".{target.name}.", suffix=".tmp", delete=False
        ) as out:
            try:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
                out.close()
                os.replace(out.name, target)
            except BaseException:
                out.close()
                with suppress(OSError):
                    os.unlink(out.name)
                raise
    except (OSError, ValueError) as error:  # the latter for a name with a NUL
        raise StateError(f"{target}: the state could not be written: {_reason(error)}") from error


def read_file(path: str | os.PathLike[str]) -> bytes:
    """The contents of a file; raises `StateError`."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise StateError(f"{path}: the state could not be read: {_reason(error)}") from error


def _reason(error: OSError | ValueError) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _header(state: SavedState, form: ModelForm) -> dict[str, Any]:
    outputs = state.outputs
    return {
        "model": form.digest,
        "kv_types": list(form.kv_types),
        "single": state.single,
        "sequences": [
            {
                "end": seq.end,
                "plain": seq.tokens is not None,
                "state": seq.state,
                "last_row": seq.last_row,
            }
            for seq in state.sequences
        ],
        "caches": [
            {
                "layers": list(cache.layers),
                "streams": [vars(stream) for stream in cache.streams],
            }
            for cache in state.caches
        ],
        "states": state.n_states,
        "outputs": {
            "n_batch": outputs.n_batch,
            "n": len(outputs.index),
            "width": outputs.rows.shape[1],
            "embeddings": outputs.embeddings,
        },
        "beside": state.beside,
    }


def _arrays(state: SavedState) -> Iterator[np.ndarray]:
    """All arrays, in the order of `_forms`."""
    for seq in state.sequences:
        if seq.tokens is not None:
            yield seq.tokens
    for cache in state.caches:
        yield cache.cell
        yield cache.pos
        yield cache.mask
        yield from cache.rows
    yield from state.states
    yield state.outputs.index
    yield state.outputs.rows


# --- reading ------------------------------------------------------------------------------------


def decode(data: bytes | bytearray | memoryview, form: ModelForm) -> SavedState:
    """The state in `data`, whose arrays are views of it. Raises `StateError`."""
    view = memoryview(data)
    view = (view if view.c_contiguous else memoryview(view.tobytes())).cast("B")
    header, arrays = _opened(view)
    record = _Record(header, "header")
    _check_identity(record, form)
    forms = _forms(record, form)
    if sum(map(_nbytes, forms)) != len(arrays):
        raise StateError("the state is damaged: its header speaks of other arrays than there are")
    return _checked(_assembled(record, form, _cut(arrays, forms)), form)


def _opened(view: memoryview) -> tuple[Any, memoryview]:
    """The header and the bytes of the arrays, checked as a whole."""
    if len(view) < len(MAGIC) or view[: len(MAGIC)] != MAGIC:
        raise StateError("this is not a state that minfer-jax has saved")
    if len(view) < _PREFIX.size:
        raise StateError(f"the state is cut off: it has {len(view)} bytes")
    _, version, n_header, n_arrays = _PREFIX.unpack(view[: _PREFIX.size])
    if version != VERSION:
        raise StateError(f"the state is of version {version}; this program reads {VERSION}")
    if n_header > _MAX_HEADER:
        raise StateError(f"the state is damaged: a header of {n_header} bytes")
    total = _PREFIX.size + n_header + n_arrays + _SUM_BYTES
    if len(view) != total:
        fault = "cut off" if len(view) < total else "followed by something else"
        raise StateError(f"the state is {fault}: it has {len(view)} bytes, expected {total}")
    checksum = hashlib.blake2b(view[:-_SUM_BYTES], digest_size=_SUM_BYTES)
    if checksum.digest() != view[-_SUM_BYTES:]:
        raise StateError("the state is damaged: its checksum does not fit")
    end = _PREFIX.size + n_header
    try:
        header = json.loads(bytes(view[_PREFIX.size : end]))
    except (ValueError, RecursionError) as error:
        raise StateError("the state is damaged: its header cannot be read") from error
    return header, view[end:-_SUM_BYTES]


def _check_identity(record: _Record, form: ModelForm) -> None:
    if record.get("model") != form.digest:
        raise StateError("the state was saved with another model")
    kinds = record.get("kv_types")
    if kinds != list(form.kv_types):
        raise StateError(
            f"the state was saved with K and V of types {str(kinds)[:40]}; this context has"
            f" {list(form.kv_types)}"
        )


class _Record:
    """A record of the header; each of its fields is checked when it is read."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise StateError(f"the state is damaged: {where} is no record")
        self._fields: dict[str, object] = value
        self._where = where

    def get(self, key: str) -> object:
        return self._fields.get(key)

    def int(self, key: str, low: int, high: int) -> int:
        return self._int(self.get(key), key, low, high)

    def _int(self, value: object, name: str, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise StateError(
                f"the state is damaged: {name} of {self._where} is not {low} to {high}"
            )
        return value

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise StateError(f"the state is damaged: {key} of {self._where} is not true or false")
        return value

    def record(self, key: str) -> _Record:
        return _Record(self.get(key), key)

    def ints(self, key: str, low: int, high: int) -> tuple[int, ...]:
        return tuple(self._int(value, key, low, high) for value in self._list(key, 1 << 16))

    def records(self, key: str, most: int) -> list[_Record]:
        return [_Record(value, f"{key}[{i}]") for i, value in enumerate(self._list(key, most))]

    def _list(self, key: str, most: int) -> list[object]:
        value = self.get(key)
        if not isinstance(value, list) or len(value) > most:
            raise StateError(f"the state is damaged: {key} of {self._where} is no list")
        return value


def _forms(record: _Record, form: ModelForm) -> list[ArrayForm]:
    """Shapes and types of all arrays that a header speaks of."""
    forms: list[ArrayForm] = []
    sequences = record.records("sequences", _MAX_SEQUENCES)
    for seq in sequences:
        if seq.flag("plain"):
            forms.append(((seq.int("end", 0, MAX_POSITION + 1),), _INT))
    words = math.ceil(len(sequences) / WORD)
    for cache in record.records("caches", 1 << 10):
        streams = cache.records("streams", _MAX_SEQUENCES)
        n = sum(stream.int("n", 0, _MAX_CELLS) for stream in streams)
        forms += [((n,), _INT), ((n,), _INT), ((words, n), _MASK)]
        forms += form.rows(len(cache.ints("layers", 0, 1 << 16)), n)
    forms += form.states(record.int("states", 0, _MAX_SEQUENCES))
    outputs = record.record("outputs")
    n, width = outputs.int("n", 0, _MAX_ROWS), outputs.int("width", 0, 1 << 24)
    return [*forms, ((n,), _INT), ((n, width), _FLOAT)]


def _cut(data: memoryview, forms: Sequence[ArrayForm]) -> Iterator[np.ndarray]:
    at = 0
    for shape, dtype in forms:
        n = math.prod(shape)
        yield np.frombuffer(data, dtype, count=n, offset=at).reshape(shape)
        at += n * dtype.itemsize


def _assembled(record: _Record, form: ModelForm, arrays: Iterator[np.ndarray]) -> SavedState:
    """The parts of a state, its arrays taken in the order of `_forms`."""
    n_states = record.int("states", 0, _MAX_SEQUENCES)
    sequences = tuple(
        SavedSequence(
            next(arrays) if seq.flag("plain") else None,
            seq.int("end", 0, MAX_POSITION + 1),
            seq.int("state", -1, n_states - 1),
            seq.int("last_row", -1, _MAX_ROWS),
        )
        for seq in record.records("sequences", _MAX_SEQUENCES)
    )
    caches = []
    for cache in record.records("caches", 1 << 10):
        layers = cache.ints("layers", 0, 1 << 16)
        streams = tuple(map(_stream, cache.records("streams", _MAX_SEQUENCES)))
        cell, pos, mask = next(arrays), next(arrays), next(arrays)
        rows = tuple(next(arrays) for _ in form.rows(0, 0))
        caches.append(SavedCache(layers, streams, cell, pos, mask, rows))
    states = tuple(next(arrays) for _ in form.states(0))
    outputs = record.record("outputs")
    n_batch, embeddings = outputs.int("n_batch", 0, _MAX_ROWS), outputs.flag("embeddings")
    saved = SavedOutputs(n_batch, next(arrays), next(arrays), embeddings)
    return SavedState(
        record.flag("single"),
        sequences,
        tuple(caches),
        states,
        n_states,
        saved,
        record.get("beside"),
    )


def _stream(record: _Record) -> SavedStream:
    size = record.int("size", 1, _MAX_CELLS)
    head = record.int("head", 0, size - 1)
    return SavedStream(record.int("n", 0, size), size, head, record.flag("whole"))


# --- what must be true of a state ---------------------------------------------------------------


def _checked(state: SavedState, form: ModelForm) -> SavedState:
    """`state`, of which everything can be used as it is."""
    n_seq = len(state.sequences)
    _require(n_seq == 1 if state.single else n_seq >= 1, "its number of sequences")
    layers = sorted(il for cache in state.caches for il in cache.layers)
    _require(tuple(layers) == form.layers, "its layers")
    for cache in state.caches:
        _check_cache(cache, n_seq)
    for number, seq in enumerate(state.sequences):
        _check_sequence(state, number, seq, form)
    outputs = state.outputs
    ascending = len(outputs.index) < 2 or bool((np.diff(outputs.index) > 0).all())
    width = form.n_embd if outputs.embeddings else form.n_vocab
    fits = outputs.rows.shape[1] == width and _within(outputs.index, outputs.n_batch)
    _require(ascending and fits, "its outputs")
    return state


def _check_cache(cache: SavedCache, n_seq: int) -> None:
    _require(len(cache.streams) in (1, n_seq) and bool(cache.layers), "the streams of a cache")
    known = _mask_of_all(n_seq)
    _require(_within(cache.pos, MAX_POSITION + 1), "positions")
    _require(bool(cache.mask.any(axis=0).all()), "the sequences of cells")
    _require(not (cache.mask & ~known).any(), "the sequences of cells")
    start = 0
    for number, stream in enumerate(cache.streams):
        part = slice(start, start + stream.n)
        cells = cache.cell[part]
        _require(_within(cells, stream.size), "cells")
        _require(len(np.unique(cells)) == stream.n, "cells")
        if len(cache.streams) > 1:
            _require(not _others(cache.mask[:, part], number), "the sequences of cells")
        start += stream.n


def _mask_of_all(n_seq: int) -> np.ndarray:
    """The mask of a cell of all sequences: uint32 [words, 1]."""
    left = [min(n_seq - start, WORD) for start in range(0, n_seq, WORD)]
    return np.array([[(1 << n) - 1] for n in left], np.uint32)


def _others(mask: np.ndarray, seq: int) -> bool:
    """Whether any cell belongs to another sequence."""
    rest = mask.copy()
    rest[seq // WORD] &= ~np.uint32(1 << seq % WORD)
    return bool(rest.any())


def _check_sequence(state: SavedState, number: int, seq: SavedSequence, form: ModelForm) -> None:
    for cache in state.caches:
        held = cache.pos[cache.held(number)]
        _require((int(held.max()) + 1 if len(held) else 0) == seq.end, "the end of a sequence")
    if form.recurrent:
        _require((seq.state >= 0) == (seq.end > 0), "the recurrent state of a sequence")
    if seq.tokens is not None:
        _require(_within(seq.tokens, form.n_vocab), "tokens")
    _require(seq.last_row < state.outputs.n_batch, "the last row of a sequence")


def _within(values: np.ndarray, bound: int) -> bool:
    """Whether all are at least 0 and below `bound`."""
    return not len(values) or (int(values.min()) >= 0 and int(values.max()) < bound)


def _require(true: bool, what: str) -> None:
    if not true:
        raise StateError(f"the state is damaged: {what} cannot be right")


def _nbytes(form: ArrayForm) -> int:
    return math.prod(form[0]) * form[1].itemsize


def _little(dtype: Any) -> np.dtype:
    return np.dtype(dtype).newbyteorder("<")
