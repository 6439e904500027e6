"""Programs over whole regions: copies, permutations, and keys that turn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.memory import regions
from minfer_jax.memory.plan import CacheSpec
from minfer_jax.memory.regions import (
    CellMove,
    copy_cells,
    permute_cells,
    put_cells,
    shift_keys,
    take_cells,
)
from minfer_jax.ops.kv_types import KV_TYPES
from minfer_jax.ops.rope_spec import RopeSpec

RNG = np.random.default_rng(3)
TYPES = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "q8_0": np.int8}
INTERLEAVED = RopeSpec(style="interleaved", n_rot=32)
HALF = RopeSpec(style="half", n_rot=24, freq_base=500.0)
YARN = RopeSpec(style="half", n_rot=32, yarn=True, freq_scale=0.25, n_ctx_orig=64, attn_factor=1.5)
STILL = RopeSpec(style="half", n_rot=0)


def spec(layers: int, n_cells: int, kind: str = "f32", *, width=32, d_v=32, v_in_k=False):
    return CacheSpec(
        layers=tuple(range(layers)),
        n_head_kv=2,
        head_dim_k=width,
        head_dim_v=d_v,
        v_in_k=v_in_k,
        types=(kind, kind),
        window=0,
        n_stream=1,
        stream_cells=n_cells,
        stream_size=n_cells,
        n_seq=1,
    )


def turned(rope: RopeSpec, x: np.ndarray, pos: np.ndarray, factors=None) -> np.ndarray:
    """Heads x [..., cells, d] at positions pos [cells], in float64 and complex numbers."""
    freq = rope.frequencies() / (1.0 if factors is None else factors)
    angle = np.exp(1j * pos[:, None] * freq)  # [cells, n_rot / 2]
    rot = x[..., : rope.n_rot].astype(np.float64)
    out = x.astype(np.float64).copy()
    if rope.style == "interleaved":
        z = (rot[..., 0::2] + 1j * rot[..., 1::2]) * angle
        out[..., 0 : rope.n_rot : 2], out[..., 1 : rope.n_rot : 2] = z.real, z.imag
    else:
        half = rope.n_rot // 2
        z = (rot[..., :half] + 1j * rot[..., half:]) * angle
        out[..., :half], out[..., half : rope.n_rot] = z.real, z.imag
    return out


def stored(kind: str, x: np.ndarray) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(a) for a in KV_TYPES[kind].encode(jnp.asarray(x, jnp.float32)))


def read(kind: str, arrays) -> np.ndarray:
    return np.array(KV_TYPES[kind].decode(tuple(jnp.asarray(a) for a in arrays)))


# --- copies and permutations --------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES)
def test_a_run_of_cells_is_copied_in_every_array(kind):
    x = RNG.integers(-100, 100, (4, 64, 32)).astype(TYPES[kind])
    y = RNG.normal(size=(4, 32, 1)).astype(np.float16)
    moves = [CellMove(16, 48, 16), CellMove(8, 0, 8)]
    new_x, new_y = copy_cells((jnp.asarray(x), jnp.asarray(y)), moves, [1, 1])
    x[:, 48:] = x[:, 16:32]
    y[:, :8] = y[:, 8:16]
    np.testing.assert_array_equal(new_x, x)
    np.testing.assert_array_equal(new_y, y)


def test_cells_are_permuted():
    x = RNG.normal(size=(4, 64, 32)).astype(np.float32)
    y = RNG.integers(0, 9, (4, 64, 1)).astype(np.uint8)
    order = RNG.permutation(64).astype(np.int32)
    new_x, new_y = permute_cells((jnp.asarray(x), jnp.asarray(y)), order)
    np.testing.assert_array_equal(new_x, x[:, order])
    np.testing.assert_array_equal(new_y, y[:, order])


def test_some_cells_are_read_and_written():
    x = RNG.normal(size=(4, 64, 32)).astype(np.float32)
    cells = np.array([5, 63, 0, 5], np.int32)
    np.testing.assert_array_equal(take_cells(jnp.asarray(x), cells), x[:, cells])
    rows = RNG.normal(size=(4, 3, 32)).astype(np.float32)
    (out,) = put_cells((jnp.asarray(x),), np.array([9, 64, 2], np.int32), (jnp.asarray(rows),))
    x[:, [9, 2]] = rows[:, [0, 2]]  # the one past the end is nowhere
    np.testing.assert_array_equal(out, x)


@pytest.mark.parametrize("program", ["copy", "permute", "shift", "put"])
def test_no_program_makes_a_second_region_that_lasts(program):
    """Outputs take the place of what is donated. A permutation needs a copy meanwhile, a shift the
    keys of a layer."""
    x = jax.ShapeDtypeStruct((4, 4096, 32), jnp.float32)
    nbytes = 4 * 4096 * 32 * 4
    whole = spec(2, 4096)
    lowered = {
        "copy": lambda: regions._copy.lower((x,), np.int32(0), np.int32(64), size=64),
        "permute": lambda: permute_cells.lower((x,), np.zeros(4096, np.int32)),
        "put": lambda: put_cells.lower(
            (x,), np.zeros(16, np.int32), (jax.ShapeDtypeStruct((4, 16, 32), jnp.float32),)
        ),
        "shift": lambda: shift_keys.lower(
            (x,), np.zeros(4096, np.int32), None, spec=whole, ropes=(HALF, HALF)
        ),
    }[program]()
    sizes = lowered.compile().memory_analysis()
    assert sizes.alias_size_in_bytes == nbytes
    extra = {"copy": 0, "put": 0, "permute": nbytes, "shift": nbytes // 2}[program]
    assert sizes.temp_size_in_bytes <= extra + (1 << 17)


def test_donated_regions_are_gone():
    x = jnp.zeros((4, 64, 32), jnp.float32)
    copy_cells((x,), [CellMove(0, 8, 8)], [1])
    assert x.is_deleted()


# --- keys that turn -----------------------------------------------------------------------------


@pytest.mark.parametrize("rope", [INTERLEAVED, HALF, YARN])
@pytest.mark.parametrize("n_cells", [256, 4096])
def test_turning_by_a_shift_is_a_rotation_to_the_new_position(rope, n_cells):
    """Each layer as it rotates, the third not at all; YaRN's magnitude is in the key already."""
    x = RNG.normal(size=(6, n_cells, 32)).astype(np.float32) * np.float32(rope.magnitude())
    pos = RNG.integers(0, 5000, n_cells)
    shift = RNG.integers(-500, 500, n_cells).astype(np.int32) * RNG.integers(0, 2, n_cells)
    shift = shift.astype(np.int32)
    ropes = (rope, INTERLEAVED, STILL)
    before = np.concatenate([turned(r, x[2 * i : 2 * i + 2], pos) for i, r in enumerate(ropes)])
    want = np.concatenate(
        [turned(r, x[2 * i : 2 * i + 2], pos + shift) for i, r in enumerate(ropes)]
    )
    keys = before.astype(np.float32)
    (out,) = shift_keys((jnp.asarray(keys),), shift, None, spec=spec(3, n_cells), ropes=ropes)
    np.testing.assert_allclose(out, want, atol=2e-4)
    np.testing.assert_array_equal(np.asarray(out)[:, shift == 0], keys[:, shift == 0])
    np.testing.assert_array_equal(np.asarray(out)[4:], keys[4:])


def test_factors_divide_the_frequencies():
    x = RNG.normal(size=(2, 256, 32)).astype(np.float32)
    factors = np.linspace(1, 8, 16).astype(np.float32)
    shift = RNG.integers(-50, 50, 256).astype(np.int32)
    args = (jnp.asarray(x),), shift, jnp.asarray(factors)
    (out,) = shift_keys(*args, spec=spec(1, 256), ropes=(INTERLEAVED,))
    np.testing.assert_allclose(out, turned(INTERLEAVED, x, shift, factors), atol=1e-4)


def test_k01_a_sum_of_shifts_is_one_rotation():
    x = RNG.normal(size=(2, 256, 32)).astype(np.float32)
    a, b = (RNG.integers(-50, 50, 256).astype(np.int32) for _ in range(2))
    cache = spec(1, 256)

    def shifted(keys, by):
        return shift_keys(keys, by, None, spec=cache, ropes=(HALF,))

    twice = shifted(shifted((jnp.asarray(x),), a), b)
    once = shifted((jnp.asarray(x),), a + b)
    np.testing.assert_allclose(twice[0], once[0], atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "error"), [("f16", 2e-3), ("bf16", 2e-2), ("q8_0", 2e-2), ("q4_0", 0.4)]
)
def test_k03_keys_of_every_type_turn_and_those_that_stay_keep_their_bits(kind, error):
    """`error`: half a step of the type at values around 3."""
    x = RNG.normal(size=(4, 256, 32)).astype(np.float32)
    shift = np.where(np.arange(256) % 3 == 0, 7, 0).astype(np.int32)
    shift[5] = -2
    before = stored(kind, x)
    copies = [np.asarray(a).copy() for a in before]
    want = read(kind, copies)
    out = shift_keys(before, shift, None, spec=spec(2, 256, kind), ropes=(HALF, INTERLEAVED))
    for i, rope in enumerate((HALF, INTERLEAVED)):
        heads = slice(2 * i, 2 * i + 2)
        want[heads] = turned(rope, want[heads], shift)
    assert len(out) == len(copies)
    for new, old in zip(out, copies, strict=True):
        assert new.dtype == old.dtype
        np.testing.assert_array_equal(np.asarray(new)[:, shift == 0], old[:, shift == 0])
    assert np.abs(read(kind, out) - want).max() < error
    assert np.abs(read(kind, out) - read(kind, copies))[:, shift != 0].max() > 2 * error


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_of_a_latent_key_only_what_is_behind_the_value_turns(kind):
    rope = RopeSpec(style="interleaved", n_rot=32)
    x = RNG.normal(size=(2, 256, 96)).astype(np.float32)
    shift = np.full(256, 3, np.int32)
    cache = spec(1, 256, kind, width=96, d_v=64, v_in_k=True)
    before = stored(kind, x)
    want = read(kind, [np.asarray(a).copy() for a in before])
    out = read(kind, shift_keys(before, shift, None, spec=cache, ropes=(rope,)))
    np.testing.assert_allclose(out[..., :64], want[..., :64], atol=1e-6)
    limit = 2e-2 if kind == "q8_0" else 1e-5
    np.testing.assert_allclose(out[..., 64:], turned(rope, want[..., 64:], shift), atol=limit)


@pytest.mark.parametrize("kind", ["f32", "q4_0"])
def test_the_trace_is_the_same_with_x64(kind):
    cache = spec(2, 256, kind)
    keys = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in cache.k_layout)

    def trace():
        args = (keys, jax.ShapeDtypeStruct((256,), jnp.int32), None)
        run = shift_keys.__wrapped__
        return str(jax.make_jaxpr(lambda *a: run(*a, spec=cache, ropes=(HALF, YARN)))(*args))

    plain = trace()
    with jax.enable_x64(True):
        assert trace() == plain
