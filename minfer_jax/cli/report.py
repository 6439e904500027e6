"""The run report: where the time of one generation went, as lines or as one JSON object."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from minfer_jax.cli.request import Request
from minfer_jax.generate import Generation
from minfer_jax.graph.cache import GraphCounters
from minfer_jax.lm import LanguageModel
from minfer_jax.memory.plan import MemoryPlan
from minfer_jax.sampling.logprobs import TokenLogprobs


@dataclass
class FirstToken:
    """Where the time up to the first token went: `before` the loop, and in it."""

    lm: LanguageModel
    run: Generation
    before: Mapping[str, float]
    """Seconds by stage, in order."""
    _graphs: GraphCounters | None = None

    def watch(self) -> None:
        """To be called before every step, so that graphs of later tokens are told apart."""
        if self._graphs is None and self.run.stats.n_generated:
            self._graphs = replace(self.lm.counters)

    def stages(self) -> dict[str, float]:
        """Seconds by stage, in order: they add up to the whole."""
        s, graphs = self.run.stats, self._graphs or self.lm.counters
        inner = {
            "trace": graphs.trace_seconds,
            "compile" if graphs.disk_hits < graphs.built else "load": graphs.compile_seconds,
            "prefill": s.prefill_s,
        }
        # The KV regions, the first choice of a token and the loop itself.
        inner["rest"] = max(0.0, s.ttft_s - sum(inner.values()))
        return {**self.before, **inner}


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """One finished run."""

    lm: LanguageModel
    request: Request
    run: Generation
    text: str
    stages: Mapping[str, float]
    """Seconds by stage up to the first token, from the start of the process if it is known."""

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
            *map(_logprobs, self.run.logprobs),
            f"Prefill: {s.n_prompt} tokens in {s.prefill_s:.2f} s ({s.prefill_tps:.1f} t/s)",
            f"Generated: {s.n_generated} tokens in {s.decode_s:.2f} s ({s.decode_tps:.1f} t/s),"
            f" {s.n_decoded} decode steps",
            f"{'Time to first token' if s.n_generated else 'Start-up'}: {_sum(self.stages)}",
            f"Graphs: {_counters(c)}",
            f"Memory: {_memory(self.lm.memory_plan)}",
            f"Sampling: {self._sampling()}",
            f"Device: {self.lm.model.device.platform}; seed {self.run.seed};"
            f" stopped by {self.run.finish_reason}",
        ]

    def as_dict(self) -> dict[str, Any]:
        """For programs. Times in seconds, rates in tokens per second."""
        s, grammar = self.run.stats, self.request.grammar
        logprobs = [entry.as_dict() for entry in self.run.logprobs]
        return {
            "model": str(self.lm.path),
            "device": self.lm.model.device.platform,
            "text": self.text,
            "ids": self.run.ids,
            "finish_reason": self.run.finish_reason,
            "seed": self.run.seed,
            "samplers": list(self.request.sampling.samplers),
            "in_graph": self.run.in_graph,
            "grammar": grammar and grammar.kind,
            **({"notes": list(self.run.notes)} if self.run.notes else {}),
            **({} if self.request.logprobs is None else {"logprobs": logprobs}),
            "n_ctx": self.lm.n_ctx,
            "memory": self.lm.memory_plan.as_dict(),
            "n_prompt": s.n_prompt,
            "n_generated": s.n_generated,
            "prefill_s": round(s.prefill_s, 4),
            "prefill_tps": round(s.prefill_tps, 2),
            "decode_s": round(s.decode_s, 4),
            "decode_tps": round(s.decode_tps, 2),
            "ttft_s": round(s.ttft_s, 4),
            "load_s": round(self.lm.load_seconds.open + self.lm.load_seconds.pack, 4),
            "build_s": round(s.build_s, 4),
            "stages": {name: round(seconds, 4) for name, seconds in self.stages.items()},
            "graphs": self.lm.counters.as_dict(),
        }

    def _sampling(self) -> str:
        """What ran, without the samplers that were off."""
        params, grammar = self.request.sampling, self.request.grammar
        steps = [*params.steps, *(["greedy"] if params.greedy else [])]
        where = "; in the graph" if self.run.in_graph else ""
        return ", ".join(steps) + where + (f"; grammar: {grammar.kind}" if grammar else "")


def _logprobs(token: TokenLogprobs) -> str:
    top = ", ".join(f"{text!r} {logprob:.4f}" for _, text, logprob in token.top)
    return f"Logprob: {token.logprob:.4f} {token.id} {token.text!r}; likeliest: {top}"


def _sum(stages: Mapping[str, float]) -> str:
    parts = " + ".join(f"{name} {seconds:.2f}" for name, seconds in stages.items())
    since = "" if "start" in stages else " (without Python's own start)"
    return f"{sum(stages.values()):.2f} s = {parts}{since}"


def _memory(plan: MemoryPlan) -> str:
    parts = [f"{plan.nbytes / 2**20:.1f} MiB"]
    if plan.caches:
        k, v = plan.caches[0].types
        parts.append(f"K {k} and V {v}, {plan.bytes_per_cell / 1024:.1f} KiB a token")
    if plan.recurrent:
        parts.append(f"states of {plan.recurrent.bytes_per_slot / 1024:.1f} KiB a sequence")
    return ", ".join(parts)


def _counters(c: GraphCounters) -> str:
    why = ", ".join(f"{field} {n}" for field, n in c.rebuilt_by.most_common())
    return (
        f"{c.built} built ({c.disk_hits} of them from disk), {c.reused} reused,"
        f" {c.evicted} evicted; built for: {why or 'nothing'}"
    )
