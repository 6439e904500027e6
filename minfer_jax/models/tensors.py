"""Which tensors a family needs, and the check of a file against that list. No jax here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minfer_jax.errors import ModelError
from minfer_jax.gguf import BLOCK_FORMATS, GGUFFile, TensorInfo
from minfer_jax.models.hparams import HParams


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that a family knows.

    `shape` is that of a matrix [out, in], of several below each other [n, out, in], or with `plain`
    of an array that is kept as float32 and never multiplied as a matrix. Vectors always are.
    """

    name: str
    shape: tuple[int, ...]
    required: bool = True
    plain: bool = False


@dataclass(frozen=True)
class TensorList:
    """All tensors of a family, and the groups that are multiplied with the same activations.

    The matrices of a group are joined row-wise into one packed array, as far as their types are
    equal, so that one product serves them all.
    """

    specs: tuple[TensorSpec, ...]
    groups: tuple[tuple[str, ...], ...] = ()
    ignored: tuple[str, ...] = ()
    """Names that a file may have and that no part of the language model reads."""

    @property
    def plain(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that are kept as float32 arrays."""
        return {s.name: s.shape for s in self.specs if s.plain or len(s.shape) == 1}


def decoder_tensors(
    hp: HParams,
    *,
    bias: Iterable[str] = (),
    layer_norms: Iterable[tuple[str, int]] = (),
    extra: Iterable[TensorSpec] = (),
) -> TensorList:
    """The tensors of a decoder-only transformer with separate Q, K, V and a gated FFN.

    `bias` names the optional biases within a layer, `layer_norms` the norms (name, width) that a
    layer has beside `attn_norm` and `ffn_norm`, `extra` whatever else the file may hold.
    """
    q, k, v = hp.n_head * hp.head_dim_k, hp.n_head_kv * hp.head_dim_k, hp.n_head_kv * hp.head_dim_v
    matrices = {
        "attn_q": (q, hp.n_embd),
        "attn_k": (k, hp.n_embd),
        "attn_v": (v, hp.n_embd),
        "attn_output": (hp.n_embd, hp.n_head * hp.head_dim_v),
        "ffn_gate": (hp.n_ff, hp.n_embd),
        "ffn_up": (hp.n_ff, hp.n_embd),
        "ffn_down": (hp.n_embd, hp.n_ff),
    }
    norms = [("attn_norm", hp.n_embd), ("ffn_norm", hp.n_embd), *layer_norms]
    specs = [
        TensorSpec("token_embd.weight", (hp.n_vocab, hp.n_embd)),
        TensorSpec("output_norm.weight", (hp.n_embd,)),
        TensorSpec("output.weight", (hp.n_vocab, hp.n_embd), required=False),
        *extra,
    ]
    groups = []
    for il in range(hp.n_layer):
        blk = f"blk.{il}"
        specs += [TensorSpec(f"{blk}.{name}.weight", (width,)) for name, width in norms]
        specs += [TensorSpec(f"{blk}.{name}.weight", shape) for name, shape in matrices.items()]
        specs += [
            TensorSpec(f"{blk}.{name}.bias", matrices[name][:1], required=False) for name in bias
        ]
        groups.append(tuple(f"{blk}.{name}.weight" for name in ("attn_q", "attn_k", "attn_v")))
        groups.append(tuple(f"{blk}.{name}.weight" for name in ("ffn_gate", "ffn_up")))
    return TensorList(tuple(specs), tuple(groups))


def _fits(shape: tuple[int, ...], spec: TensorSpec) -> bool:
    """Of a plain tensor, dimensions of one row do not matter: converters differ in them."""
    if not spec.plain:
        return shape == spec.shape
    return [n for n in shape if n != 1] == [n for n in spec.shape if n != 1]


def check_tensors(file: GGUFFile, wanted: TensorList) -> list[TensorInfo]:
    """The file's tensors in the order of `wanted`.

    Raises `ModelError` for a missing tensor, a wrong shape, a type that cannot be dequantized,
    and a tensor that the family does not know: to leave one out would compute something else
    than what was trained.
    """
    known = {spec.name for spec in wanted.specs} | set(wanted.ignored)
    unknown = [name for name in file.tensors if name not in known]
    if unknown:
        arch = file.get_str("general.architecture")
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ModelError(
            f"{file.path}: {arch} models have no tensor {unknown[0]!r}{more};"
            " this variant of the architecture is not supported"
        )
    found = []
    for spec in wanted.specs:
        info = file.tensors.get(spec.name)
        if info is None:
            if spec.required:
                raise ModelError(f"{file.path}: tensor {spec.name!r} is missing")
            continue
        if not _fits(info.shape, spec):
            raise ModelError(
                f"{file.path}: tensor {spec.name!r} has shape {list(info.shape)},"
                f" expected {list(spec.shape)}"
            )
        if info.type not in BLOCK_FORMATS:
            raise ModelError(
                f"{file.path}: tensor {spec.name!r} ({info.type_name()}) cannot be computed with;"
                f" supported: {', '.join(t.name for t in BLOCK_FORMATS)}"
            )
        found.append(info)
    return found
