"""What families share whose layers are of several kinds: which layers attend, and the tensors of
each kind. No jax here.
"""

from __future__ import annotations

from collections.abc import Iterable

from minfer_jax.errors import ModelError
from minfer_jax.gguf import GGUFFile
from minfer_jax.models.hparams import HParams, read_layered_int
from minfer_jax.models.tensors import TensorList, TensorSpec


def attending_layers(file: GGUFFile, hp: HParams) -> tuple[bool, ...]:
    """Which layers have key heads: a list in the file gives the others none.

    Raises `ModelError` if those that have some differ in their heads.
    """
    key = f"{hp.arch}.attention.head_count"
    queries = read_layered_int(file, key, hp.n_layer, hi=hp.n_head)
    if f"{key}_kv" in file.metadata:
        keys = read_layered_int(file, f"{key}_kv", hp.n_layer, hi=hp.n_head)
    else:
        keys = queries
    for il, heads in enumerate(zip(queries, keys, strict=True)):
        if heads[1] and heads != (hp.n_head, hp.n_head_kv):
            raise ModelError(
                f"{file.path}: layer {il} has {heads[0]} query and {heads[1]} key heads and another"
                f" one {hp.n_head} and {hp.n_head_kv}; layers must be alike"
            )
    return tuple(n > 0 for n in keys)


def tensor_list(*parts: TensorList, ignored: Iterable[str] = ()) -> TensorList:
    """The tensors of all parts."""
    return TensorList(
        specs=tuple(spec for part in parts for spec in part.specs),
        groups=tuple(group for part in parts for group in part.groups),
        ignored=tuple(ignored),
    )


def outer_tensors(hp: HParams, *, norm: str = "output_norm") -> TensorList:
    """Embeddings, final norm and head."""
    specs = (
        TensorSpec("token_embd.weight", (hp.n_vocab, hp.n_embd)),
        TensorSpec(f"{norm}.weight", (hp.n_embd,)),
        TensorSpec("output.weight", (hp.n_vocab, hp.n_embd), required=False),
    )
    return TensorList(specs)


def norm_tensors(il: int, *norms: tuple[str, int]) -> TensorList:
    """Norms (name, width) of layer `il`."""
    return TensorList(tuple(TensorSpec(f"blk.{il}.{name}.weight", (n,)) for name, n in norms))


def attention_tensors(hp: HParams, il: int, *, output_bias: bool = False) -> TensorList:
    """Q, K and V, each with an optional bias, and the output, of layer `il`."""
    shapes = {
        "attn_q": (hp.n_head * hp.head_dim_k, hp.n_embd),
        "attn_k": (hp.n_head_kv * hp.head_dim_k, hp.n_embd),
        "attn_v": (hp.n_head_kv * hp.head_dim_v, hp.n_embd),
        "attn_output": (hp.n_embd, hp.n_head * hp.head_dim_v),
    }
    bias = ("attn_q", "attn_k", "attn_v", *(("attn_output",) if output_bias else ()))
    return _matrices(il, shapes, bias, ("attn_q", "attn_k", "attn_v"))


def ffn_tensors(hp: HParams, il: int, *, bias: bool = False, gated: bool = True) -> TensorList:
    """The feed-forward of layer `il`, with optional biases."""
    shapes = {"ffn_gate": (hp.n_ff, hp.n_embd)} if gated else {}
    shapes |= {"ffn_up": (hp.n_ff, hp.n_embd), "ffn_down": (hp.n_embd, hp.n_ff)}
    return _matrices(il, shapes, shapes if bias else (), ("ffn_gate", "ffn_up") if gated else ())


def _matrices(
    il: int, shapes: dict[str, tuple[int, int]], bias: Iterable[str], joined: tuple[str, ...]
) -> TensorList:
    blk = f"blk.{il}"
    specs = [TensorSpec(f"{blk}.{name}.weight", shape) for name, shape in shapes.items()]
    specs += [TensorSpec(f"{blk}.{name}.bias", shapes[name][:1], required=False) for name in bias]
    group = tuple(f"{blk}.{name}.weight" for name in joined)
    return TensorList(tuple(specs), (group,) if group else ())
