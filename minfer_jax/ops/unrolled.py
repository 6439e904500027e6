"""A packed weight laid out for products that XLA can vectorize by itself: output rows innermost.

XLA's CPU compiler emits scalar code for a reduction over dequantized values, whatever their order.
It does vectorize a plain elementwise expression along the last axis. So the last axis of every
plane is the output row, and the 16 values that share a scale are written out as 16 multiply-adds:

    file:   row 0: block 0, block 1 ...     here:   values 0: row 0, row 1, row 2 ...
            row 1: block 0, block 1 ...             values 1: row 0, row 1, row 2 ...

The remaining sum over groups of 16 is a product with a row of ones, which XLA leaves to its
matrix kernels. Everything is float32: activations are not quantized. For machines without native
kernels; knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from minfer_jax.gguf import BLOCK_FORMATS, GGMLType

GROUP = 16
"""Values of one row that are summed in registers: no format has more scales than one a group."""
PARTIAL_BYTES = 1 << 22
"""Sums of groups held at once in a product with one row. They should stay in cache, and temporary
memory of 32 MiB or more is given back to the system after every call."""
CHUNK = 1 << 18
"""Weights dequantized at a time where several rows share them, as in `ops.linear`."""

_LINE = 64  # bytes of a cache line
_PADDED_ROWS = 1024  # from here on, distances between values are worth choosing
_STEP_VALUES = 1 << 18  # values packed at a time on the host: the temporaries stay in cache
_STEP_ROWS = 128  # but no fewer rows than that

Planes = Mapping[str, Any]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["planes"],
    meta_fields=["type", "shape", "start"],
)
@dataclass(frozen=True)
class UnrolledTensor:
    """A matrix [out, in]: the rows `start` to `start + out` of planes made by `pack`.

    `planes` is data; `type`, `shape` and `start` are static.
    """

    planes: dict[str, Array]
    type: GGMLType
    shape: tuple[int, int]
    start: int = 0

    def rows(self, start: int, stop: int) -> UnrolledTensor:
        """The rows start..stop, as a view."""
        return UnrolledTensor(
            self.planes, self.type, (stop - start, self.shape[1]), self.start + start
        )

    def dynamic_rows(self, start: Array, n: int) -> UnrolledTensor:
        """The `n` rows from a traced `start` on, which must not lie past the end."""
        at = start + np.int32(self.start)
        planes = {k: lax.dynamic_slice_in_dim(p, at, n, p.ndim - 1) for k, p in self.planes.items()}
        return UnrolledTensor(planes, self.type, (n, self.shape[1]))

    def take(self, ids: Array) -> Array:
        """Rows `ids` int32 [n], dequantized: float32 [n, in]. The caller has checked the ids."""
        at = ids + np.int32(self.start)
        planes = {k: jnp.take(p, at, axis=-1, mode="clip") for k, p in self.planes.items()}
        return self._dequantize(planes).T

    def matmul(self, x: Array) -> Array:
        """x float32 [n, in] times this matrix transposed: float32 [n, out]."""
        return self._one_row(x) if x.shape[0] == 1 else self._many_rows(x)

    def _one_row(self, x: Array) -> Array:
        n_groups = -(-self.shape[1] // GROUP)
        groups = _padded(x, n_groups * GROUP).reshape(n_groups, GROUP)
        columns: list[Array] = []
        for start, stop in self._ranges(PARTIAL_BYTES // 4 // n_groups):
            if columns:
                groups = _after(groups, columns[-1])
            columns.append(self._columns(groups, start, stop))
        return columns[0] if len(columns) == 1 else jnp.concatenate(columns, axis=1)

    def _columns(self, groups: Array, start: int, stop: int) -> Array:
        """groups [n_groups, 16] times the rows start..stop of the planes: float32 [1, rows]."""
        planes = {k: p[..., start:stop] for k, p in self.planes.items()}
        layout = _LAYOUTS[self.type]
        shape = (groups.shape[0], stop - start)

        def spread(column: Array) -> Array:
            return lax.broadcast_in_dim(column, shape, (0,))

        sums = layout.value(planes, 0) * spread(groups[:, 0])
        for j in range(1, GROUP):
            sums = sums + layout.value(planes, j) * spread(groups[:, j])
        scale, shift = layout.affine(planes, shape[0])
        if scale is not None:
            sums = sums * scale
        if shift is not None:
            sums = sums + shift * spread(jnp.sum(groups, axis=1))
        # Not a sum over axis 0: that XLA would merge with the above, and emit as scalar code.
        ones = jnp.ones((1, shape[0]), np.float32)
        return jnp.matmul(ones, sums, precision=lax.Precision.HIGHEST)

    def _many_rows(self, x: Array) -> Array:
        n_out, n_in = self.shape
        rows = max(1, CHUNK // n_in)
        rows = rows // _LINE * _LINE or rows

        def product(start: Any, n: int) -> Array:
            planes = {
                k: lax.dynamic_slice_in_dim(p, start, n, p.ndim - 1) for k, p in self.planes.items()
            }
            return jnp.matmul(x, self._dequantize(planes), precision=lax.Precision.HIGHEST)

        if n_out <= rows:
            return product(np.int32(self.start), n_out)

        def step(i: Array, y: Array) -> Array:
            # The last chunk is moved up to end with the matrix; it writes some columns twice.
            at = jnp.minimum(i * np.int32(rows), np.int32(n_out - rows))
            part = product(at + np.int32(self.start), rows)
            return lax.dynamic_update_slice(y, part, (jnp.zeros_like(at), at))

        # As in `ops.linear`: what every column overwrites has to depend on x.
        y = lax.pad(x[:, :1], np.float32(0.0), ((0, 0, 0), (0, n_out - 1, 0)))
        return lax.fori_loop(jnp.int32(0), jnp.int32(-(-n_out // rows)), step, y)

    def _dequantize(self, planes: Planes) -> Array:
        """Planes of any n rows -> float32 [in, n], transposed."""
        layout = _LAYOUTS[self.type]
        values = layout.values(planes)  # [n_groups, 16, n]
        scale, shift = layout.affine(planes, values.shape[0])
        if scale is not None:
            values = values * scale[:, None]
        if shift is not None:
            values = values + shift[:, None]
        return values.reshape(-1, values.shape[-1])[: self.shape[1]]

    def _ranges(self, at_most: int) -> list[tuple[int, int]]:
        """This tensor's rows of the planes, in equal parts of about `at_most` rows."""
        n_out = self.shape[0]
        parts = -(-n_out // max(_LINE, at_most))
        step = -(-n_out // parts // _LINE) * _LINE
        bounds = [*range(0, n_out, step), n_out]
        return [(self.start + a, self.start + b) for a, b in pairwise(bounds)]


def pack(
    raws: list[np.ndarray],
    type_: GGMLType,
    new: Callable[[tuple[int, ...], np.dtype[Any]], np.ndarray] = np.zeros,
) -> dict[str, np.ndarray]:
    """Tensors' bytes, uint8 [rows, row_bytes] each, one below the other -> planes [..., rows],
    arrays that `new` makes of a shape and a type.

    Planes are as large as the bytes, but for the scales of Q3_K (1.04 times in all), Q4_K and Q5_K
    (1.03), and unused rows at the end: fewer than 128, where there are 1024 or more.
    """
    fmt, layout = BLOCK_FORMATS[type_], _LAYOUTS[type_]
    n_rows = sum(len(raw) for raw in raws)
    out: dict[str, np.ndarray] = {}
    done = 0
    for raw in raws:
        n_in = raw.shape[1] // fmt.nbytes * fmt.block
        step = max(_STEP_ROWS, _STEP_VALUES // n_in)
        for i in range(0, len(raw), step):
            part = raw[i : i + step]
            # Rows are last from here on: long inner loops for numpy.
            blocks = {k: _rows_last(plane) for k, plane in fmt.unpack(part).items()}
            stop = done + len(part)
            for name, plane in layout.pack(blocks).items():
                if name not in out:
                    out[name] = new((*plane.shape[:-1], _stride(n_rows)), plane.dtype)
                out[name][..., done:stop] = plane
            done = stop
    return out


def _rows_last(plane: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(plane, 0, -1))


def _stride(n_rows: int) -> int:
    """Rows to make room for. An odd number of cache lines lies between a value and the next one:
    by a power of two, the 16 values of a group would compete for the same place in cache."""
    return n_rows if n_rows < _PADDED_ROWS else (-(-n_rows // _LINE) | 1) * _LINE


def _after(x: Array, y: Array) -> Array:
    """x, made to depend on y [1, n], so that their computations can share temporary memory.

    XLA orders independent work as it likes, and takes optimization barriers out before it does.
    """
    bits = lax.population_count(lax.bitcast_convert_type(y[0, 0], np.int32))
    return x + lax.min(bits, np.int32(0)).astype(np.float32)  # zero, but XLA does not know


def _padded(x: Array, n: int) -> Array:
    """x [rows, in] with zeros appended up to n."""
    return x if x.shape[1] == n else jnp.pad(x, ((0, 0), (0, n - x.shape[1])))


@dataclass(frozen=True)
class _Layout:
    """How values of one type are stored in planes [n_groups, k, rows].

    `pack` makes them out of a block format's planes, rows last; `value` reads the j-th of each
    group, float32 [n_groups, rows], and `values` all 16 of them. A weight is a value times
    `affine`'s first plus its second, both float32 [n_groups, rows] or None.
    """

    pack: Callable[[Planes], dict[str, np.ndarray]]
    value: Callable[[Planes, int], Array]
    values: Callable[[Planes], Array]
    affine: Callable[[Planes, int], tuple[Array | None, Array | None]]


# Values that are stored whole: `values` [n_groups, 16, rows].


def _whole(name: str, read: Callable[[Array], Array], scaled: bool = False) -> _Layout:
    def pack(p: Planes) -> dict[str, np.ndarray]:
        values = _joined(p[name])
        values = np.pad(values, ((0, -len(values) % GROUP), (0, 0)))
        out = {"values": values.reshape(-1, GROUP, values.shape[-1])}
        return out | {"d": p["d"]} if scaled else out

    return _Layout(
        pack,
        lambda p, j: read(p["values"][:, j]),
        lambda p: read(p["values"]),
        partial(_affine, 0) if scaled else lambda p, n: (None, None),
    )


def _f32(x: Array) -> Array:
    return x.astype(np.float32)


def _bf16(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits.astype(np.uint32) << np.uint32(16), np.float32)


# Codes of 2 to 6 bits: `low` holds 2 or 4 of them, `high` the others.


def _coded(
    low: int,
    high: int,
    offset: int,
    codes: Callable[[Planes], Any],
    scales: Callable[[Planes], Any],
) -> _Layout:
    """`codes`: a block format's planes -> uint8 [..., rows]; `scales`: planes as `_affine` reads
    them; `offset` is subtracted from every code."""

    def pack(p: Planes) -> dict[str, np.ndarray]:
        all_bits = codes(p).reshape(-1, GROUP, p["d"].shape[-1])
        out = {"low": _squeeze(all_bits & np.uint8((1 << low) - 1), low)}
        if high:
            out["high"] = _squeeze(all_bits >> np.uint8(low), high)
        return out | scales(p)

    def value(p: Planes, j: int) -> Array:
        code = _field(p["low"], low, j)
        return _f32(code | (_field(p["high"], high, j) << np.uint8(low)) if high else code)

    def values(p: Planes) -> Array:
        code = _fields(p["low"], low)
        return _f32(code | (_fields(p["high"], high) << np.uint8(low)) if high else code)

    return _Layout(pack, value, values, partial(_affine, offset))


def _squeeze(codes: np.ndarray, bits: int) -> np.ndarray:
    """[n, 16, rows] of `bits` bits -> [n, 2 * bits, rows]: code j is in byte j % (2 * bits)."""
    first, *others = np.split(codes, 8 // bits, axis=1)
    out = first.copy()
    for i, more in enumerate(others, 1):
        out |= more << np.uint8(bits * i)
    return out


def _field(plane: Array, bits: int, j: int) -> Array:
    """Code j of each group of `_squeeze`'s plane: uint8 [n_groups, rows]."""
    shift, byte = divmod(j, 2 * bits)
    x = plane[:, byte]
    if shift:
        x = x >> np.uint8(shift * bits)
    return x if (shift + 1) * bits == 8 else x & np.uint8((1 << bits) - 1)


def _fields(plane: Array, bits: int) -> Array:
    """All codes: uint8 [n_groups, 16, rows]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, -1, 1, 1)
    x = (plane[:, None] >> shifts) & np.uint8((1 << bits) - 1)
    return x.reshape(plane.shape[0], GROUP, plane.shape[-1])


def _affine(offset: int, p: Planes, n_groups: int) -> tuple[Array, Array | None]:
    """Scale and shift of each group, from planes [n, rows] that hold one for several groups.

    All products of a float16 and small integers are exact in float32, so a weight is rounded once.
    """

    def spread(plane: Array) -> Array:
        n, rows = plane.shape
        wide = lax.broadcast_in_dim(_f32(plane), (n, n_groups // n, rows), (0, 2))
        return wide.reshape(n_groups, rows)

    scale = spread(p["d"])
    if "pairs" in p:  # scale in the low, minimum in the high nibble
        scale, minimum = scale * spread(p["pairs"] & np.uint8(15)), p["pairs"] >> np.uint8(4)
        return scale, -spread(p["dmin"]) * spread(minimum)
    if "scale" in p:
        scale = scale * spread(p["scale"])
    if "m" in p:
        return scale, spread(p["m"])
    if "minimum" in p:
        return scale, -spread(p["dmin"]) * spread(p["minimum"])
    return scale, scale * np.float32(-offset) if offset else None


# The file's block formats (see `gguf.blocks`), read on the host: planes [n_blocks, ..., rows].


def _split(x: np.ndarray, *shifts: int) -> np.ndarray:
    """[..., k, rows] -> [..., len(shifts), k, rows]: x shifted right by each."""
    return x[..., None, :, :] >> np.array(shifts, np.uint8)[:, None, None]


def _nibbles(p: Planes) -> np.ndarray:
    return _split(p["qs"], 0, 4) & 15


def _five_bits(p: Planes) -> np.ndarray:
    high = _split(p["qh"][:, :, None], *range(8)) & 1  # [n_blocks, 4, 8, 1, rows]
    nibbles = _nibbles(p)
    return nibbles | high.reshape(nibbles.shape) << 4


def _k_runs(x: np.ndarray, run: int, *shifts: int) -> np.ndarray:
    """Each `run` bytes hold len(shifts) runs of as many values -> [n_blocks, 8, 32, rows]."""
    n_blocks, k, rows = x.shape
    runs = _split(x.reshape(n_blocks, k // run, run, rows), *shifts)
    return runs.reshape(n_blocks, 8, 32, rows)


def _q3_k_codes(p: Planes) -> np.ndarray:
    high = _split(p["hmask"], *range(8)) & 1
    return _k_runs(p["qs"], 32, 0, 2, 4, 6) & 3 | high << 2


def _q5_k_codes(p: Planes) -> np.ndarray:
    high = _split(p["qh"], *range(8)) & 1
    return _k_runs(p["qs"], 32, 0, 4) & 15 | high << 4


def _q6_k_codes(p: Planes) -> np.ndarray:
    return _k_runs(p["ql"], 64, 0, 4) & 15 | (_k_runs(p["qh"], 32, 0, 2, 4, 6) & 3) << 4


def _keep(*names: str) -> Callable[[Planes], dict[str, np.ndarray]]:
    return lambda p: {name: p[name] for name in names}


def _q2_k_scales(p: Planes) -> dict[str, np.ndarray]:
    return {"d": p["d"], "dmin": p["dmin"], "pairs": _joined(p["scales"])}


def _q3_k_scales(p: Planes) -> dict[str, np.ndarray]:
    low = _split(p["scales"][:, :8], 0, 4) & 15
    high = _split(p["scales"][:, 8:], 0, 2, 4, 6) & 3
    scale = low.reshape(len(low), 16, -1) | high.reshape(len(low), 16, -1) << 4
    return {"d": p["d"], "scale": _joined(scale).astype(np.int8) - np.int8(32)}


def _k_scales(p: Planes) -> dict[str, np.ndarray]:
    """Scales and minima of 6 bits, eight each: see `gguf.blocks`."""
    first, second, last = np.split(p["scales"], 3, axis=1)
    scale = np.concatenate([first & 63, last & 15 | first >> 6 << 4], axis=1)
    minimum = np.concatenate([second & 63, last >> 4 | second >> 6 << 4], axis=1)
    small = {"scale": _joined(scale), "minimum": _joined(minimum)}
    return {"d": p["d"], "dmin": p["dmin"]} | small


def _q6_k_scales(p: Planes) -> dict[str, np.ndarray]:
    return {"d": p["d"], "scale": _joined(p["scales"])}


def _joined(x: np.ndarray) -> np.ndarray:
    """[n_blocks, ..., rows] -> [values, rows]."""
    return x.reshape(-1, x.shape[-1])


_LAYOUTS: dict[GGMLType, _Layout] = {
    GGMLType.F32: _whole("values", lambda x: x),
    GGMLType.F16: _whole("values", _f32),
    GGMLType.BF16: _whole("bits", _bf16),
    GGMLType.Q8_0: _whole("qs", _f32, scaled=True),
    GGMLType.Q4_0: _coded(4, 0, 8, _nibbles, _keep("d")),
    GGMLType.Q4_1: _coded(4, 0, 0, _nibbles, _keep("d", "m")),
    GGMLType.Q5_0: _coded(4, 1, 16, _five_bits, _keep("d")),
    GGMLType.Q5_1: _coded(4, 1, 0, _five_bits, _keep("d", "m")),
    GGMLType.Q2_K: _coded(2, 0, 0, lambda p: _k_runs(p["qs"], 32, 0, 2, 4, 6) & 3, _q2_k_scales),
    GGMLType.Q3_K: _coded(2, 1, 4, _q3_k_codes, _q3_k_scales),
    GGMLType.Q4_K: _coded(4, 0, 0, lambda p: _k_runs(p["qs"], 32, 0, 4) & 15, _k_scales),
    GGMLType.Q5_K: _coded(4, 1, 0, _q5_k_codes, _k_scales),
    GGMLType.Q6_K: _coded(4, 2, 32, _q6_k_codes, _q6_k_scales),
}
