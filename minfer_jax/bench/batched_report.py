"""Rows and table of several sequences at once, spelled as llama-batched-bench spells them.

Works on rows, as `report` does, whose CSV, JSON and lines above and below are theirs, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minfer_jax.bench.report import Column, MarkdownTable, Row, foot_lines

if TYPE_CHECKING:  # starts jax
    from minfer_jax.bench.batched import BatchedMeasurement, BatchedSamples, ForkCost


def batched_row(setup: Row, measured: BatchedMeasurement, peer: Row | None = None) -> dict:
    """One test. `setup` are the keys that all tests share, `peer` the name and version of the
    other side, if there was one. Times are seconds, speeds tokens per second, medians both."""
    test, ours = measured.test, measured.ours
    row = {
        **setup,
        "n_ctx": measured.n_ctx,
        "is_pp_shared": int(test.shared),
        "kv_unified": int(test.unified),
        "pp": test.n_prompt,
        "tg": test.n_gen,
        "pl": test.n_seq,
        "n_kv": test.n_kv,
        "test_time": measured.test_time,
        **_figures(ours),
        "compile_s": round(measured.compile_s, 3),
        "graphs_built": measured.graphs_built,
        "graphs_evicted": measured.graphs_evicted,
    }
    if measured.peer is not None:
        row["peer"] = {
            **(peer or {}),
            **_figures(measured.peer),
            "ratio_pp": ours.prefill.median_ts / measured.peer.prefill.median_ts,
            "ratio_tg": ours.steps.median_ts / measured.peer.steps.median_ts,
        }
    return row


def speedup(row: Row, rows: Sequence[Row]) -> float | None:
    """By which all sequences together generate faster than one alone, which is in `rows` or `row`
    itself; None if one alone was not measured."""
    for other in (*rows, row):
        if other["pl"] == 1 and (other["pp"], other["tg"]) == (row["pp"], row["tg"]):
            return row["speed_tg"] / other["speed_tg"]
    return None


def fork_fields(cost: ForkCost) -> dict[str, Any]:
    """What a fork costs, as one value of a row."""
    return {
        "n_tokens": cost.n_tokens,
        "n_seq": cost.n_seq,
        "median_ns": round(statistics.median(cost.ns)),
        "samples_ns": list(cost.ns),
        "bytes": cost.nbytes,
    }


def batched_table(*, peer: str | None, with_speedup: bool) -> MarkdownTable:
    """llama-batched-bench's columns, the peer's beside them, and the speedup over one sequence."""
    columns = [
        Column("PP", 6, lambda row: str(row["pp"])),
        Column("TG", 6, lambda row: str(row["tg"])),
        Column("B", 4, lambda row: str(row["pl"])),
        Column("N_KV", 6, lambda row: str(row["n_kv"])),
    ]
    for key in ("pp", "tg", ""):
        columns += _time_and_speed(key)
    if peer:
        for key in ("pp", "tg"):
            columns += _peer_and_ratio(peer, key)
    if with_speedup:
        columns.append(Column("x B=1", 6, lambda row: f"{row['speedup']:.2f}x"))
    return MarkdownTable(columns)


def batched_head_lines(setup: Row, *, shared: bool, unified: bool, peer: Row | None) -> list[str]:
    """What belongs to all lines of the table and stands above it, below `head_lines`."""
    lines = [
        f"batched: {'one prompt for all sequences' if shared else 'a prompt for each sequence'},"
        f" {'unified cells' if unified else 'a stream for each sequence'};"
        f" {setup['backends']}, {setup['n_threads']} threads, n_batch {setup['n_batch']},"
        f" n_ubatch {setup['n_ubatch']}"
    ]
    if peer:
        lines.append(f"peer: {' '.join(peer.values())}")
    return lines


def batched_foot_lines(rows: Sequence[Row]) -> list[str]:
    """What stands below the table: `foot_lines`, and what a fork costs."""
    lines = foot_lines(rows)
    if fork := rows[-1].get("fork"):
        lines.append(
            f"fork: seq_cp of {fork['n_tokens']} tokens to {fork['n_seq']} sequences in unified"
            f" cells: {fork['median_ns'] / 1e6:.3f} ms, {fork['bytes']} bytes allocated"
        )
    return lines


def _figures(samples: BatchedSamples) -> dict[str, Any]:
    parts = {"pp": samples.prefill, "tg": samples.steps, "": samples.total}
    figures: dict[str, Any] = {}
    for key, part in parts.items():
        figures[_key("t", key)] = statistics.median(part.ns) / 1e9
        figures[_key("speed", key)] = part.median_ts
        figures[_key("stddev_speed", key)] = part.figures()["stddev_ts"]
    for key in ("pp", "tg"):
        figures[f"samples_{key}_ns"] = list(parts[key].ns)
    return figures


def _key(name: str, key: str) -> str:
    return f"{name}_{key}" if key else name


def _title(name: str, key: str) -> str:
    return _key(name, key.upper())


def _time_and_speed(key: str) -> list[Column]:
    time, speed, spread = (_key(name, key) for name in ("t", "speed", "stddev_speed"))
    return [
        Column(f"{_title('T', key)} s", 8, lambda row: f"{row[time]:.3f}"),
        Column(f"{_title('S', key)} t/s", 18, lambda row: f"{row[speed]:.2f} ± {row[spread]:.2f}"),
    ]


def _peer_and_ratio(peer: str, key: str) -> list[Column]:
    title = f"{peer} {_title('S', key)}"
    speed, ratio = f"speed_{key}", f"ratio_{key}"
    return [
        Column(title, len(title), lambda row: f"{row['peer'][speed]:.2f}"),
        Column("ratio", 6, lambda row: f"{row['peer'][ratio]:.2f}x"),
    ]
