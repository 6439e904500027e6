"""The identity of a graph. Equal params => the same jaxpr => the same executable.

Nothing else may change a trace: builders read no global, no environment variable and no length
of a Python list that is not fixed for the model or the context.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minfer_jax.sampling.in_graph import SamplerKind


class GType(enum.Enum):
    """What kind of work a graph does."""

    DECODE = "decode"
    """No sequence has more than one row."""
    DECODE_LOOP = "decode_loop"
    """Several such steps, each fed with the tokens that the one before it chose."""
    PREFILL = "prefill"
    ENCODE = "encode"
    """Rows attend to each other, and nothing is remembered."""


@dataclass(frozen=True, kw_only=True)
class CParams:
    """The part that a context fixes. Every field is topology: changing one is a recompilation."""

    n_ctx: int
    """Cells of the KV regions: the context's size rounded up to the attention block, so that
    contexts that differ by less share their graphs."""
    backend: str = "cpu"
    """The device's platform: how much of a matrix is dequantized at a time."""
    flash_attn: bool = True
    """Attention form: online softmax over the cells in use, or masked over the whole region."""
    fuse_qkv: bool = True
    """One product for Q, K and V, or what else reads a layer's input, as far as types are equal."""
    fuse_ffn: bool = True
    """One product for gate and up if their types are equal."""
    kv_format: tuple[str, str] = ("f16", "f16")
    """Types of the K and the V regions."""
    kv_map: bool = False
    """What rows see is told by a map of the cells; without it every row sees one run of cells."""
    embd_input: bool = False
    """Rows are embeddings, not tokens."""
    embeddings: bool = False
    """What comes out are the hidden states behind the last norm, not logits."""
    exact: bool = False
    """Full float32 products on every backend."""
    sampler: SamplerKind | None = None
    """What chooses tokens in the graph, which then come out instead of logits."""


@dataclass(frozen=True, kw_only=True)
class GraphParams:
    """The static argument of every graph. Every field is topology."""

    n_tokens: int
    """Rows of every activation: the bucket, not the exact count."""
    n_out: int
    """Rows that reach the last layer's FFN and the head: `n_tokens`, or fewer if that will do."""
    gtype: GType
    cparams: CParams
    weights_version: int = 0
    """Bumped whenever the weights are exchanged: every cached graph becomes a miss."""

    def leaves(self) -> Iterator[tuple[str, object]]:
        """Field names and values, those of `cparams` included."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, CParams):
                yield from ((f.name, getattr(value, f.name)) for f in fields(value))
            else:
                yield field.name, value

    def differing(self, other: GraphParams) -> tuple[str, ...]:
        """Names of the fields in which the two differ."""
        pairs = zip(self.leaves(), other.leaves(), strict=True)
        return tuple(name for (name, a), (_, b) in pairs if a != b)

    def __str__(self) -> str:
        return " ".join(
            f"{name}={value.value if isinstance(value, GType) else value}"
            for name, value in self.leaves()
        )
