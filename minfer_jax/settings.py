"""The one module that reads environment variables.

Everything else gets a frozen `Settings`. It is read at the edge (command line, `load`) and
never inside a graph builder: a graph is a function of its `GraphParams` alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

DEMO_MODEL = "smollm2"
MAX_THREADS = 1024
"""More CPU threads than this are taken for a slip."""


def client_threads(env: Mapping[str, str] | None = None) -> int | None:
    """The threads that jax's CPU client is told to have, at least 1; None: one for each CPU.

    `PJRT_NPROC`, else `NPROC`, as XLA reads them: a decimal number of 32 bits, or nothing.
    """
    env = os.environ if env is None else env
    for name in ("PJRT_NPROC", "NPROC"):
        text = env.get(name, "").strip()
        if re.fullmatch("[+-]?[0-9]{1,10}", text) and -(2**31) <= int(text) < 2**31:
            return max(1, int(text))
    return None


def libtpu_flags(env: Mapping[str, str] | None = None) -> str:
    """`LIBTPU_INIT_ARGS`: flags of XLA's compiler for TPUs, which are not among `XLA_FLAGS`."""
    env = os.environ if env is None else env
    return env.get("LIBTPU_INIT_ARGS", "")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the environment asks for. All fields are host-side; none is a graph's identity."""

    home: Path
    """Where models and compiled graphs are cached: `MINFER_HOME`, else the platform's cache."""
    model: str = DEMO_MODEL
    """The model used when none is named: `MINFER_MODEL`, else the demo model."""
    timing: bool = False
    """`MINFER_TIMING=1`: one line on stderr for every ubatch."""
    rebuild_trace: bool = False
    """`MINFER_REBUILD_TRACE=1`: one line on stderr for every graph that is built, with why."""
    verify_graph: bool = False
    """`MINFER_VERIFY_GRAPH=1`: trace every new graph twice and compare the jaxprs."""
    batch_debug: bool = False
    """`MINFER_BATCH_DEBUG=1`: a line on stderr for every ubatch that a batch is split into."""
    reuse_disabled: bool = False
    """`MINFER_GRAPH_REUSE_DISABLE=1`: build a graph for every ubatch, to measure reuse."""
    fuse_qkv: bool = True
    """`MINFER_NO_FUSE_QKV=1` turns the joined Q, K, V product off."""
    fuse_ffn: bool = True
    """`MINFER_NO_FUSE_FFN=1` turns the joined gate and up product off."""

    kernels: str = "auto"
    """`MINFER_KERNELS`: the native kernels' variant (avx512, avx2, portable), `xla` for none."""

    @property
    def models_dir(self) -> Path:
        return self.home / "models"

    @property
    def xla_dir(self) -> Path:
        return self.home / "xla"

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        env = os.environ if env is None else env

        def flag(name: str) -> bool:
            return env.get(name, "") not in ("", "0")

        home = env.get("MINFER_HOME")
        return cls(
            home=Path(home).expanduser()
            if home
            else Path(platformdirs.user_cache_dir("minfer_jax")),
            model=env.get("MINFER_MODEL") or DEMO_MODEL,
            timing=flag("MINFER_TIMING"),
            rebuild_trace=flag("MINFER_REBUILD_TRACE"),
            verify_graph=flag("MINFER_VERIFY_GRAPH"),
            batch_debug=flag("MINFER_BATCH_DEBUG"),
            reuse_disabled=flag("MINFER_GRAPH_REUSE_DISABLE"),
            fuse_qkv=not flag("MINFER_NO_FUSE_QKV"),
            fuse_ffn=not flag("MINFER_NO_FUSE_FFN"),
            kernels=env.get("MINFER_KERNELS") or "auto",
        )
