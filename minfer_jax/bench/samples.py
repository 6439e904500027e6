"""The times of one test's repetitions, and what is made of them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass


@dataclass(frozen=True)
class Samples:
    """`ns`: nanoseconds of each repetition of a test of `n_tokens` tokens."""

    n_tokens: int
    ns: tuple[int, ...]

    @property
    def ts(self) -> list[float]:
        """Tokens per second of each repetition."""
        return [1e9 * self.n_tokens / ns for ns in self.ns]

    @property
    def median_ts(self) -> float:
        return statistics.median(self.ts)

    def figures(self) -> dict[str, int | float | list[int] | list[float]]:
        """llama-bench's figures, and the median, which one slow repetition does not move.

        Standard deviations are those of a sample; 0 for a single repetition.
        """
        return {
            "avg_ns": round(statistics.fmean(self.ns)),
            "stddev_ns": round(_stddev(self.ns)),
            "avg_ts": statistics.fmean(self.ts),
            "stddev_ts": _stddev(self.ts),
            "median_ts": self.median_ts,
            "samples_ns": list(self.ns),
            "samples_ts": self.ts,
        }


def _stddev(values: tuple[int, ...] | list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
