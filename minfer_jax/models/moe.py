"""Mixtures of experts in a file: their hyperparameters and the tensors of a layer. No jax here.

The graph's part is `Forward.moe`.
"""

from __future__ import annotations

from minfer_jax.errors import ModelError
from minfer_jax.gguf import GGUFFile
from minfer_jax.models.hparams import Gating, HParams, MoEParams
from minfer_jax.models.tensors import TensorList, TensorSpec

_GATINGS: tuple[Gating, ...] = ("softmax", "sigmoid")
"""What `expert_gating_func` 1 and 2 stand for."""
_MAX_EXPERTS = 1 << 12
_MAX_WIDTH = 1 << 24


def read_moe(
    file: GGUFFile,
    n_ff: int,
    *,
    gating: Gating = "softmax",
    normalize: bool = False,
) -> MoEParams | None:
    """The `*.expert_*` keys, or None for a file without experts.

    `n_ff` is the width of an expert whose file gives none; `gating` and `normalize` are what the
    family does unless the file says otherwise. Raises `GGUFError` for a key out of range and
    `ModelError` for a combination that no graph here implements.
    """
    arch = file.get_str("general.architecture")
    key = f"{arch}.expert"
    n_expert = file.get_int(f"{key}_count", 0, lo=0, hi=_MAX_EXPERTS)
    if not n_expert:
        return None
    n_group = file.get_int(f"{key}_group_count", 1, lo=0, hi=n_expert) or 1
    if n_expert % n_group:
        raise ModelError(f"{file.path}: {n_expert} experts do not make {n_group} equal groups")
    n_used = file.get_int(f"{key}_used_count", lo=1, hi=n_expert)
    n_group_used = 1
    if n_group > 1:
        n_group_used = file.get_int(f"{key}_group_used_count", lo=1, hi=n_group)
    if n_used > n_expert // n_group * n_group_used:
        raise ModelError(
            f"{file.path}: {n_group_used} of {n_group} groups have fewer experts than the {n_used}"
            " that a token uses"
        )
    n_ff_exp = file.get_int(f"{key}_feed_forward_length", n_ff, lo=1, hi=_MAX_WIDTH)
    return MoEParams(
        n_expert=n_expert,
        n_expert_used=n_used,
        n_ff_exp=n_ff_exp,
        n_ff_shexp=_shared_width(file, key, n_ff_exp),
        gating=_gating(file, key, gating),
        normalize=file.get_bool(f"{key}_weights_norm", normalize),
        # 0 is what files say that mean no factor.
        scale=file.get_float(f"{key}_weights_scale", 1.0, lo=0.0, hi=1e6) or 1.0,
        n_group=n_group,
        n_group_used=n_group_used,
        joined=any(name.endswith(".ffn_gate_up_exps.weight") for name in file.tensors),
        n_dense=file.get_int(f"{arch}.leading_dense_block_count", 0, lo=0, hi=1 << 16),
    )


def _shared_width(file: GGUFFile, key: str, n_ff_exp: int) -> int:
    """Width of the shared experts, which are one: as it stands, or as so many ordinary ones."""
    count = file.get_int(f"{key}_shared_count", 0, lo=0, hi=_MAX_EXPERTS)
    width = file.get_int(f"{key}_shared_feed_forward_length", 0, lo=0, hi=_MAX_WIDTH)
    return width or count * n_ff_exp


def _gating(file: GGUFFile, key: str, default: Gating) -> Gating:
    number = file.get_int(f"{key}_gating_func", 0, lo=0, hi=1 << 16)
    if number > len(_GATINGS):
        raise ModelError(
            f"{file.path}: {key}_gating_func {number} is not supported"
            " (1, softmax, and 2, sigmoid, are)"
        )
    return _GATINGS[number - 1] if number else default


def moe_tensors(hp: HParams, il: int) -> TensorList:
    """What `Forward.moe` reads of layer `il`."""
    moe = hp.moe
    assert moe is not None
    n, width, shared = moe.n_expert, moe.n_ff_exp, moe.n_ff_shexp
    shapes: dict[str, tuple[int, ...]] = {"ffn_gate_inp": (n, hp.n_embd)}
    if moe.joined:
        shapes["ffn_gate_up_exps"] = (n, 2 * width, hp.n_embd)
    else:
        shapes["ffn_gate_exps"] = shapes["ffn_up_exps"] = (n, width, hp.n_embd)
    shapes["ffn_down_exps"] = (n, hp.n_embd, width)
    blk = f"blk.{il}"
    optional = [TensorSpec(f"{blk}.exp_probs_b.bias", (n,), required=False)]
    groups = []
    if shared:
        shapes["ffn_gate_shexp"] = shapes["ffn_up_shexp"] = (shared, hp.n_embd)
        shapes["ffn_down_shexp"] = (hp.n_embd, shared)
        name = f"{blk}.ffn_gate_inp_shexp.weight"
        optional.append(TensorSpec(name, (hp.n_embd,), required=False))
        groups.append((f"{blk}.ffn_gate_shexp.weight", f"{blk}.ffn_up_shexp.weight"))
    specs = [TensorSpec(f"{blk}.{name}.weight", shape) for name, shape in shapes.items()]
    return TensorList((*specs, *optional), tuple(groups))
