"""The graph's side of a memory: which arrays are whose, and states of sequences."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.graph.inputs import StepInputs, rows_matrix
from minfer_jax.graph.params import CParams, GType
from minfer_jax.memory.plan import CacheSpec, MemoryPlan, RecurrentSpec
from minfer_jax.memory.view import MemoryView, n_fields

N_CELLS = 256


def cache(layers, *, window=0, types=("f32", "f32")) -> CacheSpec:
    return CacheSpec(
        layers=layers,
        n_head_kv=1,
        head_dim_k=32,
        head_dim_v=32,
        types=types,
        window=window,
        n_stream=1,
        stream_cells=N_CELLS,
        stream_size=N_CELLS,
        n_seq=2,
    )


STATES = RecurrentSpec(layers=(1, 4), shapes=((2,), (3, 2)), n_slots=4, n_snapshots=0)
PLAN = MemoryPlan(
    caches=(cache((0, 3), types=("q8_0", "f16")), cache((2,), window=4)), recurrent=STATES
)


def inputs(plan: MemoryPlan, n: int, read, written, *, mapped: bool) -> StepInputs:
    """`n` rows of one sequence in cells 0 on."""
    at = np.arange(n, dtype=np.int32)
    caches = [(np.stack([at, at * 0, at]), N_CELLS)] * len(plan.caches)
    pair = np.array([read, written], np.int32)
    states = (pair, STATES.n_slots) if plan.recurrent else None
    maps = [np.zeros((2, N_CELLS), np.int32) for c in plan.caches if mapped or c.window]
    for each in maps:
        each[:, :n] = at, np.ones(n)
    rows = rows_matrix(n + 1, at, at, at * 0, caches, states)
    return StepInputs(rows, np.zeros(1, np.int32), tuple(maps))


def filled(plan: MemoryPlan) -> list[jax.Array]:
    """Every region full of its own number."""
    return [jnp.full(shape, i + 1, dtype) for i, (shape, dtype) in enumerate(plan.layout)]


def trace(plan: MemoryPlan, use: Any, step: StepInputs, *, mapped=False, gtype=GType.PREFILL):
    """What `use` makes of a view, and the regions afterwards."""

    def run(regions, step):
        view = MemoryView(plan, regions, step, CParams(n_ctx=200, kv_map=mapped), gtype)
        return use(view), view.regions

    return jax.jit(run)(filled(plan), step)


def test_fields_of_rows():
    assert (
        n_fields(PLAN) == 3 + 3 + 3 + 2 == inputs(PLAN, 2, [0, 0], [0, 0], mapped=False)[0].shape[0]
    )
    assert n_fields(MemoryPlan()) == 3 and n_fields(MemoryPlan(recurrent=STATES)) == 5


@pytest.mark.parametrize("mapped", [False, True])
def test_regions_come_back_in_the_order_of_the_plan(mapped):
    step = inputs(PLAN, 2, [0, 0], [0, 0], mapped=mapped)
    _, regions = trace(PLAN, lambda view: None, step, mapped=mapped)
    assert [(r.shape, r.dtype) for r in regions] == [(s, np.dtype(t)) for s, t in PLAN.layout]
    assert [int(r.reshape(-1)[0]) for r in regions] == list(range(1, 8))


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(
    ("il", "mine", "layer"), [(0, (0, 1, 2), 0), (3, (0, 1, 2), 1), (2, (3, 4), 0)]
)
def test_a_layer_writes_its_heads_of_its_cache(mapped, il, mine, layer):
    rows = jnp.ones((3, 1, 32), jnp.float32) * 50

    def use(view: MemoryView):
        kv, at = view.cache(il)
        assert at == layer
        return kv.attend(at, rows, rows, rows, scale=1.0, window=0, cap=0.0)

    step = inputs(PLAN, 2, [0, 0], [0, 0], mapped=mapped)
    out, regions = trace(PLAN, use, step, mapped=mapped)
    np.testing.assert_allclose(np.asarray(out)[:2], 50, rtol=1e-3)
    before = filled(PLAN)
    changed = [i for i in range(7) if not np.array_equal(before[i], regions[i])]
    assert tuple(changed) == mine
    for i in mine:
        where = np.argwhere(np.asarray(before[i]) != np.asarray(regions[i]))
        assert set(where[:, 0]) == {layer} and set(where[:, 1]) == {0, 1}


def test_states_of_one_sequence_and_its_padding():
    """Two rows of a sequence whose state is in slot 3 and goes to slot 1."""

    def use(view: MemoryView):
        states = view.states
        assert states.shape == (1, 3)
        first, second = states.load(4)
        states.store(4, (first + 10, second + 20))
        return first, second, states.real

    step = inputs(PLAN, 2, [3, 3], [1, 1], mapped=False)
    (first, second, real), regions = trace(PLAN, use, step)
    assert first.shape == (1, 2) and second.shape == (1, 3, 2)
    assert np.asarray(real).tolist() == [[True, True, False]]
    for region, value, new in zip(regions[5:], (6, 7), (16, 27), strict=True):
        want = np.full(region.shape, value, np.float32)
        want[1, 1] = new  # layer 4 is the second that has states
        np.testing.assert_array_equal(region, want)


def test_states_of_a_step_of_many_sequences():
    """One goes on, one begins, and padding neither reads nor writes."""

    def use(view: MemoryView):
        states = view.states
        assert states.shape == (3, 1)
        loaded = states.load(1)
        states.store(
            1,
            tuple(
                state + jnp.arange(1.0, 4.0).reshape(3, *[1] * (state.ndim - 1)) for state in loaded
            ),
        )
        return *loaded, states.real

    step = inputs(PLAN, 2, [2, STATES.n_slots], [2, 0], mapped=False)
    (first, second, real), regions = trace(PLAN, use, step, gtype=GType.DECODE)
    assert np.asarray(first).tolist() == [[6, 6], [0, 0], [0, 0]]
    assert np.asarray(second)[:, 0, 0].tolist() == [7, 0, 0]
    assert np.asarray(real).tolist() == [[True], [True], [False]]
    assert np.asarray(regions[5])[0, :, 0].tolist() == [2, 6, 7, 6]
    assert np.asarray(regions[6])[0, :, 0, 0].tolist() == [2, 7, 8, 7]
    assert (np.asarray(regions[5])[1] == 6).all()


def test_a_memory_of_states_alone():
    plan = MemoryPlan(recurrent=STATES)
    step = inputs(plan, 1, [4], [0], mapped=False)
    _, regions = trace(plan, lambda view: view.states.store(1, view.states.load(1)), step)
    assert np.asarray(regions[0])[0].tolist() == [[0, 0], [1, 1], [1, 1], [1, 1]]
