"""The native attention against float64: each row's own softmax over its own run of cells.

K and V come back in the regions, so two things are judged apart: what was stored, against the
norm and rotation in float64; and the output, against a softmax over what was stored.
"""

import re
from dataclasses import dataclass, field, replace
from functools import cache, partial

import jax
import numpy as np
import pytest

from minfer_jax.ops.cpu.tiled import attend

N_CELLS = 512
N_LAYER = 3
CLOSE = 1e-5  # outputs are averages of normal numbers


@dataclass(frozen=True)
class Shape:
    """What is static in a call."""

    h: int = 6
    h_kv: int = 2
    d_k: int = 16
    d_v: int = 16
    n_rot: int = 16
    interleaved: bool = False
    norms: bool = False
    window: int = 0
    cap: float = 0.0
    scale: float = 0.4
    k_type: type = np.float16
    v_type: type = np.float16
    n_cells: int = N_CELLS
    layer: int = 1

    @property
    def static(self):
        return {
            "layer": self.layer,
            "n_head": self.h,
            "n_head_kv": self.h_kv,
            "interleaved": self.interleaved,
            "eps": 0.01,
            "scale": self.scale,
            "window": self.window,
            "cap": self.cap,
        }

    @property
    def heads(self):
        """Those of the layer within a region."""
        return slice(self.layer * self.h_kv, (self.layer + 1) * self.h_kv)


SHAPES = {
    "plain": Shape(),
    "smollm2": Shape(h=9, h_kv=3, d_k=64, d_v=64, n_rot=64, interleaved=True, scale=0.125),
    "one head": Shape(h=1, h_kv=1, d_k=6, d_v=20, n_rot=4, k_type=np.float32),
    "window": Shape(h=4, h_kv=1, d_k=20, d_v=6, n_rot=20, norms=True, window=5, v_type=np.float32),
    "cap": Shape(h=7, h_kv=1, d_k=80, d_v=64, n_rot=32, cap=1.5, scale=0.5, interleaved=True),
    "floats": Shape(h=2, h_kv=2, d_k=64, d_v=80, n_rot=64, k_type=np.float32, v_type=np.float32),
    "all": Shape(h=10, h_kv=2, d_k=24, d_v=33, n_rot=10, norms=True, window=100, cap=3.0),
    "no rotation": Shape(h=5, h_kv=5, n_rot=0, window=1),
}


@dataclass
class Case:
    """The arrays of a call. `runs` are cell, first and last of every row."""

    shape: Shape
    runs: np.ndarray
    seed: int = 0
    qkv: np.ndarray = field(init=False)
    rope: tuple[np.ndarray, ...] = field(init=False)
    norms: tuple[np.ndarray, ...] = field(init=False)
    k: np.ndarray = field(init=False)
    v: np.ndarray = field(init=False)

    def __post_init__(self):
        s, rng, n = self.shape, np.random.default_rng(self.seed), len(self.runs)
        normal = partial(random_floats, rng)
        self.qkv = normal(n, s.h * s.d_k + s.h_kv * (s.d_k + s.d_v))
        angle = rng.uniform(0, 7, (n, s.n_rot // 2))
        self.rope = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        self.norms = (normal(s.d_k), normal(s.d_k)) if s.norms else ()
        self.k = normal(N_LAYER * s.h_kv, s.n_cells, s.d_k).astype(s.k_type)
        self.v = normal(N_LAYER * s.h_kv, s.n_cells, s.d_v).astype(s.v_type)

    def cut(self, rows):
        """The same call with some of its rows."""
        other = Case(self.shape, self.runs[rows])
        other.qkv, other.norms, other.k, other.v = self.qkv[rows], self.norms, self.k, self.v
        other.rope = self.rope[0][rows], self.rope[1][rows]
        return other

    def run(self):
        """Output [n, h, d_v] and the regions."""
        call = compiled(self.shape)
        cell, first, last = self.runs.T.astype(np.int32)
        out, k, v = call(self.qkv, self.rope, (cell, first, last), (self.k, self.v), self.norms)
        assert out.dtype == np.float32
        shape = (len(self.runs), self.shape.h, self.shape.d_v)
        return np.asarray(out).reshape(shape), np.asarray(k), np.asarray(v)

    def seen(self):
        """Which cells each row sees: bool [n, n_cells]."""
        _, first, last = self.runs.T[..., None]
        cells = np.arange(self.shape.n_cells)[None]
        if self.shape.window:
            first = np.maximum(first, last - self.shape.window + 1)
        return (cells >= first) & (cells <= last)


def random_floats(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


@cache
def compiled(shape, donate=()):
    return jax.jit(partial(attend, **shape.static), donate_argnums=donate)


def heads(case):
    """Queries [n, h, d_k] and keys [n, h_kv, d_k], normed, rotated, and values, all float64."""
    s, n = case.shape, len(case.runs)
    q, k, v = np.split(case.qkv.astype(np.float64), [s.h * s.d_k, (s.h + s.h_kv) * s.d_k], axis=1)
    q, k = q.reshape(n, s.h, s.d_k), k.reshape(n, s.h_kv, s.d_k)
    if case.norms:
        q, k = (
            x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + s.static["eps"]) * weight
            for x, weight in zip((q, k), case.norms, strict=True)
        )
    return rotated(case, q), rotated(case, k), v.reshape(n, s.h_kv, s.d_v)


def rotated(case, x):
    s, (cosine, sine) = case.shape, case.rope
    turn = (cosine.astype(np.float64) + 1j * sine)[:, None, :]
    half = s.n_rot // 2
    even = slice(0, s.n_rot, 2) if s.interleaved else slice(0, half)
    odd = slice(1, s.n_rot, 2) if s.interleaved else slice(half, s.n_rot)
    z = (x[..., even] + 1j * x[..., odd]) * turn
    out = x.copy()
    out[..., even], out[..., odd] = z.real, z.imag
    return out


def reference(case, k, v):
    """Float64 [n, h, d_v] of the rows over regions; zeros for a row that sees no cell."""
    s = case.shape
    q = heads(case)[0]
    k, v = k[s.heads].astype(np.float64), v[s.heads].astype(np.float64)
    out = np.zeros((len(q), s.h, s.d_v))
    for i, seen in enumerate(case.seen()):
        for head in range(s.h if seen.any() else 0):
            kv = head // (s.h // s.h_kv)
            scores = k[kv, seen] @ q[i, head] * s.scale
            if s.cap:
                scores = s.cap * np.tanh(scores / s.cap)
            p = np.exp(scores - scores.max())
            out[i, head] = p / p.sum() @ v[kv, seen]
    return out


def bits(x):
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def check_stored(case, k, v):
    """Rows lie in their cells as the region's type has them; all other cells keep their bits."""
    s, cell = case.shape, case.runs[:, 0]
    real = (cell >= 0) & (cell < s.n_cells)
    _, keys, values = heads(case)
    expected = values[real].swapaxes(0, 1).astype(s.v_type)
    np.testing.assert_array_equal(v[s.heads, cell[real]], expected)
    stored, expected = k[s.heads, cell[real]].astype(np.float64), keys[real].swapaxes(0, 1)
    assert k.dtype == s.k_type and v.dtype == s.v_type
    # Half a unit of the region's last place, and the rounding of the norm and the rotation.
    unit = np.spacing(np.abs(expected).astype(s.k_type)).astype(np.float64)
    assert np.all(
        np.abs(stored - expected) <= 0.5001 * unit + 4e-7 * np.abs(keys[real]).max(initial=0.0)
    )
    others = np.ones(k.shape[:2], bool)
    others[s.heads, cell[real]] = False
    np.testing.assert_array_equal(bits(k)[others], bits(case.k)[others])
    np.testing.assert_array_equal(bits(v)[others], bits(case.v)[others])


def check(case, tolerance=CLOSE):
    out, k, v = case.run()
    check_stored(case, k, v)
    expected = reference(case, k, v)
    assert np.abs(out - expected).max(initial=0.0) < tolerance
    seen = case.seen().any(axis=1)
    np.testing.assert_array_equal(out[~seen], 0.0)
    return out


def sequence(n, start, first=0, padding=0, n_cells=N_CELLS):
    """`n` rows in one sequence that begins at cell `first` and has come to cell `start`."""
    runs = np.empty((n + padding, 3), np.int64)
    runs[:] = (n_cells, 0, -1)
    cells = np.arange(start, start + n)
    runs[:n, 0], runs[:n, 1], runs[:n, 2] = cells, first, cells
    return runs


def spoil_unseen(case):
    """What no row sees is garbage that must not be read, and must stay."""
    unseen = np.ones(case.k.shape[:2], bool)
    unseen[case.shape.heads] = ~case.seen().any(axis=0)
    case.k[unseen], case.v[unseen] = np.nan, np.inf


@pytest.mark.parametrize(
    ("n", "start", "first", "padding"),
    [
        (1, 0, 0, 0),
        (1, 300, 7, 0),
        (2, 41, 0, 0),
        (5, 150, 20, 3),
        (33, 100, 3, 7),
        (130, 190, 9, 0),
    ],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_sequence_goes_on(kernels, shape, n, start, first, padding):
    case = Case(SHAPES[shape], sequence(n, start, first, padding))
    case.qkv[n:] = np.nan  # of padding rows
    spoil_unseen(case)
    check(case)


def test_rows_of_several_sequences_see_their_own_cells(kernels):
    """Runs that begin and end on, before and after the edges of blocks and chunks of cells."""
    spans = [(0, 0), (1, 63), (64, 64), (65, 190), (191, 191), (192, 319), (320, 450), (511, 511)]
    runs = np.array([(last, first, last) for first, last in spans])
    for copies in (1, 3):  # few rows, and many
        many = np.repeat(runs, copies, axis=0)
        many[np.arange(len(many)) % copies != 0, 0] = N_CELLS  # the copies write nothing
        for name in ("plain", "all", "window"):
            case = Case(SHAPES[name], many)
            spoil_unseen(case)  # between the cells of two rows, too
            check(case)


@pytest.mark.parametrize("n", [1, 17])
def test_every_layer_has_heads_of_its_own(kernels, n):
    for layer in range(N_LAYER):
        case = Case(replace(SHAPES["smollm2"], layer=layer), sequence(n, 50))
        spoil_unseen(case)
        check(case)


def test_a_layer_that_the_regions_do_not_have_is_refused(kernels):
    with pytest.raises(jax.errors.JaxRuntimeError, match="past the end of a region"):
        Case(replace(SHAPES["plain"], layer=N_LAYER), sequence(1, 50)).run()


@pytest.mark.parametrize("n", [3, 20])
def test_nothing_but_padding(kernels, n):
    case = Case(SHAPES["plain"], sequence(0, 0, padding=n))
    case.k[:], case.v[:], case.qkv[:] = np.nan, np.nan, np.nan
    np.testing.assert_array_equal(check(case), 0.0)


@pytest.mark.parametrize("cell", [-1, -N_CELLS, N_CELLS, N_CELLS + 1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("n", [1, 17])
def test_a_cell_outside_the_region_is_not_written(kernels, n, cell):
    runs = sequence(n, 50)
    runs[:, 0] = cell
    check(Case(SHAPES["plain"], runs))


@pytest.mark.parametrize("n", [1, 17])
def test_runs_that_reach_outside_the_region_end_at_its_edges(kernels, n):
    runs = np.tile([7, -5, N_CELLS + 9], (n, 1))
    runs[1:, 0] = N_CELLS
    case = Case(SHAPES["plain"], runs)
    out, k, v = case.run()
    inside = case.cut(slice(None))
    inside.runs = np.tile([N_CELLS, 0, N_CELLS - 1], (n, 1))
    assert np.abs(out - reference(inside, k, v)).max() < CLOSE


@pytest.mark.parametrize("n", [1, 17])
def test_a_single_cell_gives_its_value(kernels, n):
    case = Case(SHAPES["plain"], sequence(n, 100))
    case.runs[:, 1] = case.runs[:, 2]
    out, _, v = case.run()
    stored = v[case.shape.heads, 100 : 100 + n]
    expected = np.repeat(stored.swapaxes(0, 1).astype(np.float32), 3, axis=1)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("n", [1, 40])
def test_large_scores_do_not_overflow(kernels, n):
    case = Case(replace(SHAPES["floats"], scale=1000.0), sequence(n, 300))
    out, k, v = case.run()
    np.testing.assert_allclose(out, reference(case, k, v), atol=2e-2)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("n", [2, 16])
def test_a_bad_row_harms_no_row_before_it(kernels, n):
    """NaN in the last row, whose K and V that row alone sees."""
    case = Case(SHAPES["plain"], sequence(n, 100))
    good = case.run()[0]
    case.qkv[-1] = np.nan
    out = case.run()[0]
    assert np.isnan(out[-1]).all()
    np.testing.assert_array_equal(out[:-1], good[:-1])


def test_queries_of_a_bad_row_harm_no_other_row(kernels):
    for n in (5, 40):
        case = Case(SHAPES["plain"], sequence(n, 100))
        good = case.run()[0]
        case.qkv[2, : 6 * 16] = np.nan
        out = case.run()[0]
        assert np.isnan(out[2]).all()
        others = np.arange(n) != 2
        np.testing.assert_array_equal(out[others], good[others])


@pytest.mark.parametrize("shape", ["smollm2", "all", "one head"])
def test_a_row_has_the_same_bits_in_any_small_company(kernels, shape):
    case = Case(SHAPES[shape], sequence(16, 400, 3))
    _, case.k, case.v = case.run()  # now all rows are stored
    together = case.run()[0]
    for rows in ([0], [15], [3, 4], [0, 5, 15], list(range(2, 11))):
        np.testing.assert_array_equal(case.cut(rows).run()[0], together[rows])


@pytest.mark.parametrize("shape", ["smollm2", "all", "one head"])
def test_decode_gives_what_prefill_does(kernels, shape):
    case = Case(SHAPES[shape], sequence(33, 400, 3))
    together, case.k, case.v = case.run()
    for row in (0, 16, 32):
        np.testing.assert_allclose(case.cut([row]).run()[0], together[[row]], atol=1e-5)


@pytest.mark.parametrize("kernels", ["portable"], indirect=True)
@pytest.mark.parametrize("n", [1, 33])
@pytest.mark.parametrize("shape", SHAPES)
def test_variants_agree(kernels, shape, n):
    case = Case(SHAPES[shape], sequence(n, 200))
    plain = case.run()
    for variant in kernels.variants:
        kernels.use(variant)
        out, k, v = case.run()
        np.testing.assert_allclose(out, plain[0], atol=1e-3)  # where a stored K rounds apart
        np.testing.assert_allclose(k, plain[1], rtol=1e-3, atol=1e-6)
        np.testing.assert_array_equal(v, plain[2])


@pytest.mark.parametrize("n", [1, 33])
def test_float16_rounds_to_the_nearest_even(kernels, n):
    """Values out of which every kind of rounding comes: ties, subnormals, the largest, infinity."""
    shape = Shape(h=1, h_kv=1, d_k=16, d_v=20, n_rot=0)
    case = Case(shape, sequence(n, 100))
    ties = 1 + np.arange(16) / np.float32(2**11)  # between neighbours, every second one
    small = [2.0**-24, 2.0**-25, 1.5 * 2.0**-24, 2.5 * 2.0**-24, 2.0**-14, 2.0**-26, 1e-40, -0.0]
    large = [65504, 65519, 65520, -65520, 1e10, 6e-8, 3.0, -(2.0**-25) * 1.001]
    case.qkv[0, 16:32] = ties
    case.qkv[0, 32:48] = [*small, *large]
    _, k, v = case.run()
    with np.errstate(over="ignore", under="ignore"):
        expected_v = case.qkv[0, 32:].astype(np.float16)
    np.testing.assert_array_equal(bits(k)[1, 100], bits(case.qkv[0, 16:32].astype(np.float16)))
    np.testing.assert_array_equal(bits(v)[1, 100], bits(expected_v))


def on_device(case):
    """Regions that can be donated: the device's own, not the host's."""
    return tuple(jax.numpy.array(x) for x in (case.k, case.v))


@pytest.mark.parametrize("n", [1, 33])
def test_donated_regions_are_updated_in_place(kernels, n):
    case = Case(SHAPES["smollm2"], sequence(n, 100))
    expected = case.run()
    cell, first, last = case.runs.T.astype(np.int32)
    regions = on_device(case)
    pointers = [region.unsafe_buffer_pointer() for region in regions]
    call = compiled(case.shape, donate=(3,))
    out, *after = call(case.qkv, case.rope, (cell, first, last), regions, case.norms)
    assert [region.unsafe_buffer_pointer() for region in after] == pointers
    assert all(region.is_deleted() for region in regions)
    np.testing.assert_array_equal(np.asarray(out).ravel(), expected[0].ravel())
    for region, same in zip(after, expected[1:], strict=True):
        np.testing.assert_array_equal(region, same)


@pytest.mark.parametrize("kernels", ["portable"], indirect=True)
def test_regions_that_are_not_donated_keep_their_bits(kernels):
    case = Case(SHAPES["smollm2"], sequence(3, 100))
    cell, first, last = case.runs.T.astype(np.int32)
    regions = on_device(case)
    compiled(case.shape)(case.qkv, case.rope, (cell, first, last), regions, case.norms)
    np.testing.assert_array_equal(bits(np.asarray(regions[0])), bits(case.k))
    np.testing.assert_array_equal(bits(np.asarray(regions[1])), bits(case.v))


@pytest.mark.parametrize("kernels", ["portable"], indirect=True)
@pytest.mark.parametrize("n", [1, 33])
def test_a_call_makes_nothing_as_long_as_the_region(kernels, n):
    temp = []
    for n_cells in (512, 8192):
        case = Case(replace(SHAPES["smollm2"], n_cells=n_cells), sequence(n, 100))
        cell, first, last = case.runs.T.astype(np.int32)
        args = (case.qkv, case.rope, (cell, first, last), (case.k, case.v), case.norms)
        executable = compiled(case.shape, donate=(3,)).lower(*args).compile()
        text = executable.as_text() or ""
        assert f",{n_cells}," in text and not re.search(rf",{n_cells},\S* (copy|convert)", text)
        analysis = executable.memory_analysis()
        assert analysis is not None
        assert analysis.alias_size_in_bytes == case.k.nbytes + case.v.nbytes
        temp.append(analysis.temp_size_in_bytes)
    assert temp[0] == temp[1]
