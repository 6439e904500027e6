"""`sampling.recent`: the last tokens and their counts."""

import sys
from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minfer_jax.sampling.recent import RecentTokens


@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(0, 12),
    st.integers(0, 12),
)
def test_it_is_a_deque_with_counts(before, after, window, more):
    keep = window + more
    recent = RecentTokens(before, keep=keep, window=window)
    expected, counted = deque(before, maxlen=keep), deque(before, maxlen=window)
    for token in after:
        recent.append(token)
        expected.append(token)
        counted.append(token)
        assert recent.counts == Counter(counted)
    assert recent.last(sys.maxsize).tolist() == list(expected)
    for n in range(15):
        assert recent.last(n).tolist() == list(expected)[max(0, len(expected) - n) :]


def test_a_count_of_zero_is_none():
    recent = RecentTokens([7, 8], keep=2, window=2)
    recent.append(8)
    assert dict(recent.counts) == {8: 2}


def test_everything():
    recent = RecentTokens(range(3000), keep=sys.maxsize, window=sys.maxsize)
    for token in range(3000):
        recent.append(token)
    assert recent.last(sys.maxsize).tolist() == [*range(3000)] * 2
    assert set(recent.counts.values()) == {2}


@pytest.mark.parametrize("keep", [0, 5, 64])
def test_what_it_holds_does_not_grow(keep):
    recent = RecentTokens(range(10_000), keep=keep, window=0)
    longest = len(recent._tokens)
    for token in range(10_000):
        recent.append(token)
        longest = max(longest, len(recent._tokens))
    assert keep <= longest < 2_000
    assert len(RecentTokens(range(10_000), keep=keep, window=0)._tokens) == keep
    assert recent.last(99).tolist() == list(range(10_000 - keep, 10_000))
    assert recent.counts == {}


def test_a_slice_is_a_copy():
    recent = RecentTokens([1, 2], keep=4, window=0)
    held = memoryview(recent.last(2))
    recent.append(3)
    assert held.tolist() == [1, 2]
