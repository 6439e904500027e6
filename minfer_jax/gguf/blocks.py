"""Block formats: the stored bytes of a tensor -> separate planes -> float32 values.

`unpack` runs once, on the host, when a model is loaded; it changes no byte, so the
planes are as large as the file's data. `dequantize` is the arithmetic, written once for numpy
and for jax.numpy: broadcasted shifts and products that XLA fuses, no gather, no concatenation.
Must not import jax (the caller hands in its namespace), nor know where tensors come from.

Layouts and formulas are those of ggml (`ggml-common.h`, `dequantize_row_*` in `ggml-quants.c`).
Scales are float16 and quants have few bits, so every product of scale, sub-scale and quant fits
the 24 bits of a float32: at most one rounding happens, in the final add of formats with a
minimum. Results are therefore the same bits in any order, with or without fused multiply-adds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from minfer_jax.errors import GGUFError
from minfer_jax.gguf.types import GGMLType

Planes = Mapping[str, Any]

# Values per step of the host routine: the temporaries of one step stay in cache.
_STEP_VALUES = 1 << 18


@dataclass(frozen=True)
class BlockFormat:
    """One block format. `layout` is a block as a numpy record: a plane for each of its fields."""

    type: GGMLType
    block: int
    layout: np.dtype
    values: Callable[[Planes, Any], Any]

    @property
    def nbytes(self) -> int:
        """Bytes per block."""
        return self.layout.itemsize

    def unpack(self, raw: np.ndarray) -> dict[str, np.ndarray]:
        """uint8 [..., row_bytes] -> planes [..., n_blocks, *field shape]; [..., n_values] of F32,
        F16 and BF16, whose blocks are single values.

        The planes are strided views that hold exactly the bytes of `raw`: whoever keeps them
        copies them once, to where they are to stay.
        Raises GGUFError if a row is not a whole number of blocks.
        """
        if raw.dtype != np.uint8 or raw.ndim < 1 or raw.shape[-1] % self.nbytes:
            raise GGUFError(
                f"{self.type.name} rows of {raw.shape[-1:]} {raw.dtype.name}, allowed: a multiple"
                f" of {self.nbytes} uint8"
            )
        blocks = np.ascontiguousarray(raw).view(self.layout)
        names = self.layout.names or ()
        return {name: blocks[name] for name in names}

    def dequantize(self, planes: Planes, xp: Any) -> Any:
        """Planes [..., n_blocks, *field shape] -> float32 [..., n_blocks * block].

        `xp` is numpy or jax.numpy, whichever the planes belong to. Any leading axes will do: a
        whole matrix, rows gathered by index, several matrices.
        """
        # Damaged or hostile scales may be inf or NaN; that is the caller's to find, not a warning.
        with np.errstate(invalid="ignore", over="ignore"):
            out = self.values(planes, xp)
        if self.block == 1:
            return out
        *lead, n_blocks = planes["d"].shape
        return out.reshape((*lead, n_blocks * self.block))


def dequantize(raw: np.ndarray, type_: GGMLType, n_cols: int) -> np.ndarray:
    """uint8 of any shape, whole rows of `n_cols` values -> float32 [rows, n_cols], on the host.

    Raises GGUFError for a type without a block format and for bytes that are not whole rows.
    """
    fmt = BLOCK_FORMATS.get(type_)
    if fmt is None:
        known = " ".join(t.name for t in BLOCK_FORMATS)
        raise GGUFError(f"cannot dequantize {type_.name}, allowed: {known}")
    row_bytes = n_cols // fmt.block * fmt.nbytes
    if n_cols <= 0 or n_cols % fmt.block or raw.nbytes % row_bytes:
        raise GGUFError(f"{raw.nbytes} bytes are not whole {type_.name} rows of {n_cols} values")
    rows = np.ascontiguousarray(raw).view(np.uint8).reshape(-1, row_bytes)
    out = np.empty((len(rows), n_cols), np.float32)
    step = max(1, _STEP_VALUES // n_cols)
    for i in range(0, len(rows), step):
        out[i : i + step] = fmt.dequantize(fmt.unpack(rows[i : i + step]), np)
    return out


def _f32(x: Any) -> Any:
    return x.astype(np.float32)


def _shift(x: Any, *counts: int) -> Any:
    """[..., k] -> [..., len(counts), k]: x shifted right by each of the counts."""
    # Axes are spelled out: callers may forbid implicit rank promotion.
    by = np.array(counts, np.uint8).reshape((1,) * (x.ndim - 1) + (len(counts), 1))
    return x[..., None, :] >> by


def _nibbles(p: Planes) -> Any:
    """Blocks of 32: low nibbles are values 0-15, high nibbles 16-31 -> uint8 [..., 32]."""
    return (_shift(p["qs"], 0, 4) & 15).reshape((*p["d"].shape, 32))


def _five_bits(p: Planes) -> Any:
    """`_nibbles` with bit j of the 32-bit `qh` as the fifth bit of value j."""
    high = _shift(p["qh"][..., None], *range(8)) & 1  # [..., 4, 8, 1]
    return _nibbles(p) | (high.reshape((*p["d"].shape, 32)) << 4)


def _k_nibbles(p: Planes) -> Any:
    """Each 32 bytes of `qs` hold 32 values in low, the next 32 in high nibbles -> [..., 8, 32]."""
    qs = p["qs"].reshape((*p["d"].shape, 4, 32))
    return (_shift(qs, 0, 4) & 15).reshape((*p["d"].shape, 8, 32))


def _k_crumbs(p: Planes) -> Any:
    """Each 32 bytes of `qs` hold four runs of 32 two-bit values -> [..., 8, 32]."""
    qs = p["qs"].reshape((*p["d"].shape, 2, 32))
    return (_shift(qs, 0, 2, 4, 6) & 3).reshape((*p["d"].shape, 8, 32))


def _k_scales(p: Planes, xp: Any) -> tuple[Any, Any]:
    """Eight 6-bit sub-scales and eight 6-bit minima out of 12 bytes -> two uint8 [..., 8].

    Bytes 0-3 hold scales 0-3, bytes 4-7 minima 0-3 (6 bits each); their upper two bits and the
    nibbles of bytes 8-11 (low: scale, high: minimum) are scales and minima 4-7.
    """
    lead = p["d"].shape
    head = p["scales"][..., :8].reshape((*lead, 2, 1, 4))
    tail = (_shift(p["scales"][..., 8:], 0, 4) & 15).reshape((*lead, 2, 1, 4))
    first = np.array([True, False]).reshape((1,) * len(lead) + (1, 2, 1))
    # A select over both halves, not a concatenation: XLA fuses it into its consumer.
    both = xp.where(first, head & 63, tail | ((head >> 2) & 0x30)).reshape((*lead, 2, 8))
    return both[..., 0, :], both[..., 1, :]


def _scaled(d: Any, scales: Any, q: Any) -> Any:
    """d [...] times sub-scales [..., n] times values [..., n, m]."""
    return (_f32(d)[..., None] * _f32(scales))[..., None] * _f32(q)


def _minima(dmin: Any, minima: Any) -> Any:
    return (_f32(dmin)[..., None] * _f32(minima))[..., None]


def _f32_values(p: Planes, xp: Any) -> Any:
    return p["values"]


def _f16_values(p: Planes, xp: Any) -> Any:
    return _f32(p["values"])


def _bf16_values(p: Planes, xp: Any) -> Any:
    return (p["bits"].astype(np.uint32) << 16).view(np.float32)


def _q4_0_values(p: Planes, xp: Any) -> Any:
    return _f32(p["d"])[..., None] * (_f32(_nibbles(p)) - 8.0)


def _q4_1_values(p: Planes, xp: Any) -> Any:
    return _f32(p["d"])[..., None] * _f32(_nibbles(p)) + _f32(p["m"])[..., None]


def _q5_0_values(p: Planes, xp: Any) -> Any:
    return _f32(p["d"])[..., None] * (_f32(_five_bits(p)) - 16.0)


def _q5_1_values(p: Planes, xp: Any) -> Any:
    return _f32(p["d"])[..., None] * _f32(_five_bits(p)) + _f32(p["m"])[..., None]


def _q8_0_values(p: Planes, xp: Any) -> Any:
    return _f32(p["d"])[..., None] * _f32(p["qs"])


def _q2_k_values(p: Planes, xp: Any) -> Any:
    q = _k_crumbs(p).reshape((*p["d"].shape, 16, 16))
    low, high = p["scales"] & 15, p["scales"] >> 4
    return _scaled(p["d"], low, q) - _minima(p["dmin"], high)


def _q3_k_values(p: Planes, xp: Any) -> Any:
    lead = p["d"].shape
    # The third bit lies apart, and a *clear* bit subtracts 4.
    q = _k_crumbs(p) | ((_shift(p["hmask"], *range(8)) & 1) << 2)
    low = _shift(p["scales"][..., :8], 0, 4) & 15
    high = _shift(p["scales"][..., 8:], 0, 2, 4, 6) & 3
    scales = low.reshape((*lead, 16)) | (high.reshape((*lead, 16)) << 4)
    return _scaled(p["d"], _f32(scales) - 32.0, _f32(q.reshape((*lead, 16, 16))) - 4.0)


def _q4_k_values(p: Planes, xp: Any) -> Any:
    scales, minima = _k_scales(p, xp)
    return _scaled(p["d"], scales, _k_nibbles(p)) - _minima(p["dmin"], minima)


def _q5_k_values(p: Planes, xp: Any) -> Any:
    scales, minima = _k_scales(p, xp)
    q = _k_nibbles(p) | ((_shift(p["qh"], *range(8)) & 1) << 4)
    return _scaled(p["d"], scales, q) - _minima(p["dmin"], minima)


def _q6_k_values(p: Planes, xp: Any) -> Any:
    lead = p["d"].shape
    low = _shift(p["ql"].reshape((*lead, 2, 64)), 0, 4) & 15
    high = _shift(p["qh"].reshape((*lead, 2, 32)), 0, 2, 4, 6) & 3
    q = low.reshape((*lead, 16, 16)) | (high.reshape((*lead, 16, 16)) << 4)
    return _scaled(p["d"], p["scales"], _f32(q) - 32.0)


def _format(
    type_: GGMLType, block: int, values: Callable[[Planes, Any], Any], fields: str
) -> tuple[GGMLType, BlockFormat]:
    """`fields`: names with a numpy type and count, in the order of the bytes: "d:f2 qs:u1*16"."""
    parts = [field.replace("*", ":").split(":") for field in fields.split()]
    layout = np.dtype([(n, f"<{code}", *((int(c),) for c in count)) for n, code, *count in parts])
    return type_, BlockFormat(type_, block, layout, values)


BLOCK_FORMATS: dict[GGMLType, BlockFormat] = dict(
    [
        _format(GGMLType.F32, 1, _f32_values, "values:f4"),
        _format(GGMLType.F16, 1, _f16_values, "values:f2"),
        _format(GGMLType.BF16, 1, _bf16_values, "bits:u2"),
        _format(GGMLType.Q4_0, 32, _q4_0_values, "d:f2 qs:u1*16"),
        _format(GGMLType.Q4_1, 32, _q4_1_values, "d:f2 m:f2 qs:u1*16"),
        _format(GGMLType.Q5_0, 32, _q5_0_values, "d:f2 qh:u1*4 qs:u1*16"),
        _format(GGMLType.Q5_1, 32, _q5_1_values, "d:f2 m:f2 qh:u1*4 qs:u1*16"),
        _format(GGMLType.Q8_0, 32, _q8_0_values, "d:f2 qs:i1*32"),
        _format(GGMLType.Q2_K, 256, _q2_k_values, "scales:u1*16 qs:u1*64 d:f2 dmin:f2"),
        _format(GGMLType.Q3_K, 256, _q3_k_values, "hmask:u1*32 qs:u1*64 scales:u1*12 d:f2"),
        _format(GGMLType.Q4_K, 256, _q4_k_values, "d:f2 dmin:f2 scales:u1*12 qs:u1*128"),
        _format(GGMLType.Q5_K, 256, _q5_k_values, "d:f2 dmin:f2 scales:u1*12 qh:u1*32 qs:u1*128"),
        _format(GGMLType.Q6_K, 256, _q6_k_values, "ql:u1*128 qh:u1*64 scales:i1*16 d:f2"),
    ]
)
"""The formats with arithmetic; other types of GGMLType can be listed and copied, not computed."""
