"""The loop in the graph, around a forward pass whose answers are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.graph.inputs import LOOP_ENDS, LOOP_STEPS, LoopInputs, StepInputs
from minfer_jax.models.decode_loop import decode_loop
from minfer_jax.sampling import SamplingParams
from minfer_jax.sampling.in_graph import blank_inputs, kind_of

N_VOCAB = 50
KIND = kind_of(SamplingParams(temp=0.0), n_vocab=N_VOCAB, constrained=False)


def forward(regions, inputs):
    """The token after t at position p is t + p; the region counts the steps; 40 leads to a NaN."""
    token, pos = inputs.rows[0], inputs.rows[1]
    (seen,) = regions
    token = jnp.where(token < 0, np.int32(99), token)  # which shows, as no token is chosen after it
    logits = jax.nn.one_hot(token + pos + inputs.maps[0][0, 0], N_VOCAB, dtype=jnp.float32)
    logits = jnp.where((token == 40)[:, None], jnp.float32(np.nan), logits)
    return logits, (seen.at[pos[0]].set(token[0]),)


def run(tokens, *, limit=LOOP_STEPS, ends=(), real=None, shift=0):
    n = len(tokens)
    rows = np.zeros((LOOP_STEPS, 3, n), np.int32)
    rows[0, 0] = tokens
    rows[:, 1] = np.arange(LOOP_STEPS)[:, None]
    rows[:, 2] = np.where(np.array(real or [True] * n), 0, -1)
    maps = (np.zeros((LOOP_STEPS, 1, 1), np.int32),)
    maps[0][2] = shift
    last = np.full(LOOP_ENDS, -1, np.int32)
    last[: len(ends)] = ends
    inputs = StepInputs(
        rows,
        np.zeros(n, np.int32),
        maps,
        None,
        blank_inputs(KIND, n),
        LoopInputs(np.asarray(limit, np.int32), last),
    )
    regions = (jnp.full(LOOP_STEPS, -1, jnp.int32),)
    out, (seen,) = jax.jit(lambda r, i: decode_loop(forward, KIND, r, i))(regions, inputs)
    done = int(out[-1, 0])
    assert (np.asarray(out[-1]) == done).all()
    return np.asarray(out[:done]).T.tolist(), np.asarray(seen).tolist()[: done + 1]


def test_each_step_is_fed_what_the_one_before_it_chose():
    chosen, seen = run([1], limit=6)
    assert chosen == [[1, 2, 4, 7, 11, 16]]  # + 0, 1, 2 ...
    assert seen == [1, 1, 2, 4, 7, 11, -1]


def test_maps_are_the_steps_own():
    assert run([1], limit=4, shift=10)[0] == [[1, 2, 14, 17]]


def test_it_ends_with_any_rows_end():
    assert run([1, 3], ends=[9, 30])[0] == [[1, 2, 4, 7], [3, 4, 6, 9]]


def test_padding_ends_nothing():
    assert run([1, 3], ends=[9], real=[True, False], limit=5)[0][0] == [1, 2, 4, 7, 11]


def test_padding_that_chooses_nothing_is_fed_a_token_all_the_same():
    chosen = run([1, 40], real=[True, False], limit=3)[0]
    assert chosen == [[1, 2, 4], [-1, 1, 3]]  # 0, as far as it goes


def test_it_ends_where_nothing_can_be_chosen():
    # 40 is fed in the step after the one that chose it.
    chosen, seen = run([37])
    assert chosen == [[37, 38, 40, -1]] and seen[-1] == -1


@pytest.mark.parametrize("limit", [1, LOOP_STEPS])
def test_the_limit_is_data(limit):
    assert len(run([0], limit=limit)[0][0]) == limit


def test_jax_settings_do_not_change_its_trace():
    def trace() -> str:
        n = 2
        inputs = StepInputs(
            np.zeros((LOOP_STEPS, 3, n), np.int32),
            np.zeros(n, np.int32),
            (np.zeros((LOOP_STEPS, 1, 1), np.int32),),
            None,
            blank_inputs(KIND, n),
            LoopInputs(np.asarray(3, np.int32), np.full(LOOP_ENDS, -1, np.int32)),
        )
        regions = (np.zeros(LOOP_STEPS, np.int32),)
        return str(jax.make_jaxpr(lambda r, i: decode_loop(forward, KIND, r, i))(regions, inputs))

    plain = trace()
    with jax.enable_x64(True):
        assert trace() == plain
