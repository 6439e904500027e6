"""RWKV's World vocabularies (`tokenizer.ggml.model` = "rwkv"): the longest token of bytes first.

Tokens are bytes of any kind, which the file spells with a backslash before what is not printable.
There are no merges and no words; text needs not be UTF-8.
"""

from __future__ import annotations

import re

from minfer_jax.errors import TokenizerError
from minfer_jax.tokenizer.base import Tokenizer
from minfer_jax.tokenizer.special import find_special
from minfer_jax.tokenizer.vocab import (
    CONTROL,
    PREFIX,
    UNKNOWN,
    Metadata,
    raw_bytes,
    read_vocab,
)

_ESCAPE = re.compile(rb"\\(x[0-9A-Fa-f]{2}|[^x]|)", re.DOTALL)
_NAMED = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


class RWKVTokenizer(Tokenizer):
    """Takes the longest token at each place, from left to right, and adds nothing around."""

    model = "rwkv"

    def __init__(self, metadata: Metadata) -> None:
        vocab = read_vocab(metadata)
        special = find_special(metadata, vocab, {})
        super().__init__(metadata, vocab, special, add_bos=False)
        # llama.cpp adds neither to such a text, whatever the flags of the file say.
        self.add_bos = self.add_eos = False
        self._pieces = [self._normal_piece(token) for token in vocab.tokens]
        # Of equal pieces the last one wins, as in llama.cpp.
        self._ids = {piece: i for i, piece in enumerate(self._pieces)}
        self._lengths = _lengths(self._pieces)

    def _encode_text(self, text: str, follows_special: bool) -> list[int]:
        data = raw_bytes(text)
        find, ids = self._ids.get, []
        start = 0
        while start < len(data):
            for length in (*self._lengths.get(data[start : start + 2], ()), 1):
                # At the end of the text it is shorter, and then all that is left.
                piece = data[start : start + length]
                token_id = find(piece)
                if token_id is not None:
                    break
            else:
                token_id = self._unknown(piece)
            ids.append(token_id)
            start += len(piece)
        return ids

    def _unknown(self, byte: bytes) -> int:
        if self.unk is None:
            raise TokenizerError(
                f"the vocabulary has no token for the byte 0x{byte.hex()}, and no "
                f"{PREFIX}unknown_token_id"
            )
        return self.unk

    def _normal_piece(self, token: str) -> bytes:
        return _ESCAPE.sub(_byte_of, raw_bytes(token))

    def _piece(self, token_id: int, special: bool) -> bytes:
        """Of all types of tokens: here a special one is spelled with escapes, too."""
        hidden = not special and self._vocab.has(token_id, CONTROL | UNKNOWN)
        return b"" if hidden else self._pieces[token_id]


def _byte_of(escape: re.Match[bytes]) -> bytes:
    """One byte, in hexadecimal digits, by its name, or itself (a quote, a backslash)."""
    code = escape[1]
    if not code:
        raise TokenizerError(f"{PREFIX}tokens holds an unfinished escape: {escape.string!r}")
    if len(code) > 1:
        return bytes([int(code[1:], 16)])
    return _NAMED.get(code, code)


def _lengths(pieces: list[bytes]) -> dict[bytes, list[int]]:
    """How long tokens are that begin with two given bytes, the longest first."""
    found: dict[bytes, set[int]] = {}
    for piece in pieces:
        if len(piece) > 1:
            found.setdefault(piece[:2], set()).add(len(piece))
    return {start: sorted(lengths, reverse=True) for start, lengths in found.items()}
