"""The run report: where the time of one generation went, as lines or as one JSON object."""

from __future__ import annotations

import json as jsonlib
import sys
from dataclasses import dataclass
from typing import Any

from minfer_jax.generate import Generation
from minfer_jax.graph.cache import GraphCounters
from minfer_jax.lm import LanguageModel


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """One finished run."""

    lm: LanguageModel
    run: Generation
    text: str
    load_seconds: float
    """Opening the file, starting jax and packing the weights."""

    def print(self, *, json: bool) -> None:
        """Lines on stderr, or with `json` the text and all figures as one object on stdout."""
        if json:
            print(jsonlib.dumps(self.as_dict(), ensure_ascii=False))
        else:
            print("\n".join(self.lines()), file=sys.stderr)

    def lines(self) -> list[str]:
        """For people. Rates leave out the building of graphs."""
        s, c = self.run.stats, self.lm.counters
        return [
            f"Prefill: {s.n_prompt} tokens in {s.prefill_s:.2f} s ({s.prefill_tps:.1f} t/s)",
            f"Generated: {s.n_generated} tokens in {s.decode_s:.2f} s ({s.decode_tps:.1f} t/s),"
            f" {s.n_decoded} decode steps",
            f"Time to first token: {s.ttft_s:.2f} s after {self.load_seconds:.2f} s of loading"
            f" ({s.build_s:.2f} s in all went to graphs)",
            f"Graphs: {_counters(c)}",
            f"Device: {self.lm.model.device.platform}; seed {self.run.seed};"
            f" stopped by {self.run.finish_reason}",
        ]

    def as_dict(self) -> dict[str, Any]:
        """For programs. Times in seconds, rates in tokens per second."""
        s = self.run.stats
        return {
            "model": str(self.lm.path),
            "device": self.lm.model.device.platform,
            "text": self.text,
            "ids": self.run.ids,
            "finish_reason": self.run.finish_reason,
            "seed": self.run.seed,
            "n_ctx": self.lm.n_ctx,
            "n_prompt": s.n_prompt,
            "n_generated": s.n_generated,
            "prefill_s": round(s.prefill_s, 4),
            "prefill_tps": round(s.prefill_tps, 2),
            "decode_s": round(s.decode_s, 4),
            "decode_tps": round(s.decode_tps, 2),
            "ttft_s": round(s.ttft_s, 4),
            "load_s": round(self.load_seconds, 4),
            "build_s": round(s.build_s, 4),
            "graphs": self.lm.counters.as_dict(),
        }


def _counters(c: GraphCounters) -> str:
    why = ", ".join(f"{field} {n}" for field, n in c.rebuilt_by.most_common())
    return (
        f"{c.built} built ({c.disk_hits} of them from disk), {c.reused} reused,"
        f" {c.evicted} evicted; built for: {why or 'nothing'}"
    )
