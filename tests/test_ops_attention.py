"""Attention: both forms against a float64 softmax over each row's own cells, row by row."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params

from minfer_jax.ops import attention
from minfer_jax.ops.attention import (
    BLOCK,
    Mapped,
    alibi_slopes,
    attend_blocked,
    attend_masked,
    attend_rows,
)
from minfer_jax.ops.kv_types import KV_TYPES

FORMS = {"blocked": attend_blocked, "masked": attend_masked}
N_CELLS = 3 * BLOCK
D, D_V = 8, 6
SCALE = 0.4

# Runs (first, last) that start and end on, before and after the edges of blocks.
EDGES = [
    (0, 0),
    (0, 254),
    (0, 255),
    (0, 256),
    (255, 255),
    (255, 256),
    (256, 256),
    (257, 257),
    (256, 511),
    (257, 512),
    (100, 700),
    (0, N_CELLS - 1),
]


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


@partial(jax.jit, static_argnames=("form", "scale", "cap", "window"))
def attend(q, k, v, first, last, mapped=None, *, form, scale=SCALE, cap=0.0, window=0):
    """Over a region of as many heads as are read; k and v are float arrays."""
    names = {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16"}
    return FORMS[form](
        q,
        (k,),
        (v,),
        first,
        last,
        mapped=mapped,
        n_kv=k.shape[0],
        d_v=v.shape[2],
        types=(names[np.dtype(k.dtype)], names[np.dtype(v.dtype)]),
        scale=scale,
        cap=cap,
        window=window,
        precision=lax.Precision.HIGHEST,
    )


def reference(q, k, v, runs, *, scale=SCALE, cap=0.0):
    """Float64 [n, h, d_v]; query head h reads KV head h // (heads per KV head)."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    n, n_head, _ = q.shape
    out = np.zeros((n, n_head, v.shape[2]))
    for i, (first, last) in enumerate(runs):
        for h in range(n_head):
            kv = h // (n_head // k.shape[0])
            scores = k[kv, first : last + 1] @ q[i, h] * scale
            if cap:
                scores = cap * np.tanh(scores / cap)
            p = np.exp(scores - scores.max())
            out[i, h] = p / p.sum() @ v[kv, first : last + 1]
    return out


def inputs(n, n_head, n_kv, *, dtype=np.float32, n_cells=N_CELLS, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(n, n_head, D)).astype(np.float32)
    k = rng.normal(size=(n_kv, n_cells, D)).astype(dtype)
    v = rng.normal(size=(n_kv, n_cells, D_V)).astype(dtype)
    return q, k, v


def ends(runs):
    first, last = np.array(runs, np.int32).T
    return first, last


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("n_head", "n_kv"), [(2, 2), (6, 2), (4, 1)])
def test_every_run_against_its_own_softmax(form, n_head, n_kv, dtype):
    q, k, v = inputs(len(EDGES), n_head, n_kv, dtype=dtype)
    out = attend(q, k, v, *ends(EDGES), form=form)
    assert out.dtype == np.float32
    chex.assert_trees_all_close(np.asarray(out, np.float64), reference(q, k, v, EDGES), atol=2e-6)


def test_a_single_cell_gives_its_value(form):
    q, k, v = inputs(len(EDGES), 4, 1)
    runs = [(cell, cell) for cell in (0, 1, 254, 255, 256, 257, 300, 511, 512, 513, 766, 767)]
    out = np.asarray(attend(q, k, v, *ends(runs), form=form))
    for i, (cell, _) in enumerate(runs):
        np.testing.assert_array_equal(out[i], np.tile(v[:, cell], (4, 1)))


def test_scale_and_cap(form):
    q, k, v = inputs(4, 2, 2)
    runs = [(0, 3), (5, 300), (250, 520), (0, 767)]
    expected = reference(q, k, v, runs, scale=2.0, cap=1.5)
    assert np.abs(expected - reference(q, k, v, runs, scale=2.0)).max() > 0.1
    assert np.abs(expected - reference(q, k, v, runs, cap=1.5)).max() > 0.1
    out = attend(q, k, v, *ends(runs), form=form, scale=2.0, cap=1.5)
    chex.assert_trees_all_close(np.asarray(out, np.float64), expected, atol=2e-6)


def test_padding_rows_are_finite_and_change_no_other_row(form):
    q, k, v = inputs(12, 4, 1)
    runs = [(0, 40), (0, 41), (30, 300), (290, 300)]
    seen = [1, 4, 5, 10]
    padded = np.full((12, 2), (0, -1))
    padded[seen] = runs
    out = np.asarray(attend(q, k, v, *ends(padded), form=form))
    assert np.isfinite(out).all()
    expected = reference(q[seen], k, v, runs)
    chex.assert_trees_all_close(out[seen].astype(np.float64), expected, atol=2e-6)


def test_nothing_but_padding_is_finite(form):
    q, k, v = inputs(12, 4, 1)
    out = attend(q, k, v, *ends([(0, -1)] * 12), form=form)
    assert np.isfinite(np.asarray(out)).all()


@pytest.mark.parametrize("junk", [np.inf, -np.inf, np.nan])
def test_junk_in_cells_that_no_row_sees_does_not_leak(form, junk):
    runs = [(300, 310), (305, 330), (340, 340), (600, 610)]
    q, k, v = inputs(4, 2, 2)
    expected = reference(q, k, v, runs)
    seen = np.zeros(N_CELLS, bool)
    for first, last in runs:
        seen[first : last + 1] = True
    k[:, ~seen], v[:, ~seen] = junk, junk
    out = attend(q, k, v, *ends(runs), form=form)
    chex.assert_trees_all_close(np.asarray(out, np.float64), expected, atol=2e-6)


def test_blocks_wholly_before_a_run_leave_no_trace(form):
    # Row 0 keeps all blocks in the loop; before their runs the others have only hidden scores.
    q, k, v = inputs(4, 2, 2)
    runs = [(0, 767), (256, 256), (520, 530), (767, 767)]
    v[:, :256] = 1e30
    out = np.asarray(attend(q, k, v, *ends(runs), form=form), np.float64)
    expected = reference(q, k, v, runs)
    chex.assert_trees_all_close(out[1:], expected[1:], atol=2e-6)
    chex.assert_trees_all_close(out[0], expected[0], rtol=1e-5)


def test_large_scores_do_not_overflow(form):
    q, k, v = inputs(4, 2, 2)
    runs = [(0, 3), (5, 300), (250, 520), (0, 767)]
    q *= 1000.0
    out = attend(q, k, v, *ends(runs), form=form)
    chex.assert_trees_all_close(
        np.asarray(out, np.float64), reference(q, k, v, runs), atol=1e-3, rtol=1e-3
    )


def test_the_masked_form_is_differentiable():
    runs = [(0, 5), (3, 260), (250, 257)]
    q, k, v = inputs(4, 4, 2, n_cells=2 * BLOCK)
    first, last = ends([*runs, (0, -1)])
    rng = np.random.default_rng(5)
    weight = rng.normal(size=(3, 4, D_V))

    def loss(q, k, v):
        out = attend(q, k, v, first, last, form="masked", cap=3.0)
        return jnp.sum(out[:3] * weight.astype(np.float32))

    grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    chex.assert_tree_all_finite(grads)
    args = [np.asarray(x, np.float64) for x in (q, k, v)]
    for i, grad in enumerate(grads):
        step = rng.normal(size=args[i].shape) * 1e-5

        def moved(sign, i=i, step=step):
            moved = [x + sign * step if j == i else x for j, x in enumerate(args)]
            return np.sum(reference(moved[0][:3], *moved[1:], runs, cap=3.0) * weight)

        slope = (moved(1.0) - moved(-1.0)) / 2.0
        assert abs(slope) > 1e-6
        assert np.sum(np.asarray(grad, np.float64) * step) == pytest.approx(slope, rel=1e-4)
    np.testing.assert_array_equal(np.asarray(grads[1])[:, 261:], 0.0)
    np.testing.assert_array_equal(np.asarray(grads[0])[3], 0.0)


def test_the_blocked_form_has_no_reverse_mode():
    q, k, v = inputs(4, 2, 2)
    first, last = ends([(0, 3)] * 4)
    with pytest.raises(ValueError, match="Reverse-mode"):
        jax.grad(lambda q: jnp.sum(attend(q, k, v, first, last, form="blocked")))(q)


@pytest.mark.parametrize(
    ("runs", "blocks"),
    [
        ([(0, 0), (0, -1)], [0]),
        ([(0, 255), (0, -1)], [0]),
        ([(0, 256), (0, -1)], [0, 1]),
        ([(255, 255), (0, -1)], [0]),
        ([(256, 300), (257, 511)], [1]),
        ([(300, 512), (0, -1)], [1, 2]),
        ([(0, 767), (767, 767)], [0, 1, 2]),
        ([(0, -1), (0, -1)], []),
    ],
)
def test_the_blocked_form_steps_over_the_blocks_in_use_alone(monkeypatch, runs, blocks):
    read = []
    seen = attention._seen

    def counted(first, last, cell, *rest):
        assert cell.shape == (BLOCK,)
        read.append(int(cell[0]) // BLOCK)
        return seen(first, last, cell, *rest)

    monkeypatch.setattr(attention, "_seen", counted)
    q, k, v = inputs(len(runs), 2, 2)
    with jax.disable_jit():  # while_loop is then a loop of Python's
        blocked(*map(jnp.asarray, (q, k, v, *ends(runs))))
    assert read == blocks


def blocked(q, k, v, first, last):
    kind = "f16" if k.dtype == jnp.float16 else "f32"
    args = {"n_kv": k.shape[0], "d_v": v.shape[2], "types": (kind, kind), "scale": SCALE}
    return attend_blocked(q, (k,), (v,), first, last, **args)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_the_blocked_form_makes_nothing_as_long_as_the_region(dtype):
    n_cells = 5 * BLOCK
    shapes = ((4, 6, D), (2, n_cells, D), (2, n_cells, D_V), (4,), (4,))
    types = (jnp.float32, dtype, dtype, jnp.int32, jnp.int32)
    args = [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, types, strict=True)]
    jaxpr = jax.make_jaxpr(blocked)(*args)
    long = {aval for aval in avals(jaxpr.jaxpr) if n_cells in aval[0]}
    assert long == {(shape, np.dtype(dtype)) for shape in shapes[1:3]}


def test_temporary_memory_of_the_blocked_form_does_not_grow_with_the_region():
    # Half-precision regions are the case to fear: XLA could move their conversion out of the loop.
    def temp(n_cells):
        shapes = ((1, 6, D), (2, n_cells, D), (2, n_cells, D_V), (1,), (1,))
        types = (jnp.float32, jnp.float16, jnp.float16, jnp.int32, jnp.int32)
        args = [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, types, strict=True)]
        compiled = jax.jit(blocked).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small = temp(2 * BLOCK)
    assert 0 < small == temp(64 * BLOCK)


def avals(jaxpr):
    """Shape and type of every value in a jaxpr, inner ones included."""
    for eqn in jaxpr.eqns:
        for var in (*eqn.invars, *eqn.outvars):
            yield var.aval.shape, np.dtype(var.aval.dtype)
        for inner in jaxprs_in_params(eqn.params):
            yield from avals(inner)


# --- scattered cells ----------------------------------------------------------------------------

SEQS = (0, 31, 32, 63)
"""Sequences whose bits are the first and the last of a word."""


def scattered(n_cells=N_CELLS, seqs=SEQS, seed=1):
    """A map of cells in no order: per cell a position or -1, and sequences. In numpy."""
    rng = np.random.default_rng(seed)
    pos = rng.integers(0, 40, n_cells).astype(np.int32)
    holds = {seq: rng.random(n_cells) < 0.2 for seq in seqs}
    pos[~np.any(list(holds.values()), axis=0)] = -1
    words = np.zeros((-(-(max(seqs) + 1) // 32), n_cells), np.uint32)
    for seq, held in holds.items():
        words[seq // 32] |= held.astype(np.uint32) << np.uint32(seq % 32)
    cells = np.concatenate([pos[None], words.view(np.int32)])
    return cells, pos, holds


def mapped_reference(q, k, v, rows, pos, holds, *, window=0, cap=0.0, scale=SCALE):
    """Float64 over the list of cells that each row (position, sequence) sees."""
    n, n_head, _ = q.shape
    out = np.zeros((n, n_head, v.shape[2]))
    for i, (at, seq) in enumerate(rows):
        low = at - window if window else -1
        seen = np.flatnonzero(holds[seq] & (pos <= at) & (pos > low))
        assert len(seen), "a row always sees itself"
        for h in range(n_head):
            kv = h // (n_head // k.shape[0])
            scores = k[kv, seen].astype(np.float64) @ q[i, h] * scale
            scores = cap * np.tanh(scores / cap) if cap else scores
            p = np.exp(scores - scores.max())
            out[i, h] = p / p.sum() @ v[kv, seen].astype(np.float64)
    return out


def where(rows, cells):
    """Rows whose cells are anywhere, and one of padding behind them."""
    at, seq = np.array([*rows, (0, -1)], np.int32).T
    n = len(rows)
    first = np.zeros(n + 1, np.int32)
    last = np.array([cells.shape[1] - 1] * n + [-1], np.int32)
    return first, last, Mapped(at, seq, cells)


ROWS = [(39, 0), (20, 31), (39, 32), (25, 63), (39, 31), (30, 0)]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (12, 0.0), (5, 1.5)])
def test_scattered_cells_against_the_softmax_of_a_list(form, window, cap, dtype):
    """Two words of sequences; what no sequence holds is infinite."""
    cells, pos, holds = scattered()
    q, k, v = inputs(len(ROWS) + 1, 6, 2, dtype=dtype)
    want = mapped_reference(q[:-1], k, v, ROWS, pos, holds, window=window, cap=cap)
    k[:, pos < 0], v[:, pos < 0] = np.inf, np.nan
    first, last, mapped = where(ROWS, cells)
    out = np.asarray(attend(q, k, v, first, last, mapped, form=form, window=window, cap=cap))
    chex.assert_trees_all_close(out[:-1].astype(np.float64), want, atol=3e-6)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("seq", [0, 7, 30, 31])
def test_one_word_of_sequences(form, seq):
    """Bit 31 makes the mask of a cell a negative number."""
    cells, pos, holds = scattered(seqs=(0, 7, 30, 31))
    assert cells.shape[0] == 2 and (cells[1] < 0).any()
    q, k, v = inputs(3, 2, 2)
    rows = [(39, seq), (15, seq)]
    first, last, mapped = where(rows, cells)
    out = np.asarray(attend(q, k, v, first, last, mapped, form=form))
    want = mapped_reference(q[:-1], k, v, rows, pos, holds)
    chex.assert_trees_all_close(out[:-1].astype(np.float64), want, atol=3e-6)


def test_the_run_of_a_mapped_row_says_where_to_look(form):
    """As streams do, whose sequences all have the number 0."""
    cells, pos, holds = scattered(seqs=(0,))
    q, k, v = inputs(3, 2, 2)
    first, last, mapped = where([(39, 0), (39, 0)], cells)
    first[:2], last[:2] = (10, 300), (290, 700)
    out = np.asarray(attend(q, k, v, first, last, mapped, form=form))
    for i in range(2):
        within = (np.arange(N_CELLS) >= first[i]) & (np.arange(N_CELLS) <= last[i])
        want = mapped_reference(q[i : i + 1], k, v, [(39, 0)], pos, {0: holds[0] & within})
        chex.assert_trees_all_close(out[i : i + 1].astype(np.float64), want, atol=3e-6)


@pytest.mark.parametrize("kind", KV_TYPES)
@pytest.mark.parametrize("head", [0, 2])
def test_types_of_regions_and_where_the_heads_are(form, kind, head):
    """K of each type and V of another; two heads of a region of four, from `head` on."""
    other = {"f32": "q4_0", "q4_0": "f16", "q8_0": "bf16"}.get(kind, "q8_0")
    cells, pos, holds = scattered()
    rng = np.random.default_rng(4)
    q = rng.normal(size=(len(ROWS) + 1, 4, 32)).astype(np.float32)
    k, v = rng.normal(size=(2, 4, N_CELLS, 32)).astype(np.float32)
    regions = KV_TYPES[kind].encode(jnp.asarray(k)), KV_TYPES[other].encode(jnp.asarray(v))
    k, v = (
        np.asarray(KV_TYPES[name].decode(arrays))[head : head + 2]
        for name, arrays in zip((kind, other), regions, strict=True)
    )
    first, last, mapped = where(ROWS, cells)
    options = {"n_kv": 2, "d_v": 32, "types": (kind, other), "scale": SCALE, "window": 9}
    attend = partial(FORMS[form], precision=lax.Precision.HIGHEST, **options)
    out = np.asarray(jax.jit(attend)(q, *regions, first, last, np.int32(head), mapped))
    want = mapped_reference(q[:-1], k, v, ROWS, pos, holds, window=9)
    chex.assert_trees_all_close(out[:-1].astype(np.float64), want, atol=3e-6)


def test_values_that_are_the_first_part_of_their_keys(form):
    q, k, _ = inputs(len(EDGES), 4, 1)
    options = {"n_kv": 1, "d_v": 5, "scale": SCALE, "precision": lax.Precision.HIGHEST}
    first, last = ends(EDGES)
    out = jax.jit(partial(FORMS[form], **options))(q, (k,), (), first, last)
    want = reference(q, k, k[..., :5], EDGES)
    chex.assert_trees_all_close(np.asarray(out, np.float64), want, atol=2e-6)


def test_the_trace_is_the_same_with_x64(form):
    cells, _, _ = scattered()
    first, last, mapped = where(ROWS, cells)
    q, k, v = inputs(len(ROWS) + 1, 6, 2)
    options = {"n_kv": 2, "d_v": D_V, "scale": SCALE, "window": 3, "cap": 2.0}

    def trace():
        run = partial(FORMS[form], **options)
        return str(
            jax.make_jaxpr(lambda *a: run(*a))(q, (k,), (v,), first, last, np.int32(0), mapped)
        )

    plain = trace()
    with jax.enable_x64(True):
        assert trace() == plain


# --- rows that attend to each other -------------------------------------------------------------

SEQ = [0, 0, 2, 0, 2, 2, 0, 0]
POS = [0, 1, 0, 2, 1, 2, 3, 9]
REAL = [True] * 6 + [False, True]
"""Rows of two sequences that lie between each other; row 6 is padding that looks like a row."""


def rows_attend(q, k, v, pos=POS, seq=SEQ, real=REAL, *, alibi=None, causal=False):
    pos, seq = (np.asarray(x, np.int32) for x in (pos, seq))
    attend = partial(attend_rows, scale=SCALE, alibi=alibi, causal=causal)
    return jax.jit(partial(attend, precision=lax.Precision.HIGHEST))(
        q, k, v, pos, seq, np.asarray(real)
    )


def rows_reference(q, k, v, pos=POS, seq=SEQ, real=REAL, *, alibi=None, causal=False):
    """Float64, a softmax over the list of those that each real row sees."""
    n, n_head, _ = q.shape
    out = np.zeros((n, n_head, v.shape[2]))
    for i in (i for i in range(n) if real[i]):
        seen = [j for j in range(n) if real[j] and seq[j] == seq[i]]
        if causal:
            seen = [j for j in seen if pos[j] <= pos[i]]
        for h in range(n_head):
            kv = h // (n_head // k.shape[1])
            scores = [float(q[i, h].astype(np.float64) @ k[j, kv]) * SCALE for j in seen]
            if alibi:
                away = [abs(pos[i] - pos[j]) for j in seen]
                scores = [s - alibi[h] * d for s, d in zip(scores, away, strict=True)]
            p = np.exp(np.array(scores) - max(scores))
            out[i, h] = p / p.sum() @ v[seen, kv].astype(np.float64)
    return out


def row_inputs(n, n_head, n_kv, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((n, n_head, D), (n, n_kv, D), (n, n_kv, D_V))
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("alibi", [None, (0.5, 0.25, 0.125, 3.0)])
@pytest.mark.parametrize("n_kv", [4, 2, 1])
def test_rows_see_the_real_rows_of_their_sequence(causal, alibi, n_kv):
    args = row_inputs(8, 4, n_kv)
    out = np.asarray(rows_attend(*args, alibi=alibi, causal=causal))
    want = rows_reference(*args, alibi=alibi, causal=causal)
    chex.assert_shape(out, (8, 4, D_V))
    np.testing.assert_allclose(out[REAL], want[REAL], rtol=2e-5, atol=2e-6)
    assert np.isfinite(out).all()


def test_nobody_reads_what_padding_rows_hold():
    q, k, v = row_inputs(8, 4, 4)
    want = np.asarray(rows_attend(q, k, v))
    k[6], v[6] = np.float32(1e6), np.inf
    np.testing.assert_array_equal(np.asarray(rows_attend(q, k, v))[REAL], want[REAL])


def test_rows_that_see_nothing_are_finite():
    out = rows_attend(*row_inputs(8, 4, 4), real=[False] * 8)
    assert np.isfinite(np.asarray(out)).all()


@pytest.mark.parametrize("n", [5, 6, 7, 13])
def test_rows_in_blocks_are_as_all_at_once(monkeypatch, n):
    q, k, v = row_inputs(n, 4, 2)
    where = {"pos": range(n), "seq": [0] * n, "real": [True] * n}
    monkeypatch.setattr(attention, "_ROWS", 3)
    out = rows_attend(q, k, v, **where, alibi=(0.5, 0.25, 0.125, 3.0), causal=True)
    want = rows_reference(q, k, v, **where, alibi=(0.5, 0.25, 0.125, 3.0), causal=True)
    np.testing.assert_allclose(np.asarray(out), want, rtol=2e-5, atol=2e-6)


def test_scores_of_many_rows_are_never_all_there():
    n = 4 * attention._ROWS
    shapes = ((n, 2, D), (n, 2, D), (n, 2, D_V), (n,), (n,))
    types = (jnp.float32,) * 3 + (jnp.int32,) * 2
    args = [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, types, strict=True)]
    real = jax.ShapeDtypeStruct((n,), jnp.bool_)
    jaxpr = jax.make_jaxpr(partial(attend_rows, scale=SCALE, causal=False))(*args, real)
    assert max(int(np.prod(shape)) for shape, _ in avals(jaxpr.jaxpr)) == 2 * attention._ROWS * n


@pytest.mark.parametrize("n", [8, 2 * attention._ROWS])
def test_the_trace_of_rows_is_the_same_with_x64(n):
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in row_inputs(n, 4, 2)]
    args += [jax.ShapeDtypeStruct((n,), t) for t in (np.int32, np.int32, np.bool_)]

    def trace():
        attend = partial(attend_rows, scale=SCALE, alibi=alibi_slopes(4, 8.0), causal=True)
        return str(jax.make_jaxpr(lambda *args: attend(*args))(*args))

    plain = trace()
    with jax.enable_x64(True):
        assert trace() == plain


@pytest.mark.parametrize(
    ("n_head", "slopes"),
    [
        (1, [2**-8]),
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (8, [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
    ],
)
def test_alibi_slopes_of_the_paper(n_head, slopes):
    np.testing.assert_allclose(alibi_slopes(n_head, 8.0), slopes, rtol=1e-12)
