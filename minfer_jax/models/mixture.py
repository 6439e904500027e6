"""The graph of a mixture of experts: who is asked, what they answer, and what all rows share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from minfer_jax.models.hparams import MoEParams
from minfer_jax.ops.experts import choose_experts

if TYPE_CHECKING:
    from minfer_jax.models.forward import Forward


def mixture(f: Forward, moe: MoEParams, il: int, x: Array) -> Array:
    """Of layer `il` with the tensors that `models.moe` names, on x [n, n_embd]: what the experts
    chosen for each row answer, weighted, and what the shared ones do: float32 [n, n_embd]."""
    blk = f"blk.{il}"
    gate_up = ("ffn_gate_up_exps",) if moe.joined else ("ffn_gate_exps", "ffn_up_exps")
    with jax.named_scope("ffn_exps"):
        ids, weights = _choice(f, moe, blk, x)
        names = [f"{blk}.{name}" for name in (*gate_up, "ffn_down_exps")]
        out = jnp.sum(f.expert_answers(x, ids, names) * weights[:, :, None], axis=1)
    return out + _shared(f, blk, x) if moe.n_ff_shexp else out


def _choice(f: Forward, moe: MoEParams, blk: str, x: Array) -> tuple[Array, Array]:
    """Experts and weights of the rows: int32 and float32 [n, k]."""
    bias = f"{blk}.exp_probs_b.bias"
    ids, weights = choose_experts(
        f.product(x, f"{blk}.ffn_gate_inp"),
        f.array(bias) if f.has(bias) else None,
        n_used=moe.n_expert_used,
        gating=moe.gating,
        normalize=moe.normalize,
        scale=moe.scale,
        n_group=moe.n_group,
        n_group_used=moe.n_group_used,
    )
    if x.shape[0] == f.seq.shape[0]:
        # Padding asks nobody: experts that no other row has chosen would be read for it.
        ids = jnp.where((f.seq >= 0)[:, None], ids, np.int32(moe.n_expert))
    return ids, weights


def _shared(f: Forward, blk: str, x: Array) -> Array:
    """The feed-forward of all rows, behind a gate of its own if the file has one."""
    with jax.named_scope("ffn_shexp"):
        gated = f.gated(x, [f"{blk}.ffn_gate_shexp", f"{blk}.ffn_up_shexp"])
        out = f.product(gated, f"{blk}.ffn_down_shexp")
        gate = f"{blk}.ffn_gate_inp_shexp.weight"
        if not f.has(gate):
            return out
        logit = jnp.sum(x * f.array(gate)[None, :], axis=1, keepdims=True)
        return out * jax.nn.sigmoid(logit)
