"""The compiled library: sizes and bytes of tiles, variants, and when it is used at all."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np
import pytest

from minfer_jax.errors import UsageError
from minfer_jax.gguf import BLOCK_FORMATS, BLOCK_SIZES, GGMLType
from minfer_jax.models import packing
from minfer_jax.models.packing import WeightForm, weight_form
from minfer_jax.ops.cpu import library as module
from minfer_jax.ops.cpu.library import n_tiles

TYPES = [pytest.param(type_, id=type_.name) for type_ in BLOCK_FORMATS]
ONE_VARIANT = pytest.mark.parametrize("kernels", ["portable"], indirect=True)


@dataclass
class Device:
    platform: str
    id: int = 0
    device_kind: str = "a device"


CPU, GPU = Device("cpu"), Device("gpu")


def file_bytes(type_, n_out, n_in):
    block, nbytes = BLOCK_SIZES[type_]
    return n_out * n_in // block * nbytes


def packed(kernels, type_, n_in, *raws, pool=None):
    tiles = sum(n_tiles(len(raw)) for raw in raws)
    out = np.full(tiles * kernels.tile_bytes(type_, n_in), 0xAA, np.uint8)
    kernels.pack(raws, type_, n_in, out, pool)
    return out


def random_raw(type_, n_out, n_in, seed=0):
    shape = (n_out, file_bytes(type_, 1, n_in))
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


@ONE_VARIANT
@pytest.mark.parametrize("n_in", [256, 1536])
@pytest.mark.parametrize("type_", TYPES)
def test_tiles_are_at_most_a_tenth_larger_than_the_file(kernels, type_, n_in):
    size = kernels.tile_bytes(type_, n_in)
    assert file_bytes(type_, 16, n_in) <= size <= 1.1 * file_bytes(type_, 16, n_in)
    assert size % 64 == 0


@ONE_VARIANT
@pytest.mark.parametrize("type_", TYPES)
def test_sizes_that_have_no_tiles(kernels, type_):
    block = BLOCK_FORMATS[type_].block
    for n_in in (0, -block, *(() if block == 1 else (1, block - 1, block + 1))):
        assert kernels.tile_bytes(type_, n_in) == 0
    # More than 32 bits.
    assert kernels.tile_bytes(type_, 1 << 40) >= file_bytes(type_, 16, 1 << 40)


@ONE_VARIANT
def test_types_that_have_no_tiles(kernels):
    for type_ in set(GGMLType) - set(BLOCK_FORMATS):
        assert kernels.tile_bytes(type_, 1024) == 0


@ONE_VARIANT
def test_bytes_of_a_q4_0_block(kernels):
    """Float16 scales of 16 rows, up to 64 bytes; then four vectors of 16 rows by 4 bytes."""
    raw = np.zeros((5, 18), np.uint8)
    raw[3] = [0x34, 0x12, *range(0x40, 0x50)]
    tile = packed(kernels, GGMLType.Q4_0, 32, raw)
    expected = np.zeros(64 + 256, np.uint8)
    expected[6:8] = [0x34, 0x12]
    for vector in range(4):
        start = 64 + 64 * vector + 4 * 3
        expected[start : start + 4] = 0x40 + 4 * vector + np.arange(4)
    np.testing.assert_array_equal(tile, expected)


@ONE_VARIANT
def test_bytes_of_a_q8_0_block(kernels):
    """Eight vectors of 16 rows by 4 bytes, 128 added to every signed byte."""
    raw = np.zeros((16, 34), np.uint8)
    raw[9, :2] = [0x34, 0x12]
    raw[9, 2:] = np.arange(-16, 16, dtype=np.int8).view(np.uint8)
    tile = packed(kernels, GGMLType.Q8_0, 32, raw)
    scales, quants = np.zeros(32, np.uint8), np.full(512, 128, np.uint8)
    scales[18:20] = [0x34, 0x12]
    for vector in range(8):
        start = 64 * vector + 4 * 9
        quants[start : start + 4] = 128 - 16 + 4 * vector + np.arange(4)
    np.testing.assert_array_equal(tile[:32], scales)  # and 32 bytes that nobody reads
    np.testing.assert_array_equal(tile[64:], quants)


@ONE_VARIANT
def test_bytes_of_a_split_q8_0_block(kernels):
    """Upper five bits as in Q5_0; behind all such tiles the lower three, as in Q3_K's quants."""
    raw = np.zeros((20, 34), np.uint8)
    raw[:, 2:] = 128  # 0, once 128 is added
    raw[17, :2] = [0x34, 0x12]
    quants = np.arange(32, dtype=np.uint8) * 8 + np.arange(32, dtype=np.uint8) % 8
    raw[17, 2:] = quants ^ 128
    size = kernels.tile_bytes(GGMLType.Q8_0, 32, split=True)
    assert kernels.tile_parts(GGMLType.Q8_0, 32, split=True) == (64 + 320, 192)
    tiles = np.full(2 * size, 0xAA, np.uint8)
    kernels.pack([raw], GGMLType.Q8_0, 32, tiles, split=True)
    upper, lower = tiles[: 2 * 384].reshape(2, 384), tiles[2 * 384 :].reshape(2, 192)
    np.testing.assert_array_equal(upper[1, 2:4], [0x34, 0x12])
    assert not upper[0, 64:].any() and not lower[0].any()
    row = upper[1, 64:].reshape(5, 16, 4)[:, 1]
    nibbles = row[:4].reshape(16)
    high = np.arange(32) & 15  # bits 3 to 6 of the quants
    np.testing.assert_array_equal(nibbles, high[:16] | high[16:] << 4)
    np.testing.assert_array_equal(row[4], [0xF0] * 4)  # bit 7 of columns 4i + b, i from 4 on
    row = lower[1].reshape(3, 16, 4)[:, 1]
    # Columns 4i + b have b in their lower two bits, and bit 2 where i is odd.
    np.testing.assert_array_equal(row[:2], [[0b00000000, 0b01010101, 0b10101010, 0b11111111]] * 2)
    np.testing.assert_array_equal(row[2], [0b10101010] * 4)


@ONE_VARIANT
def test_bytes_of_float_rows_stand_column_by_column(kernels):
    raw = np.arange(16 * 3, dtype=np.float32).reshape(16, 3)
    tile = packed(kernels, GGMLType.F32, 3, raw.view(np.uint8))
    np.testing.assert_array_equal(tile.view(np.float32), raw.T.ravel())


@ONE_VARIANT
@pytest.mark.parametrize("type_", TYPES)
def test_every_part_begins_a_tile(kernels, type_):
    raws = [random_raw(type_, n_out, 256, seed=n_out) for n_out in (5, 16, 20)]
    apart = [packed(kernels, type_, 256, raw) for raw in raws]
    assert len(apart[2]) == 2 * len(apart[0])
    np.testing.assert_array_equal(packed(kernels, type_, 256, *raws), np.concatenate(apart))


@ONE_VARIANT
@pytest.mark.parametrize("type_", [GGMLType.Q8_0, GGMLType.Q4_K])
def test_what_several_threads_pack_is_what_one_packs(kernels, type_):
    raw = random_raw(type_, 2000, 1536)
    assert raw.nbytes > 4 * module._PACK_BYTES
    tiles = [packed(kernels, type_, 1536, raw[i : i + 16]) for i in range(0, 2000, 16)]
    with ThreadPoolExecutor(3) as pool:
        together = packed(kernels, type_, 1536, raw, pool=pool)
    np.testing.assert_array_equal(together, np.concatenate(tiles))


@ONE_VARIANT
def test_variants_that_do_not_run_here_are_refused(kernels):
    assert kernels.variants[-1] == "portable"
    for name in ("nonsense", "", "AVX2"):
        with pytest.raises(UsageError, match=f"kernels '{name}' do not run here.*portable"):
            kernels.use(name)


@ONE_VARIANT
def test_weights_are_tiled_for_kernels_that_run_here(kernels):
    for name in ("auto", *kernels.variants):
        assert weight_form(CPU, exact=False, kernels=name) is WeightForm.TILED


@ONE_VARIANT
def test_weights_are_not_tiled_for_what_the_kernels_cannot_do(kernels):
    for name in ("auto", "portable", "xla"):
        assert weight_form(CPU, exact=True, kernels=name) is WeightForm.UNROLLED
    assert weight_form(CPU, exact=False, kernels="xla") is WeightForm.UNROLLED
    for exact in (True, False):
        assert weight_form(GPU, exact=exact, kernels="auto") is WeightForm.PLANES


@ONE_VARIANT
@pytest.mark.parametrize("exact", [True, False])
def test_unknown_kernels_are_refused(kernels, exact):
    with pytest.raises(UsageError, match="MINFER_KERNELS is 'nonsense'; allowed here: auto,"):
        weight_form(CPU, exact=exact, kernels="nonsense")


@ONE_VARIANT
def test_auto_goes_back_to_the_best_variant(kernels, monkeypatch):
    used = []
    monkeypatch.setattr(module.Library, "use", lambda self, variant: used.append(variant))
    weight_form(CPU, exact=False, kernels="portable")
    weight_form(CPU, exact=False, kernels="auto")
    weight_form(CPU, exact=True, kernels="portable")  # which runs no kernel
    assert used == ["portable", kernels.variants[0]]


@ONE_VARIANT
def test_kernels_for_another_jaxlib_are_left_alone(kernels, monkeypatch):
    monkeypatch.setattr(packing, "register_targets", lambda: False)
    assert weight_form(CPU, exact=False, kernels="auto") is WeightForm.UNROLLED
    with pytest.raises(UsageError, match="built for another jaxlib"):
        weight_form(CPU, exact=False, kernels="portable")


@ONE_VARIANT
def test_a_handler_that_xla_refuses_registers_nothing(kernels, monkeypatch):
    def refuse(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("incompatible API version")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    assert module.register_targets.__wrapped__() is False


def test_without_the_library_xla_does_the_work(monkeypatch):
    monkeypatch.setattr(packing, "library", lambda: None)
    assert weight_form(CPU, exact=False, kernels="auto") is WeightForm.UNROLLED
    with pytest.raises(UsageError, match=r"MINFER_KERNELS is 'avx2'; allowed here: auto, xla$"):
        weight_form(CPU, exact=False, kernels="avx2")


def test_a_missing_or_broken_library_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "__file__", str(tmp_path / "library.py"))
    assert module.library.__wrapped__() is None
    for suffix in module.importlib.machinery.EXTENSION_SUFFIXES:
        (tmp_path / f"_kernels{suffix}").write_bytes(b"no library")
    assert module.library.__wrapped__() is None


@ONE_VARIANT
def test_a_library_from_other_sources_is_not_used(kernels, monkeypatch):
    assert kernels.dll.minfer_layout() == module.LAYOUT
    monkeypatch.setattr(module, "LAYOUT", module.LAYOUT + 1)
    assert module.library.__wrapped__() is None
    assert module.target("linear") != "minfer_linear_v1"


@ONE_VARIANT
def test_a_library_without_the_functions_is_none(kernels, monkeypatch):
    monkeypatch.setattr(module.ctypes, "CDLL", lambda path: object())
    assert module.library.__wrapped__() is None
