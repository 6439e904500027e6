"""The token table of a GGUF file: strings, ids, types, and the checked way to read metadata.

It knows the `tokenizer.ggml.*` arrays and refuses those that disagree with each other; it does
not know how text is cut into tokens, nor which ids end a generation (`special`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from minfer_jax.errors import TokenizerError
from minfer_jax.tokenizer.utf8 import bytes_of

Metadata = Mapping[str, object]

PREFIX = "tokenizer.ggml."

# Attribute bits of a token; several can be set (a normal token that ends generation is also
# control). No bit at all: type 0 or one that the format does not define.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE, LSTRIP, RSTRIP = (1 << i for i in range(8))
_ATTR_OF_TYPE = np.array([0, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE], np.uint8)


@dataclass(frozen=True, kw_only=True, eq=False)
class Vocab:
    """All tokens of a file. `attrs` is written to while special tokens are found, then fixed."""

    tokens: Sequence[str]
    """Vocabulary strings by id, as the file spells them (`▁` or byte-level characters)."""
    ids: Mapping[str, int]
    """The id of a string; of equal strings the first one's."""
    attrs: np.ndarray
    """uint8 [n_vocab] of the bits above."""

    def __len__(self) -> int:
        return len(self.tokens)

    def has(self, token_id: int, bits: int) -> bool:
        """Whether any of `bits` is set for a valid id."""
        return bool(int(self.attrs[token_id]) & bits)


def read_vocab(metadata: Metadata) -> Vocab:
    """The token table. TokenizerError names the key that is missing or has the wrong length."""
    tokens = read_strings(metadata, "tokens")
    if not tokens:
        raise TokenizerError(f"{PREFIX}tokens is empty")
    last = len(tokens) - 1
    # Filled backwards, so that the first of equal strings wins.
    ids = dict(zip(reversed(tokens), range(last, -1, -1), strict=True))
    if "" in ids:
        tokens, ids = _named_empty(tokens)
    return Vocab(tokens=tokens, ids=ids, attrs=_read_attrs(metadata, len(tokens)))


def _named_empty(tokens: Sequence[str]) -> tuple[list[str], dict[str, int]]:
    """Empty strings get a name, as in llama.cpp: they could match nothing, or anything."""
    named = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    ids: dict[str, int] = {}
    for i, token in enumerate(named):
        ids.setdefault(token, i)
    return named, ids


def _read_attrs(metadata: Metadata, n_vocab: int) -> np.ndarray:
    types = read_numbers(metadata, "token_type", n_vocab)
    if types is None:
        return np.full(n_vocab, NORMAL, np.uint8)
    if types.dtype.kind not in "iu":
        raise TokenizerError(f"{PREFIX}token_type must be an array of integers, not {types.dtype}")
    known = np.where((types >= 0) & (types < len(_ATTR_OF_TYPE)), types, 0)
    return _ATTR_OF_TYPE[known.astype(np.intp)]


def read_strings(metadata: Metadata, name: str) -> Sequence[str]:
    """The array of strings `tokenizer.ggml.<name>`; TokenizerError if absent or something else."""
    value = metadata.get(PREFIX + name)
    if value is None:
        raise TokenizerError(f"{PREFIX}{name} is missing")
    if not isinstance(value, list | tuple) or not set(map(type, value)) <= {str}:
        raise TokenizerError(f"{PREFIX}{name} must be an array of strings")
    return value


def read_numbers(metadata: Metadata, name: str, n_vocab: int) -> np.ndarray | None:
    """The array `tokenizer.ggml.<name>` with one number per token; None if it is absent."""
    value = metadata.get(PREFIX + name)
    if value is None:
        return None
    array = np.asarray(value)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise TokenizerError(f"{PREFIX}{name} must be an array of numbers")
    if len(array) != n_vocab:
        raise TokenizerError(
            f"{PREFIX}{name} has {len(array)} entries, {PREFIX}tokens has {n_vocab}"
        )
    return array


def read_bool(metadata: Metadata, key: str, default: bool) -> bool:
    """The flag `tokenizer.ggml.<key>`."""
    value = metadata.get(PREFIX + key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise TokenizerError(f"{PREFIX}{key} must be true or false, not {value!r}")
    return value


def read_str(metadata: Metadata, key: str) -> str | None:
    """The string `key` (the full name), None if it is absent."""
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise TokenizerError(f"{key} must be a string, not {type(value).__name__}")
    return value


def byte_value(token: str) -> int | None:
    """The byte that a `<0xXX>` token stands for."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        digits = token[3:5]
        if all(c in "0123456789abcdefABCDEF" for c in digits):
            return int(digits, 16)
    return None


def raw_bytes(token: str) -> bytes:
    """A vocabulary string as the bytes that the file holds."""
    return bytes_of(token)
