"""Byte-level BPE vocabularies (`tokenizer.ggml.model` = "gpt2").

`pretokenize` cuts the text into words, each byte of a word becomes a printable character (Radford
et al. 2019), and the `tokenizers` library applies the merges: lowest rank first, leftmost on
ties. Only the merges are left to it: its own pre-tokenizers differ from llama.cpp's rules.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from minfer_jax.errors import TokenizerError
from minfer_jax.tokenizer import utf8
from minfer_jax.tokenizer.base import Tokenizer
from minfer_jax.tokenizer.pretokenize import rule_of
from minfer_jax.tokenizer.special import find_special
from minfer_jax.tokenizer.vocab import (
    PREFIX,
    Metadata,
    raw_bytes,
    read_str,
    read_strings,
    read_vocab,
)

if TYPE_CHECKING:
    import tokenizers

_DEFAULTS = {"bos": 11, "eos": 11}


def _byte_characters() -> str:
    """The character of each byte: itself where it is printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


_CHARACTERS = _byte_characters()
_BYTES = {char: bytes([byte]) for byte, char in enumerate(_CHARACTERS)}


class BPETokenizer(Tokenizer):
    """Words are merged independently of each other."""

    model = "gpt2"

    def __init__(self, metadata: Metadata) -> None:
        self._rule = rule_of(read_str(metadata, PREFIX + "pre"))
        vocab = read_vocab(metadata)
        self._merges = read_strings(metadata, "merges")
        # The first character may be a space itself.
        bad = next((i for i, merge in enumerate(self._merges) if merge.find(" ", 1) < 0), None)
        if bad is not None:
            raise TokenizerError(f"{PREFIX}merges[{bad}] has no space: {self._merges[bad]!r}")
        defaults = _DEFAULTS if self._rule.has_bos else {"eos": _DEFAULTS["eos"]}
        special = find_special(metadata, vocab, defaults)
        super().__init__(
            metadata, vocab, special, add_bos=self._rule.add_bos, add_sep=self._rule.add_sep
        )

    def _encode_text(self, text: str, follows_special: bool) -> list[int]:
        if not utf8.is_valid(text):
            text = utf8.lenient(text)
        words = [
            word.encode("utf-8", "surrogatepass").decode("latin-1").translate(_CHARACTERS)
            for word in self._rule.split(text)
        ]
        return self._merger.encode(words, is_pretokenized=True, add_special_tokens=False).ids

    def _normal_piece(self, token: str) -> bytes:
        """Characters that stand for no byte are kept as they are."""
        return b"".join(_BYTES.get(char) or raw_bytes(char) for char in token)

    @cached_property
    def _merger(self) -> tokenizers.Tokenizer:
        """The merges alone: no normalizer, no pre-tokenizer, no added tokens.

        Merges whose parts or result are no tokens are left out; they could produce nothing.
        """
        import tokenizers
        from tokenizers.models import BPE

        ids = {token: i for token, i in self._vocab.ids.items() if utf8.is_valid(token)}
        pairs: list[tuple[str, str]] = []
        for merge in self._merges:
            space = merge.index(" ", 1)
            left, right = merge[:space], merge[space + 1 :]
            if left in ids and right in ids and left + right in ids:
                pairs.append((left, right))
        return tokenizers.Tokenizer(BPE(ids, pairs, ignore_merges=self._rule.ignore_merges))
