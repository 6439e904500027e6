"""Tokens per second over the values of one flag, as a PNG or SVG file."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from minfer_jax.errors import MinferError, UsageError

SUFFIXES = (".png", ".svg")

_TITLES = {"pp": "prefill", "tg": "decode"}
_INK, _GRID = "#333333", "#dddddd"
_OURS, _PEER = "#1f5fa8", "#d06a1b"


class Point(NamedTuple):
    """Median and sample standard deviation, both in tokens per second."""

    value: int
    median: float
    stddev: float


def check_plot(path: Path) -> None:
    """Raise `UsageError` or `MinferError` if no plot could be written to `path`."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {path}: the name must end with {' or '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot {path}: no folder {path.absolute().parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise MinferError("--plot needs matplotlib: pip install 'minfer-jax[bench]'")


def lines(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, dict[str, list[Point]]]:
    """Kind of test (pp512, tg128) -> whose line ("minfer-jax" or the peer's name) -> points.

    `key` is the row's key that the sweep has changed.
    """
    found: dict[str, dict[str, list[Point]]] = {}
    for row in rows:
        kind = f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"
        sides = [("minfer-jax", row)]
        if "peer" in row:
            sides.append((row["peer"]["name"], row["peer"]))
        for name, figures in sides:
            point = Point(row[key], figures["median_ts"], figures["stddev_ts"])
            found.setdefault(kind, {}).setdefault(name, []).append(point)
    return found


def save_plot(path: Path, rows: Sequence[Mapping[str, Any]], key: str) -> None:
    """One panel for prefill and one for decode: medians, with bars of one standard deviation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_kind = lines(rows, key)
    panels = [prefix for prefix in _TITLES if any(kind.startswith(prefix) for kind in by_kind)]
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(1 + 4.5 * len(panels), 4), squeeze=False, layout="constrained"
    )
    for prefix, axis in zip(panels, axes[0], strict=True):
        _panel(axis, {k: v for k, v in by_kind.items() if k.startswith(prefix)})
        axis.set(title=_TITLES[prefix], xlabel=key, ylabel="tokens per second")
        axis.set_ylim(bottom=0)
    figure.suptitle(f"{rows[0]['model_type']}, {rows[0]['cpu_info']}", color=_INK)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _panel(axis: Any, kinds: Mapping[str, Mapping[str, Sequence[Point]]]) -> None:
    values = sorted({p.value for kind in kinds.values() for side in kind.values() for p in side})
    markers = iter("osD^v<>P*X" * len(kinds))
    for kind, sides in kinds.items():
        marker = next(markers)
        for name, points in sides.items():
            ours = name == "minfer-jax"
            axis.errorbar(
                [values.index(p.value) for p in points],
                [p.median for p in points],
                [p.stddev for p in points],
                label=f"{name} {kind}",
                color=_OURS if ours else _PEER,
                linestyle="-" if ours else "--",
                marker=marker,
                capsize=3,
            )
    # Evenly spaced: the values of a sweep are mostly powers of two.
    axis.set_xticks(range(len(values)), [str(value) for value in values])
    axis.grid(axis="y", color=_GRID)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
