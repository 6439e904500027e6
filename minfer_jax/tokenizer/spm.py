"""SentencePiece BPE vocabularies (`tokenizer.ggml.model` = "llama"): merge by score, bytes last.

The merge is our own, by measurement: sentencepiece differs from llama.cpp on 6 of the 96 golden
texts (Gemma 3: runs of spaces, specials), is no faster, and takes 0.27 s to load where this takes
0.1 s. The module does not know pre-tokenizer rules; there are none here.
"""

from __future__ import annotations

import re
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush

import numpy as np

from minfer_jax.errors import TokenizerError
from minfer_jax.tokenizer import utf8
from minfer_jax.tokenizer.base import Tokenizer
from minfer_jax.tokenizer.special import find_special
from minfer_jax.tokenizer.vocab import (
    PREFIX,
    Metadata,
    raw_bytes,
    read_bool,
    read_numbers,
    read_vocab,
)

SPACE = "\u2581"
"""Stands for a space in the vocabulary."""

_DEFAULTS = {"bos": 1, "eos": 2, "unknown": 0}
_CACHED_WORD = 32
"""Characters of the longest word whose ids are remembered."""


class SPMTokenizer(Tokenizer):
    """Joins neighbours as long as the joined string is a token, best score first."""

    model = "llama"

    def __init__(self, metadata: Metadata) -> None:
        vocab = read_vocab(metadata)
        scores = read_numbers(metadata, "scores", len(vocab))
        if scores is None:
            scores = np.zeros(len(vocab), np.float32)
        if np.isnan(scores).any():
            raise TokenizerError(f"{PREFIX}scores holds NaN")
        self._scores = scores
        self.add_space_prefix = read_bool(metadata, "add_space_prefix", True)
        special = find_special(metadata, vocab, _DEFAULTS)
        super().__init__(metadata, vocab, special, add_bos=True)
        self._cached_word = lru_cache(1 << 16)(self._encode_word)

    def _encode_text(self, text: str, follows_special: bool) -> list[int]:
        if self.add_space_prefix and follows_special:
            text = " " + text
        text = text.replace(" ", SPACE)
        if not utf8.is_valid(text):
            return self._merge(utf8.lead_byte_chunks(text))
        ids: list[int] = []
        for word in self._word_start.split(text):
            encode = self._cached_word if len(word) <= _CACHED_WORD else self._encode_word
            ids += encode(word)
        return ids

    def _normal_piece(self, token: str) -> bytes:
        return raw_bytes(token.replace(SPACE, " "))

    @cached_property
    def _word_start(self) -> re.Pattern[str]:
        """Matches between two characters that stand side by side in no token, before a space.

        No merge can cross such a place, so that the words of a text are independent.
        """
        before = set(re.findall(f"(.)(?={SPACE})", "\0".join(self._vocab.tokens), re.DOTALL))
        inside = "".join(map(re.escape, sorted(before))) + "\0"
        return re.compile(f"(?<=[^{inside}])(?={SPACE})")

    @cached_property
    def _costs(self) -> list[float]:
        """Negated scores: the heap yields its smallest entry."""
        return (-self._scores.astype(np.float64)).tolist()

    @cached_property
    def _byte_ids(self) -> list[int]:
        """The token of each byte: `<0xXX>`, else the character itself, else unknown."""
        unknown = 0 if self.unk is None else self.unk
        ids: list[int] = []
        for byte in range(256):
            named = (f"<0x{byte:02X}>", bytes([byte]).decode("utf-8", "surrogateescape"))
            found = [self._vocab.ids[name] for name in named if name in self._vocab.ids]
            ids.append(found[0] if found else unknown)
        return ids

    def _encode_word(self, word: str) -> list[int]:
        return self._merge(list(word))

    def _merge(self, symbols: list[str]) -> list[int]:
        """Ids of the symbols (each one character) after all merges.

        The best score merges first, the leftmost pair on ties. A merged symbol lives on at its
        left place; its right place becomes empty.
        """
        find, costs = self._vocab.ids.get, self._costs
        n = len(symbols)
        after = list(range(1, n + 1))
        before = list(range(-1, n))
        heap: list[tuple[float, int, int, str]] = []
        for i in range(n - 1):
            joined = symbols[i] + symbols[i + 1]
            token_id = find(joined)
            if token_id is not None:
                heap.append((costs[token_id], i, i + 1, joined))
        heapify(heap)
        while heap:
            _, left, right, joined = heappop(heap)
            a, b = symbols[left], symbols[right]
            if not a or not b or len(a) + len(b) != len(joined):
                continue
            symbols[left], symbols[right] = joined, ""
            following = after[right]
            after[left] = following
            before[following] = left
            if following < n:
                wider = joined + symbols[following]
                token_id = find(wider)
                if token_id is not None:
                    heappush(heap, (costs[token_id], left, following, wider))
            previous = before[left]
            if previous >= 0:
                wider = symbols[previous] + joined
                token_id = find(wider)
                if token_id is not None:
                    heappush(heap, (costs[token_id], previous, left, wider))
        return self._ids_of(symbols)

    def _ids_of(self, symbols: list[str]) -> list[int]:
        """The token of each symbol; its bytes' tokens where there is none."""
        find = self._vocab.ids.get
        ids: list[int] = []
        for symbol in filter(None, symbols):
            token_id = find(symbol)
            if token_id is None:
                ids += [self._byte_ids[byte] for byte in raw_bytes(symbol)]
            else:
                ids.append(token_id)
        return ids
