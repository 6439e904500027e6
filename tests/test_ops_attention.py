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
from minfer_jax.ops.attention import BLOCK, attend_blocked, attend_masked

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


@partial(jax.jit, static_argnames=("form", "scale", "cap"))
def attend(q, k, v, first, last, *, form, scale=SCALE, cap=0.0):
    return FORMS[form](q, k, v, first, last, scale=scale, cap=cap, precision=lax.Precision.HIGHEST)


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

    def counted(first, last, cell):
        assert cell.shape == (BLOCK,)
        read.append(int(cell[0]) // BLOCK)
        return seen(first, last, cell)

    monkeypatch.setattr(attention, "_seen", counted)
    q, k, v = inputs(len(runs), 2, 2)
    with jax.disable_jit():  # while_loop is then a loop of Python's
        attend_blocked(*map(jnp.asarray, (q, k, v, *ends(runs))), scale=SCALE)
    assert read == blocks


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_the_blocked_form_makes_nothing_as_long_as_the_region(dtype):
    n_cells = 5 * BLOCK
    shapes = ((4, 6, D), (2, n_cells, D), (2, n_cells, D_V), (4,), (4,))
    types = (jnp.float32, dtype, dtype, jnp.int32, jnp.int32)
    args = [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, types, strict=True)]
    jaxpr = jax.make_jaxpr(partial(attend_blocked, scale=SCALE))(*args)
    long = {aval for aval in avals(jaxpr.jaxpr) if n_cells in aval[0]}
    assert long == {(shape, np.dtype(dtype)) for shape in shapes[1:3]}


def test_temporary_memory_of_the_blocked_form_does_not_grow_with_the_region():
    # Half-precision regions are the case to fear: XLA could move their conversion out of the loop.
    def temp(n_cells):
        shapes = ((1, 6, D), (2, n_cells, D), (2, n_cells, D_V), (1,), (1,))
        types = (jnp.float32, jnp.float16, jnp.float16, jnp.int32, jnp.int32)
        args = [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, types, strict=True)]
        compiled = jax.jit(partial(attend_blocked, scale=SCALE)).lower(*args).compile()
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
