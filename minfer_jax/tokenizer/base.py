"""What every tokenizer does the same way: special tokens, ids in and out, pieces as bytes.

A kind of tokenizer (`spm`, `bpe`, `wordpiece`, `rwkv`) adds how plain text becomes ids and how a
normal token is spelled. Nothing here knows files, models or chat templates.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable

from minfer_jax.errors import TokenizerError
from minfer_jax.tokenizer import utf8
from minfer_jax.tokenizer.special import SpecialIds, Splitter, mark_stripping
from minfer_jax.tokenizer.vocab import (
    BYTE,
    CONTROL,
    PREFIX,
    UNKNOWN,
    USER_DEFINED,
    Metadata,
    Vocab,
    byte_value,
    raw_bytes,
    read_bool,
    read_str,
)


class Tokenizer(ABC):
    """Text to token ids and back, as llama.cpp does it for the same file.

    Text is never normalized unless the vocabulary is WordPiece: `é` and `e` + U+0301 stay
    different, also where the tokenizer that the model was trained with would join them.
    """

    model: str
    """`tokenizer.ggml.model`: "llama" (SPM), "gpt2" (byte-level BPE), "bert" (WordPiece) or
    "rwkv" (World)."""
    add_space_prefix: bool = False
    """Whether `encode` puts a space before text that starts a prompt or follows a special token."""

    def __init__(
        self,
        metadata: Metadata,
        vocab: Vocab,
        special: SpecialIds,
        *,
        add_bos: bool,
        add_eos: bool = False,
        add_sep: bool = False,
    ) -> None:
        """`add_bos`, `add_eos`, `add_sep`: the defaults of the kind; the file's own flags win."""
        mark_stripping(metadata, vocab)
        self._vocab = vocab
        self._special = special
        self._splitter = Splitter(vocab)
        self.pre: str | None = read_str(metadata, PREFIX + "pre")
        """`tokenizer.ggml.pre`: the name of the pre-tokenizer rule, as the file has it."""
        self.chat_template: str | None = read_str(metadata, "tokenizer.chat_template")
        """The Jinja source that the file carries."""
        self.add_bos: bool = _flag(metadata, "bos", special.bos, add_bos)
        """Whether `encode(add_special=True)` starts with `bos`."""
        self.add_eos: bool = _flag(metadata, "eos", special.eos, add_eos)
        """Whether `encode(add_special=True)` ends with `eos`."""
        self.add_sep: bool = self.sep is not None and read_bool(metadata, "add_sep_token", add_sep)
        """Whether `encode_pair` puts `sep` between its texts."""

    @property
    def n_vocab(self) -> int:
        return len(self._vocab)

    @property
    def bos(self) -> int | None:
        """Beginning of sequence."""
        return self._special.bos

    @property
    def eos(self) -> int | None:
        """End of sequence."""
        return self._special.eos

    @property
    def eot(self) -> int | None:
        """End of a turn."""
        return self._special.eot

    @property
    def unk(self) -> int | None:
        """What stands for text that the vocabulary cannot spell."""
        return self._special.unk

    @property
    def sep(self) -> int | None:
        """What separates two texts."""
        return self._special.sep

    @property
    def eog(self) -> frozenset[int]:
        """Every id that ends a generation."""
        return self._special.eog

    def encode(
        self, text: str | bytes, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """The ids of `text`.

        `add_special`: with the BOS and EOS that the model wants. `parse_special`: control tokens
        spelled out in the text become their ids; else they are plain text. User-defined tokens
        are always recognised. Bytes may be anything; TokenizerError for a `str` that is not
        Unicode text (a lone surrogate).
        """
        source = utf8.text_of(text)
        ids: list[int] = self._leading() if add_special else []
        follows_special = True
        for fragment in self._splitter.split(source, parse_special):
            if isinstance(fragment, str):
                ids += self._encode_text(fragment, follows_special)
                follows_special = False
            else:
                ids.append(fragment)
                follows_special = True
        return ids + self._trailing() if add_special else ids

    def encode_pair(self, first: str, second: str) -> list[int]:
        """The ids of two texts as one sequence, such as a re-ranker's query and document.

        As `encode` of one text, with `eos` and `sep` between the two where the model wants them.
        """
        ids = [*self._leading(), *self.encode(first, add_special=False)]
        ids += [self.eos] if self.add_eos and self.eos is not None else []
        ids += [self.sep] if self.add_sep and self.sep is not None else []
        return ids + self.encode(second, add_special=False) + self._trailing()

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """`decode_bytes` as text, with U+FFFD for what is not UTF-8."""
        return self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int], *, skip_special: bool = False) -> bytes:
        """The text that `encode` makes these ids from, specials spelled out unless skipped.

        The one space that `encode` adds (`add_space_prefix`) is taken off again at the start,
        also after BOS. For text that continues a prompt join `piece`s, which keep it.
        """
        numbers = [self._checked(token_id) for token_id in ids]
        pieces = [self._piece(i, not skip_special) for i in numbers]
        first = 1 if numbers and numbers[0] == self.bos else 0
        if self.add_space_prefix and first < len(numbers):
            verbatim = self._vocab.has(numbers[first], CONTROL | UNKNOWN | USER_DEFINED)
            if not verbatim:
                pieces[first] = pieces[first].removeprefix(b" ")
        return b"".join(pieces)

    def piece(self, token_id: int, special: bool = True) -> bytes:
        """The bytes of one token; those of a control or unknown token only if `special`."""
        return self._piece(self._checked(token_id), special)

    def token_str(self, token_id: int) -> str:
        """The vocabulary's own string for an id, as the file spells it."""
        return self._vocab.tokens[self._checked(token_id)]

    @abstractmethod
    def _encode_text(self, text: str, follows_special: bool) -> list[int]:
        """Ids of a non-empty text (in the form of `utf8.text_of`) without special tokens."""

    @abstractmethod
    def _normal_piece(self, token: str) -> bytes:
        """The bytes of a normal token's vocabulary string."""

    def _leading(self) -> list[int]:
        return [self.bos] if self.add_bos and self.bos is not None else []

    def _trailing(self) -> list[int]:
        return [self.eos] if self.add_eos and self.eos is not None else []

    def _piece(self, token_id: int, special: bool) -> bytes:
        token = self._vocab.tokens[token_id]
        if self._vocab.has(token_id, CONTROL | UNKNOWN):
            return raw_bytes(token) if special else b""
        if self._vocab.has(token_id, USER_DEFINED):
            return raw_bytes(token)
        value = byte_value(token) if self._vocab.has(token_id, BYTE) else None
        return self._normal_piece(token) if value is None else bytes([value])

    def _checked(self, token_id: int) -> int:
        """The id as a Python int: a negative one must not count from the table's end."""
        try:
            number = None if isinstance(token_id, bool) else operator.index(token_id)
        except TypeError:
            number = None
        if number is None:
            raise TokenizerError(f"a token id must be an integer, not {token_id!r}")
        if not 0 <= number < len(self._vocab):
            raise TokenizerError(
                f"token id {number} is not in the vocabulary (0..{len(self._vocab) - 1})"
            )
        return number


def _flag(metadata: Metadata, which: str, token_id: int | None, default: bool) -> bool:
    key = f"add_{which}_token"
    wanted = read_bool(metadata, key, default and token_id is not None)
    if wanted and token_id is None:
        raise TokenizerError(
            f"{PREFIX}{key} is true, but there is no {which.upper()} id ({PREFIX}{which}_token_id)"
        )
    return wanted
