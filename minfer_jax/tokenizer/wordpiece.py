"""WordPiece vocabularies (`tokenizer.ggml.model` = "bert"): words, then longest pieces first.

Matches llama.cpp: the GGUF converter has turned `##x` into `x` and the start of a word into `▁`.
Nothing here knows how an encoder pools or what its special tokens mean.
"""

from __future__ import annotations

import unicodedata

from minfer_jax.errors import TokenizerError
from minfer_jax.tokenizer import utf8
from minfer_jax.tokenizer.base import Tokenizer
from minfer_jax.tokenizer.pretokenize import WHITESPACE
from minfer_jax.tokenizer.special import find_special
from minfer_jax.tokenizer.vocab import PREFIX, Metadata, raw_bytes, read_bool, read_vocab

_WORD_START = "\u2581"
_DEFAULTS = {"bos": 101, "unknown": 100, "seperator": 102}
_CHINESE = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F)),
    *((0x2B740, 0x2B81F), (0x2B920, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)
"""Ideographs that are words by themselves, with the bounds of BERT's own tokenizers."""


class WordPieceTokenizer(Tokenizer):
    """Splits and normalizes like BERT's basic tokenizer; a word that does not fit is unknown."""

    model = "bert"

    def __init__(self, metadata: Metadata) -> None:
        vocab = read_vocab(metadata)
        special = find_special(metadata, vocab, _DEFAULTS)
        super().__init__(metadata, vocab, special, add_bos=True, add_sep=True)
        for key, token_id in (("bos", self.bos), ("unknown", self.unk), ("seperator", special.sep)):
            if token_id is None:
                raise TokenizerError(f"{PREFIX}{key}_token_id is missing")
        self._lowercase = read_bool(metadata, "normalizer.lowercase", True)
        self._strip_accents = read_bool(metadata, "normalizer.strip_accents", self._lowercase)
        self._lengths = sorted(set(map(len, vocab.tokens)), reverse=True)

    def _leading(self) -> list[int]:
        return [i for i in (self.bos,) if i is not None]

    def _trailing(self) -> list[int]:
        return [i for i in (self._special.sep,) if i is not None]

    def _encode_text(self, text: str, follows_special: bool) -> list[int]:
        if not utf8.is_valid(text):
            text = utf8.lenient(text)
        return [i for word in self._words(text) for i in self._pieces(_WORD_START + word)]

    def _normal_piece(self, token: str) -> bytes:
        return raw_bytes(token.replace(_WORD_START, " "))

    def _pieces(self, word: str) -> list[int]:
        """The longest token at each place; the whole word is unknown if one has none."""
        find = self._vocab.ids.get
        ids: list[int] = []
        start = 0
        while start < len(word):
            for length in self._lengths:
                end = start + length
                token_id = find(word[start:end]) if end <= len(word) else None
                if token_id is not None:
                    ids.append(token_id)
                    start = end
                    break
            else:
                return [i for i in (self.unk,) if i is not None]
        return ids

    def _words(self, text: str) -> list[str]:
        """Words without white space and control characters; punctuation stands alone."""
        words: list[str] = []
        current: list[str] = []
        for char in text:
            if self._strip_accents:
                # llama.cpp keeps the first code point of a decomposition and drops the rest.
                char = unicodedata.normalize("NFD", char)[0]
            category = unicodedata.category(char)
            stands_alone = _stands_alone(char, category)
            if current and (stands_alone or char in WHITESPACE):
                words.append("".join(current))
                current = []
            if char in WHITESPACE or char == "\ufffd" or category in _DROPPED:
                continue
            if self._strip_accents and category[0] == "M":
                continue
            if self._lowercase:
                char = _lower(char)
            if stands_alone:
                words.append(char)
            else:
                current.append(char)
        return [*words, "".join(current)] if current else words


_DROPPED = frozenset({"Cc", "Cf", "Co", "Cs"})


def _stands_alone(char: str, category: str) -> bool:
    if category[0] == "P" or (category[0] == "S" and char < "\x7f"):
        return True
    return any(low <= ord(char) <= high for low, high in _CHINESE)


def _lower(char: str) -> str:
    """The one-to-one lower case of a character; `İ` has it too, though `str.lower` gives two."""
    return char.lower()[0]
