"""The native attention against float64: each row's own softmax over the cells that it sees.

K and V come back in the regions, so two things are judged apart: what was stored, against the
norm and rotation in float64; and the output, against a softmax over what was stored.
"""

import re
from dataclasses import dataclass, field, replace
from functools import cache, partial

import jax
import numpy as np
import pytest
from kv_values import awkward

from minfer_jax.ops.cpu.tiled import attend
from minfer_jax.ops.kv_types import KV_TYPES

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
    k_type: str = "f16"
    v_type: str = "f16"
    n_cells: int = N_CELLS
    layer: int = 1

    @property
    def static(self):
        return {
            "kv_types": (self.k_type, self.v_type),
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
    "one head": Shape(h=1, h_kv=1, d_k=6, d_v=20, n_rot=4, k_type="f32"),
    "window": Shape(h=4, h_kv=1, d_k=20, d_v=6, n_rot=20, norms=True, window=5, v_type="f32"),
    "cap": Shape(h=7, h_kv=1, d_k=80, d_v=64, n_rot=32, cap=1.5, scale=0.5, interleaved=True),
    "floats": Shape(h=2, h_kv=2, d_k=64, d_v=80, n_rot=64, k_type="f32", v_type="f32"),
    "all": Shape(h=10, h_kv=2, d_k=24, d_v=33, n_rot=10, norms=True, window=100, cap=3.0),
    "no rotation": Shape(h=5, h_kv=5, n_rot=0, window=1),
}


@dataclass
class Case:
    """The arrays of a call. `runs` are cell, first and last of every row.

    With a map, `pos` and `seq` are those of the rows, and the map says of every cell at which
    position it is and to which sequences it belongs.
    """

    shape: Shape
    runs: np.ndarray
    seed: int = 0
    qkv: np.ndarray = field(init=False)
    rope: tuple[np.ndarray, ...] = field(init=False)
    norms: tuple[np.ndarray, ...] = field(init=False)
    k: tuple[np.ndarray, ...] = field(init=False)
    v: tuple[np.ndarray, ...] = field(init=False)
    pos: np.ndarray | None = None
    seq: np.ndarray | None = None
    map: "CellMap | None" = None

    def __post_init__(self):
        s, rng, n = self.shape, np.random.default_rng(self.seed), len(self.runs)
        normal = partial(random_floats, rng)
        self.qkv = normal(n, s.h * s.d_k + s.h_kv * (s.d_k + s.d_v))
        angle = rng.uniform(0, 7, (n, s.n_rot // 2))
        self.rope = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        self.norms = (normal(s.d_k), normal(s.d_k)) if s.norms else ()
        self.k = encoded(s.k_type, normal(N_LAYER * s.h_kv, s.n_cells, s.d_k))
        self.v = encoded(s.v_type, normal(N_LAYER * s.h_kv, s.n_cells, s.d_v))

    def cut(self, rows):
        """The same call with some of its rows."""
        other = Case(self.shape, self.runs[rows])
        other.qkv, other.norms, other.k, other.v = self.qkv[rows], self.norms, self.k, self.v
        other.rope = self.rope[0][rows], self.rope[1][rows]
        if self.map is not None:
            other.pos, other.seq, other.map = self.pos[rows], self.seq[rows], self.map
        return other

    @property
    def args(self):
        return (
            self.qkv,
            self.rope,
            tuple(self.runs.T.astype(np.int32)),
            (self.k, self.v),
            self.norms,
        )

    @property
    def mapped(self):
        if self.map is None:
            return None
        return self.pos.astype(np.int32), self.seq.astype(np.int32), self.map.array()

    def run(self):
        """Output [n, h, d_v] and the arrays of the regions."""
        out, k, v = compiled(self.shape)(*self.args, mapped=self.mapped)
        assert out.dtype == np.float32
        shape = (len(self.runs), self.shape.h, self.shape.d_v)
        return np.asarray(out).reshape(shape), tuple(map(np.asarray, k)), tuple(map(np.asarray, v))

    def seen(self):
        """Which cells each row sees: bool [n, n_cells]."""
        _, first, last = self.runs.T[..., None]
        cells = np.arange(self.shape.n_cells)[None]
        window = self.shape.window
        if self.map is None:
            first = np.maximum(first, last - window + 1) if window else first
            return (cells >= first) & (cells <= last)
        seen = np.zeros((len(self.runs), self.shape.n_cells), bool)
        for i, (_, first, last) in enumerate(self.runs):
            for cell, (pos, seqs) in self.map.cells.items():
                near = pos <= self.pos[i] and (not window or self.pos[i] - pos < window)
                seen[i, cell] = first <= cell <= last and near and self.seq[i] in seqs
        return seen


@dataclass
class CellMap:
    """Position and sequences of the cells in use."""

    n_cells: int
    words: int = 1
    cells: dict[int, tuple[int, set[int]]] = field(default_factory=dict)

    def array(self):
        """As the kernel gets it: int32 [1 + words, n_cells]."""
        out = np.zeros((1 + self.words, self.n_cells), np.uint32)
        out[0] = 0xFFFFFFFF
        for cell, (pos, seqs) in self.cells.items():
            out[0, cell] = pos
            for seq in seqs:
                out[1 + seq // 32, cell] |= np.uint32(1 << seq % 32)
        return out.view(np.int32)


@cache
def codec(kind):
    return jax.jit(KV_TYPES[kind].encode), jax.jit(KV_TYPES[kind].decode)


def encoded(kind, x):
    """As it is stored, in arrays that can be changed."""
    return tuple(np.array(plane) for plane in codec(kind)[0](np.asarray(x, np.float32)))


def decoded(kind, arrays):
    """Float64 values of what is stored."""
    return np.asarray(codec(kind)[1](arrays)).astype(np.float64)


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
    k, v = decoded(s.k_type, k)[s.heads], decoded(s.v_type, v)[s.heads]
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
    return x.view(np.dtype(f"u{x.dtype.itemsize}"))


def slack(kind, x):
    """How far from x [..., d] what is stored may be: float64."""
    if kind in ("f32", "f16"):
        limit = np.finfo(KV_TYPES[kind].planes[0][1]).max
        unit = np.spacing(np.abs(x).clip(max=limit).astype(KV_TYPES[kind].planes[0][1]))
        return 0.5001 * unit.astype(np.float64)
    if kind == "bf16":
        return np.abs(x) * 0.5001 * 2.0**-7
    blocks = np.abs(x.reshape(*x.shape[:-1], -1, 32)).max(axis=-1).repeat(32, axis=-1)
    return blocks * (0.501 / 127 + 2.0**-11 if kind == "q8_0" else 1.001 / 8)


def check_stored(case, k, v):
    """Rows lie in their cells as the region's type has them; all other cells keep their bits."""
    s, cell = case.shape, case.runs[:, 0]
    real = (cell >= 0) & (cell < s.n_cells)
    _, keys, values = heads(case)
    for plane, expected in zip(v, encoded(s.v_type, values[real].swapaxes(0, 1)), strict=True):
        np.testing.assert_array_equal(plane[s.heads, cell[real]], expected)
    stored, expected = decoded(s.k_type, k)[s.heads, cell[real]], keys[real].swapaxes(0, 1)
    # The rounding of the type, and that of the norm and the rotation.
    near = slack(s.k_type, expected) + 4e-7 * np.abs(keys[real]).max(initial=0.0)
    assert np.all(np.abs(stored - expected) <= near)
    others = np.ones((N_LAYER * s.h_kv, s.n_cells), bool)
    others[s.heads, cell[real]] = False
    for after, before in zip((*k, *v), (*case.k, *case.v), strict=True):
        assert after.dtype == before.dtype
        np.testing.assert_array_equal(bits(after)[others], bits(before)[others])


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
    unseen = np.ones(case.k[0].shape[:2], bool)
    unseen[case.shape.heads] = ~case.seen().any(axis=0)
    for planes, garbage in ((case.k, np.nan), (case.v, np.inf)):
        spoil(planes[-1], unseen, garbage)  # of quantized types that is the scales


def spoil(plane, where, garbage):
    if plane.dtype == np.uint16:  # bfloat16
        garbage = 0x7FC0 if np.isnan(garbage) else 0x7F80
    plane[where] = garbage


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
    case.k[0][:], case.v[0][:], case.qkv[:] = np.nan, np.nan, np.nan
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
    stored = decoded("f16", v)[case.shape.heads, 100 : 100 + n]
    expected = np.repeat(stored.swapaxes(0, 1), 3, axis=1)
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
        np.testing.assert_allclose(k[0], plain[1][0], rtol=1e-3, atol=1e-6)
        np.testing.assert_array_equal(v[0], plain[2][0])


@pytest.mark.parametrize("n", [1, 33])
def test_float16_rounds_to_the_nearest_even(kernels, n):
    """Values out of which every kind of rounding comes: ties, subnormals, the largest. Larger ones
    become that: an infinity in one row's values could reach other rows."""
    shape = Shape(h=1, h_kv=1, d_k=16, d_v=20, n_rot=0)
    case = Case(shape, sequence(n, 100))
    ties = 1 + np.arange(16) / np.float32(2**11)  # between neighbours, every second one
    small = [2.0**-24, 2.0**-25, 1.5 * 2.0**-24, 2.5 * 2.0**-24, 2.0**-14, 2.0**-26, 1e-40, -0.0]
    large = [65504, 65519, 65520, -65520, np.inf, 6e-8, 3.0, -(2.0**-25) * 1.001]
    case.qkv[0, 16:32] = ties
    case.qkv[0, 32:48] = [*small, *large]
    _, k, v = case.run()
    with np.errstate(under="ignore"):
        expected_v = case.qkv[0, 32:].clip(-65504, 65504).astype(np.float16)
    np.testing.assert_array_equal(bits(k[0])[1, 100], bits(case.qkv[0, 16:32].astype(np.float16)))
    np.testing.assert_array_equal(bits(v[0])[1, 100], bits(expected_v))


def on_device(case):
    """Regions that can be donated: the device's own, not the host's."""
    return jax.tree.map(jax.numpy.array, (case.k, case.v))


@pytest.mark.parametrize("kind", KV_TYPES)
@pytest.mark.parametrize("n", [1, 33])
def test_donated_regions_are_updated_in_place(kernels, n, kind):
    case = Case(replace(SHAPES["smollm2"], k_type=kind), sequence(n, 100))
    expected = case.run()
    qkv, rope, rows, _, norms = case.args
    regions = on_device(case)
    pointers = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(regions)]
    out, *after = compiled(case.shape, donate=(3,))(qkv, rope, rows, regions, norms)
    assert [array.unsafe_buffer_pointer() for array in jax.tree.leaves(after)] == pointers
    assert all(array.is_deleted() for array in jax.tree.leaves(regions))
    np.testing.assert_array_equal(np.asarray(out).ravel(), expected[0].ravel())
    for array, same in zip(jax.tree.leaves(after), (*expected[1], *expected[2]), strict=True):
        np.testing.assert_array_equal(array, same)


@pytest.mark.parametrize("kernels", ["portable"], indirect=True)
def test_regions_that_are_not_donated_keep_their_bits(kernels):
    case = Case(SHAPES["smollm2"], sequence(3, 100))
    qkv, rope, rows, _, norms = case.args
    regions = on_device(case)
    compiled(case.shape)(qkv, rope, rows, regions, norms)
    for array, same in zip(jax.tree.leaves(regions), (*case.k, *case.v), strict=True):
        np.testing.assert_array_equal(bits(np.asarray(array)), bits(same))


@pytest.mark.parametrize("kernels", ["portable"], indirect=True)
@pytest.mark.parametrize("kinds", [("f16", "f16"), ("q8_0", "q4_0")])
@pytest.mark.parametrize("n", [1, 33])
def test_a_call_makes_nothing_as_long_as_the_region(kernels, n, kinds):
    temp = []
    for n_cells in (512, 8192):
        types = dict(zip(("k_type", "v_type"), kinds, strict=True))
        case = Case(replace(SHAPES["smollm2"], n_cells=n_cells, **types), sequence(n, 100))
        executable = compiled(case.shape, donate=(3,)).lower(*case.args).compile()
        text = executable.as_text() or ""
        assert f",{n_cells}," in text and not re.search(rf",{n_cells},\S* (copy|convert)", text)
        analysis = executable.memory_analysis()
        assert analysis is not None
        assert analysis.alias_size_in_bytes == sum(x.nbytes for x in (*case.k, *case.v))
        temp.append(analysis.temp_size_in_bytes)
    assert temp[0] == temp[1]


# Rows with a map: the cells that a row sees are no run.

MAPPED = {
    "plain": SHAPES["plain"],
    "smollm2": SHAPES["smollm2"],
    "window": SHAPES["window"],
    "all": SHAPES["all"],
}


def scattered(shape, n, seqs=(0, 1, 2), words=1, seed=0):
    """`n` rows of several sequences, whose cells lie anywhere, some of them in all sequences.

    Every sequence has 40 positions that all share and 60 of its own; its last ones are the rows'. A
    seventh of the cells are empty.
    """
    rng = np.random.default_rng(seed)
    free = iter(rng.permutation(shape.n_cells)[: shape.n_cells * 6 // 7].tolist())
    cells = CellMap(shape.n_cells, words)
    for pos in range(40):
        cells.cells[next(free)] = pos, set(seqs)
    own = {seq: [next(free) for _ in range(60)] for seq in seqs}
    for seq in seqs:
        cells.cells |= {cell: (40 + i, {seq}) for i, cell in enumerate(own[seq])}
    rows = [(seq, i) for i in range(59, -1, -1) for seq in seqs][:n][::-1]
    runs = np.zeros((n, 3), np.int64)
    runs[:, 0] = [own[seq][i] for seq, i in rows]
    case = Case(shape, runs)
    case.pos = np.array([40 + i for _, i in rows])
    case.seq = np.array([seq for seq, _ in rows])
    case.map = cells
    tighten(case)
    return case


def tighten(case):
    """First and last become the ends of what a row sees, leaving the window aside."""
    for i, (pos, seq) in enumerate(zip(case.pos, case.seq, strict=True)):
        seen = [c for c, (at, seqs) in case.map.cells.items() if at <= pos and seq in seqs]
        case.runs[i, 1:] = (min(seen), max(seen)) if seen else (0, -1)


@pytest.mark.parametrize("n", [1, 3, 16, 17, 100])
@pytest.mark.parametrize("shape", MAPPED)
def test_mapped_rows_see_the_cells_of_their_sequence(kernels, shape, n):
    case = scattered(MAPPED[shape], n)
    spoil_unseen(case)
    check(case)


@pytest.mark.parametrize("n", [2, 20])
def test_sequences_at_the_edges_of_words(kernels, n):
    for seqs, words in (((0, 31), 1), ((31, 32), 2), ((63, 0, 32), 2), ((64, 95), 3)):
        case = scattered(SHAPES["plain"], n, seqs, words)
        spoil_unseen(case)
        check(case)


@pytest.mark.parametrize("n", [2, 20])
def test_a_sequence_that_the_map_has_no_words_for_sees_nothing(kernels, n):
    case = scattered(SHAPES["plain"], n)
    case.seq[0], case.seq[1] = 32, -1
    out = check(case)
    np.testing.assert_array_equal(out[:2], 0.0)


@pytest.mark.parametrize("n", [3, 40])
def test_mapped_rows_see_nothing_outside_their_run(kernels, n):
    """Padding rows among others, whose last comes before their first; and runs cut short."""
    case = scattered(SHAPES["plain"], n)
    case.runs[::2, 2] = np.minimum(case.runs[::2, 2], 300)
    case.runs[1] = (N_CELLS, 0, -1)
    case.runs[2, 1] = 100
    case.qkv[1] = np.nan
    check(case)


@pytest.mark.parametrize("n_cells", [1, 15, 100, 129])
@pytest.mark.parametrize("n", [1, 17])
def test_maps_that_are_no_whole_blocks(kernels, n, n_cells):
    shape = replace(SHAPES["plain"], n_cells=n_cells)
    case = Case(shape, np.tile([n_cells, 0, n_cells - 1], (n, 1)))
    case.map = CellMap(n_cells, 1, {c: (c // 2, {c % 2}) for c in range(n_cells)})
    case.pos, case.seq = np.arange(n) + n_cells // 3, np.arange(n) % 2
    spoil_unseen(case)
    check(case)


@pytest.mark.parametrize("n", [1, 17])
def test_positions_at_the_ends_of_their_range(kernels, n):
    top = 2**31 - 1
    for window in (0, 5, 2**40):
        case = scattered(replace(SHAPES["plain"], window=window), n)
        case.map.cells[int(case.runs[0, 0])] = top, {0, 1, 2}
        case.map.cells[int(case.runs[-1, 0])] = top - 4, {0, 1, 2}
        case.pos[:] = top
        case.runs[:, 1:] = 0, N_CELLS - 1
        check(case)
        case.pos[:] = 0
        check(case)


def with_map(case, place=None):
    """The same rows through a map of one sequence; cell i lies at place[i]."""
    s = case.shape
    place = np.arange(s.n_cells) if place is None else place
    other = case.cut(slice(None))
    other.runs = case.runs.copy()
    real = case.runs[:, 0] < s.n_cells
    other.runs[real, 0] = place[case.runs[real, 0]]
    other.runs[real, 1:] = 0, s.n_cells - 1
    other.map = CellMap(s.n_cells, 1, {int(c): (pos, {0}) for pos, c in enumerate(place)})
    other.pos = np.where(real, case.runs[:, 0], 0)
    other.seq = np.zeros(len(case.runs), np.int64)
    other.k, other.v = (
        tuple(moved(plane, place, s.n_cells) for plane in planes) for planes in (case.k, case.v)
    )
    return other


def moved(plane, place, n_cells):
    """Cells of a region that are used, elsewhere."""
    out = np.zeros_like(plane)
    out[:, place] = plane[:, : len(place)]
    return out


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("n", [1, 3, 16, 17, 100])
def test_a_straight_run_has_the_same_bits_with_a_map(kernels, n, window, kind):
    shape = replace(SHAPES["smollm2"], window=window, k_type=kind, v_type=kind)
    case = Case(shape, sequence(n, 400, padding=2))
    plain, mapped = case.run(), with_map(case).run()
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(mapped), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


@pytest.mark.parametrize(
    ("shape", "kind"),
    [*(("smollm2", kind) for kind in KV_TYPES), ("one head", "f16"), ("one head", "bf16")],
)
def test_few_rows_have_the_same_bits_wherever_their_cells_lie(kernels, shape, kind):
    case = Case(replace(SHAPES[shape], k_type=kind, v_type=kind), sequence(3, 300))
    plain = case.run()[0]
    place = np.sort(np.random.default_rng(1).permutation(N_CELLS)[:303])
    np.testing.assert_array_equal(with_map(case, place).run()[0], plain)
    half = np.concatenate([np.arange(150), np.arange(200, 353)])  # two runs
    np.testing.assert_array_equal(with_map(case, half).run()[0], plain)


@pytest.mark.parametrize("shape", ["smollm2", "all"])
def test_a_mapped_row_has_the_same_bits_in_any_small_company(kernels, shape):
    case = scattered(MAPPED[shape], 16)
    _, case.k, case.v = case.run()  # now all rows are stored
    together = case.run()[0]
    for rows in ([0], [15], [3, 4], [0, 5, 15]):
        np.testing.assert_array_equal(case.cut(rows).run()[0], together[rows])


@pytest.mark.parametrize("wrong", ["short", "no mask", "rows"])
def test_a_map_of_another_size_is_refused(kernels, wrong):
    case = scattered(SHAPES["plain"], 3)
    pos, seq, cells = case.mapped
    mapped = {
        "short": (pos, seq, cells[:, 1:]),
        "no mask": (pos, seq, cells[:1]),
        "rows": (pos[1:], seq[1:], cells),
    }[wrong]
    with pytest.raises(jax.errors.JaxRuntimeError, match="not a map"):
        compiled(case.shape)(*case.args, mapped=mapped)


# Types of regions.


@pytest.mark.parametrize("v_type", KV_TYPES)
@pytest.mark.parametrize("k_type", KV_TYPES)
def test_every_pair_of_types(kernels, k_type, v_type):
    shape = Shape(h=6, h_kv=2, d_k=64, d_v=32, n_rot=32, k_type=k_type, v_type=v_type, cap=3.0)
    for n in (2, 19):
        case = Case(shape, sequence(n, 150, 3, padding=1))
        case.qkv[n:] = np.nan
        spoil_unseen(case)
        check(case)
    case = scattered(shape, 3)
    spoil_unseen(case)
    check(case)


@pytest.mark.parametrize("kind", KV_TYPES)
def test_keys_and_values_are_stored_as_kv_types_has_them(kernels, kind):
    """What is awkward and what does not fit; keys that are not rotated come through as they are."""
    d = 64
    keys = np.concatenate([awkward(d), large_and_small(d)])
    values = keys[::-1]
    n = len(keys)
    shape = Shape(
        h=1, h_kv=1, d_k=d, d_v=d, n_rot=0, k_type=kind, v_type=kind, n_cells=n, scale=1e-9
    )
    case = Case(shape, sequence(n, 0, n_cells=n))
    case.qkv[:, d:] = np.concatenate([keys, values], axis=1)
    _, k, v = case.run()
    for planes, rows in ((k, keys), (v, values)):
        for plane, expected in zip(planes, encoded(kind, rows), strict=True):
            np.testing.assert_array_equal(bits(plane[1]), bits(expected))


def large_and_small(d):
    rows = np.random.default_rng(6).normal(size=(8, d)).astype(np.float32)
    rows[0, ::7], rows[1], rows[2], rows[3, 3], rows[4, 40] = 1e6, 1e9, -3e38, np.inf, -np.inf
    rows[5:8] = np.array([1e-30, 1e-37, -(2.0**-14)])[:, None]
    return rows


@pytest.mark.parametrize("kind", KV_TYPES)
@pytest.mark.parametrize("n", [2, 20])
def test_a_row_that_is_not_a_number_says_so(kernels, n, kind):
    shape = Shape(h=1, h_kv=1, d_k=32, d_v=64, n_rot=32, k_type=kind, v_type=kind)
    for part in (slice(32, 64), slice(70, 71)):  # its key; one of its values
        case = Case(shape, sequence(n, 100))
        good = case.run()[0]
        case.qkv[-1, part] = np.nan
        out = case.run()[0]
        assert np.isnan(out[-1]).any()
        np.testing.assert_array_equal(out[:-1], good[:-1])


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("kind", KV_TYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n", [4, 24])
def test_values_that_are_not_finite_reach_no_other_sequence(kernels, n, bad, kind, mapped):
    """Cells of two sequences lie side by side in one block."""
    shape = Shape(h=2, h_kv=1, d_k=32, d_v=32, n_rot=32, k_type=kind, v_type=kind)
    if mapped:
        case = scattered(shape, n, (0, 1))
        ours = case.seq == 0
    else:
        case = Case(shape, sequence(n, 0))
        half = n // 2
        case.runs[half:, 1] = half
        ours = np.arange(n) < half
    good = case.run()[0]
    case.qkv[~ours, 2 * 32 + 32 + 7] = bad
    out = case.run()[0]
    np.testing.assert_array_equal(out[ours], good[ours])
    if np.isnan(bad):
        assert np.isnan(out[~ours]).any(axis=(1, 2)).all()
    elif kind not in ("f32", "bf16"):  # whose sums of the largest numbers are infinite
        assert np.isfinite(out).all()


@pytest.mark.parametrize("kernels", ["portable"], indirect=True)
def test_regions_that_do_not_fit_together_are_refused(kernels):
    case = Case(SHAPES["plain"], sequence(2, 50))
    case.v = (case.v[0][:, 1:],)
    with pytest.raises(jax.errors.JaxRuntimeError, match="not a region"):
        case.run()
    shape = Shape(h=1, h_kv=1, d_k=64, d_v=64, n_rot=0, k_type="q8_0")
    case = Case(shape, sequence(2, 50))
    case.k = (case.k[0], case.k[1][..., :1])
    with pytest.raises(jax.errors.JaxRuntimeError, match="not a region"):
        case.run()
