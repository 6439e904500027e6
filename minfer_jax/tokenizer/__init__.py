"""Text to token ids and back, from GGUF metadata alone.

`load_tokenizer` takes a file, `from_metadata` its metadata. Ids equal llama.cpp's for the same
file. The room knows nothing of tensors, models, chat templates or sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING

from minfer_jax.errors import TokenizerError
from minfer_jax.tokenizer.base import Tokenizer
from minfer_jax.tokenizer.utf8 import Utf8Stream

if TYPE_CHECKING:
    from minfer_jax.gguf import GGUFFile

__all__ = ["Tokenizer", "Utf8Stream", "from_metadata", "load_tokenizer"]

_SUPPORTED = ("bert", "gpt2", "llama", "rwkv")


def load_tokenizer(source: str | PathLike[str] | GGUFFile) -> Tokenizer:
    """The tokenizer of a GGUF file (a vocabulary-only file is enough), or of an opened one.

    GGUFError if the file cannot be read, TokenizerError if its tokenizer is not supported or
    its metadata is inconsistent.
    """
    if isinstance(source, str | PathLike):
        from minfer_jax.gguf import open_gguf

        with open_gguf(source) as file:
            return load_tokenizer(file)
    try:
        return from_metadata(source.metadata)
    except TokenizerError as error:
        raise TokenizerError(f"{source.path}: {error}") from error


def from_metadata(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer that the `tokenizer.*` keys describe. TokenizerError names the bad key."""
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        raise TokenizerError("tokenizer.ggml.model is missing: the file has no tokenizer")
    if model == "llama":
        from minfer_jax.tokenizer.spm import SPMTokenizer

        return SPMTokenizer(metadata)
    if model == "gpt2":
        from minfer_jax.tokenizer.bpe import BPETokenizer

        return BPETokenizer(metadata)
    if model == "bert":
        from minfer_jax.tokenizer.wordpiece import WordPieceTokenizer

        return WordPieceTokenizer(metadata)
    if model == "rwkv":
        from minfer_jax.tokenizer.rwkv import RWKVTokenizer

        return RWKVTokenizer(metadata)
    raise TokenizerError(
        f"unsupported tokenizer model {model!r}; supported: {', '.join(_SUPPORTED)}"
    )
