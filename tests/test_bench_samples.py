"""Figures of repetitions, worked by hand."""

import pytest

from minfer_jax.bench.samples import Samples


def test_figures_of_three_repetitions():
    figures = Samples(100, (1_000_000_000, 2_000_000_000, 4_000_000_000)).figures()
    assert figures["samples_ns"] == [1_000_000_000, 2_000_000_000, 4_000_000_000]
    assert figures["samples_ts"] == [100.0, 50.0, 25.0]
    assert figures["avg_ns"] == 2_333_333_333
    assert figures["avg_ts"] == pytest.approx(175 / 3)
    assert figures["median_ts"] == 50.0
    # Squared distances from 175/3: 1736.11, 69.44, 1111.11; over n - 1 = 2.
    assert figures["stddev_ts"] == pytest.approx((2916.6667 / 2) ** 0.5)
    # The same in units of a third of a second: 16, 1, 25.
    assert figures["stddev_ns"] == round((42 / 9 / 2) ** 0.5 * 1e9)


def test_one_repetition_has_no_deviation():
    figures = Samples(8, (4_000_000,)).figures()
    assert (figures["avg_ts"], figures["median_ts"]) == (2000.0, 2000.0)
    assert (figures["stddev_ns"], figures["stddev_ts"]) == (0, 0.0)
