"""Measurements as a table, CSV or JSON, spelled as llama-bench spells them.

Works on rows, flat dicts of llama-bench's keys and ours, so that what a process has measured and
what it was told by others print alike.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minfer_jax.bench.workload import gen_name

if TYPE_CHECKING:  # both start jax, which a sweep's printer does without
    from minfer_jax.bench.profile import Profile
    from minfer_jax.bench.run import Measurement

Row = Mapping[str, Any]


def as_row(setup: Row, measured: Measurement, peer: Row | None = None) -> dict[str, Any]:
    """One test. `setup` are the keys that all tests share, `peer` the name and version of the
    other side, if there was one."""
    workload = measured.workload
    row = {
        **setup,
        "n_prompt": workload.n_prompt,
        "n_gen": workload.n_gen,
        "n_depth": workload.n_depth,
        "sampling": workload.sampling,
        "test_time": measured.test_time,
        **measured.ours.figures(),
        "compile_s": round(measured.compile_s, 3),
        "graphs_built": measured.graphs_built,
        "graphs_evicted": measured.graphs_evicted,
    }
    if measured.peer is not None:
        ratio = measured.ours.median_ts / measured.peer.median_ts
        row["peer"] = {**(peer or {}), **measured.peer.figures(), "ratio": ratio}
    return row


def as_json(rows: Sequence[Row]) -> str:
    """A list of objects."""
    return json.dumps(rows, indent=2, ensure_ascii=False)


def as_csv(rows: Sequence[Row]) -> str:
    """A line of keys, a line per test; the peer's are `peer_...`, lists are joined by spaces."""
    flat = [_flat(row) for row in rows]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue().rstrip("\n")


@dataclass(frozen=True)
class Column:
    """One column of a Markdown table."""

    title: str
    width: int
    """Characters; negative for text, which is set to the left."""
    text: Callable[[Row], str]


class MarkdownTable:
    """A Markdown table. Lines can be printed one by one, as tests end."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = columns

    def head(self) -> list[str]:
        rule = (f"{'-' * (abs(c.width) - 1)}{'-' if c.width < 0 else ':'}" for c in self._columns)
        return [self._line([c.title for c in self._columns]), f"| {' | '.join(rule)} |"]

    def row(self, row: Row) -> str:
        return self._line([c.text(row) for c in self._columns])

    def _line(self, texts: Sequence[str]) -> str:
        cells = [
            text.ljust(-c.width) if c.width < 0 else text.rjust(c.width)
            for c, text in zip(self._columns, texts, strict=True)
        ]
        return f"| {' | '.join(cells)} |"


def bench_table(*, show_ubatch: bool, peer: str | None) -> MarkdownTable:
    """llama-bench's columns, with the median and the peer's beside it."""
    columns = [
        Column("model", -24, lambda row: row["model_type"]),
        Column("size", 10, lambda row: _size(row["model_size"])),
        Column("params", 9, lambda row: _count(row["model_n_params"])),
        Column("backend", -8, lambda row: row["backends"]),
        Column("threads", 7, lambda row: str(row["n_threads"])),
    ]
    if show_ubatch:
        columns.append(Column("n_ubatch", 8, lambda row: str(row["n_ubatch"])))
    columns += [
        Column("test", 14, name_of),
        Column("t/s", 17, lambda row: f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}"),
        Column("median", 9, lambda row: f"{row['median_ts']:.2f}"),
    ]
    if peer:
        columns += [
            Column(peer, len(peer), lambda row: f"{row['peer']['median_ts']:.2f}"),
            Column("ratio", 6, lambda row: f"{row['peer']['ratio']:.2f}x"),
        ]
    return MarkdownTable(columns)


def head_lines(setup: Row) -> list[str]:
    """What stands above the table: what a sweep leaves as it is."""
    gpu = f"; {setup['gpu_info']}" if setup["gpu_info"] else ""
    load = "" if setup["load_average"] is None else f"; load {setup['load_average']:.2f} before"
    return [
        f"machine: {setup['cpu_info']} ({setup['cpu_flags'] or 'flags unknown'}){gpu}{load}",
        f"versions: minfer-jax {setup['build_commit']}, jax {setup['jax_version']},"
        f" jaxlib {setup['jaxlib_version']}",
        f"model: {setup['model_filename']}; KV {setup['type_k']}/{setup['type_v']}"
        f"{', exact' if setup['exact'] else ''}",
        f"flags: {setup['flags']}",
    ]


def foot_lines(rows: Sequence[Row]) -> list[str]:
    """What stands below the table: memory, graphs, bandwidth."""
    lines = []
    if peak := max((row.get("peak_memory_bytes") or 0 for row in rows), default=0):
        lines.append(f"peak memory: {_size(peak)}")
    lines.append(
        f"graphs: {sum(row['graphs_built'] for row in rows)} built in"
        f" {sum(row['compile_s'] for row in rows):.2f} s (in no other figure),"
        f" {sum(row['graphs_evicted'] for row in rows)} evicted"
    )
    lines += _gains(rows)
    for row in rows:
        if row.get("bandwidth_fraction") is not None:
            lines.append(
                f"{name_of(row)}, {row['n_threads']} threads:"
                f" {row['bytes_per_token'] / 1e6:.1f} MB a token x {row['median_ts']:.2f} t/s"
                f" = {row['bytes_per_token'] * row['median_ts'] / 1e9:.2f} GB/s,"
                f" {100 * row['bandwidth_fraction']:.0f}% of the {row['bandwidth_gbs']:.1f} GB/s"
                " that they read"
            )
    return lines


def _gains(rows: Sequence[Row]) -> list[str]:
    """What choosing tokens in the graph gave over choosing them on the host, at equal sizes."""
    host = {(r["n_gen"], r["n_depth"]): r for r in rows if r.get("sampling") == "host"}
    lines = []
    for row in rows:
        other = host.get((row.get("n_gen"), row.get("n_depth")))
        if row.get("sampling") == "loop" and other is not None:
            gain = row["median_ts"] / other["median_ts"]
            lines.append(f"{name_of(row)}: {gain:.2f}x of {name_of(other)}")
    return lines


def profile_lines(profile: Profile) -> list[str]:
    """The decode step by node, as a table."""
    width = max(17, *(len(node.name) for node in profile.nodes))
    depth = f" at depth {profile.n_depth}" if profile.n_depth else ""

    def line(name: str, calls: str, us: str, share: str) -> str:
        return f"| {name:{width}} | {calls:>8} | {us:>11} | {share:>9} |"

    lines = [
        f"decode step{depth}: {profile.step_us / 1e3:.3f} ms;"
        f" {profile.traced_us / 1e3:.3f} ms while traced, as below; mean of {profile.steps} steps",
        "",
        line("node", "calls", "us per step", "% of step"),
        f"| {'-' * width} | {'-' * 7}: | {'-' * 10}: | {'-' * 8}: |",
    ]
    rows = [(node.name, f"{node.calls:.1f}", node.us) for node in profile.nodes]
    for name, calls, us in [*rows, ("(no node running)", "", profile.idle_us)]:
        lines.append(line(name, calls, f"{us:.1f}", f"{100 * us / profile.traced_us:.1f}"))
    return lines


def name_of(row: Row) -> str:
    """As `Workload.name`."""
    n_prompt = row["n_prompt"]
    kind = f"pp{n_prompt}" if n_prompt else gen_name(row["n_gen"], row["sampling"])
    return kind + (f" @ d{row['n_depth']}" if row["n_depth"] else "")


def _flat(row: Row) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat |= {f"{key}_{k}": v for k, v in _flat(value).items()}
        elif isinstance(value, list):
            flat[key] = " ".join(map(str, value))
        else:
            flat[key] = value
    return flat


def _size(nbytes: int) -> str:
    mib = nbytes / 2**20
    return f"{mib:.2f} MiB" if mib < 1024 else f"{mib / 1024:.2f} GiB"


def _count(n: int) -> str:
    return f"{n / 1e6:.2f} M" if n < 1e9 else f"{n / 1e9:.2f} B"
