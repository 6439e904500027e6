"""Log-probabilities of raw logits, against values worked by hand and in exact arithmetic."""

import json
import math

import numpy as np
import pytest

from minfer_jax.errors import UsageError
from minfer_jax.sampling.logprobs import MAX_LOGPROBS, checked_logprobs, token_logprobs

# Probabilities of 1/8, 4/8, 1/8, 2/8.
EIGHTHS = np.log(np.array([1, 4, 1, 2], np.float32))


def spelled(token_id: int) -> str:
    return f"<{token_id}>"


def of(logits, token, n):
    return token_logprobs(np.asarray(logits, np.float32), token, n, spelled)


def test_the_chosen_token_and_the_likeliest():
    found = of(EIGHTHS, 3, 2)
    assert (found.id, found.text) == (3, "<3>")
    assert found.logprob == pytest.approx(math.log(2 / 8), abs=1e-7)
    assert [(i, text) for i, text, _ in found.top] == [(1, "<1>"), (3, "<3>")]
    assert [value for *_, value in found.top] == pytest.approx([math.log(4 / 8), found.logprob])


@pytest.mark.parametrize(
    ("token", "n", "ids"),
    [
        (2, 2, [1, 3, 2]),  # chosen, and not among the two likeliest
        (2, 3, [1, 3, 0, 2]),  # as likely as the third, whose id is lower
        (0, 3, [1, 3, 0]),
        (0, 0, [0]),
        (1, 4, [1, 3, 0, 2]),
        (1, MAX_LOGPROBS, [1, 3, 0, 2]),
    ],
)
def test_the_chosen_token_is_always_among_them(token, n, ids):
    found = of(EIGHTHS, token, n)
    assert [entry.id for entry in found.top] == ids
    assert found.logprob == next(entry.logprob for entry in found.top if entry.id == token)


def test_large_logits_do_not_overflow_and_all_of_them_count():
    # float32 would lose every one of the small ones in the sum.
    logits = np.full(100_001, -20.0, np.float32)
    logits[7] = 0.0
    logits += np.float32(1024.0)
    found = of(logits, 7, 1)
    assert found.logprob == pytest.approx(-math.log1p(100_000 * math.exp(-20.0)), rel=1e-9)
    assert of(logits, 8, 1).logprob == pytest.approx(found.logprob - 20.0, rel=1e-12)


def test_they_are_raw():
    """Temperature, top-k and the like change nothing: logits are all that goes in."""
    logits = np.array([3.0, 1.0, 2.0], np.float32)
    before = logits.copy()
    of(logits, 1, 3)
    np.testing.assert_array_equal(logits, before)


def test_impossible_tokens_are_none_in_json():
    found = of([1.0, -np.inf, 1.0], 2, 3)
    assert [entry.logprob for entry in found.top] == [-math.log(2), -math.log(2), -np.inf]
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False)) == {
        "id": 2,
        "text": "<2>",
        "logprob": -0.693147,
        "top": [
            {"id": 0, "text": "<0>", "logprob": -0.693147},
            {"id": 2, "text": "<2>", "logprob": -0.693147},
            {"id": 1, "text": "<1>", "logprob": None},
        ],
    }


def test_infinite_logits_share_everything():
    found = of([np.inf, 5.0, np.inf], 0, 2)
    assert [(entry.id, entry.logprob) for entry in found.top] == [
        (0, -math.log(2)),
        (2, -math.log(2)),
    ]
    assert of([np.inf, 5.0], 1, 0).as_dict()["logprob"] is None


@pytest.mark.parametrize("n", [0, 3, MAX_LOGPROBS, np.int64(3), None])
def test_numbers_that_may_be_asked_for(n):
    found = checked_logprobs(n)
    assert found == n and type(found) in (int, type(None))


@pytest.mark.parametrize("n", [-1, MAX_LOGPROBS + 1, True, 1.0, "3", math.nan])
def test_numbers_that_may_not(n):
    with pytest.raises(UsageError, match=r"logprobs is .*; allowed: integers from 0 to 1024"):
        checked_logprobs(n)
