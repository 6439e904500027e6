"""Special tokens: their ids, those that end a generation, and where they stand in a text.

The rules are llama.cpp's: metadata ids first, then well-known token texts. Where it takes
whichever text its hash table yields first, the order here is fixed and said so. This module
does not tokenize what lies between special tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from minfer_jax.errors import TokenizerError
from minfer_jax.tokenizer.vocab import (
    CONTROL,
    LSTRIP,
    NORMAL,
    PREFIX,
    RSTRIP,
    UNKNOWN,
    USER_DEFINED,
    Metadata,
    Vocab,
    raw_bytes,
    read_str,
)

_EOT = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<\uff5cend▁of▁sentence\uff5c>",
    "<end_of_utterance>",
)
_EOG = (
    *_EOT,
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "</s>",
    "<|eom_id|>",
    "[EOS]",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "[e~[",
)
_FILL_IN = {
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim▁begin\uff5c>"),
        *("<PRE>", "▁<PRE>", "<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim▁hole\uff5c>"),
        *("<SUF>", "▁<SUF>", "<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim▁end\uff5c>"),
        *("<MID>", "▁<MID>", "<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Fill-in-the-middle tokens; the last three end a generation."""
_OLD_KEYS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
_ALWAYS_RENDERED = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
_SPACES = " \t\n\v\f\r"


@dataclass(frozen=True, kw_only=True)
class SpecialIds:
    """Ids with a meaning; None where the vocabulary has none."""

    bos: int | None
    eos: int | None
    eot: int | None
    unk: int | None
    sep: int | None
    eog: frozenset[int]
    """Every id that ends a generation."""


def find_special(metadata: Metadata, vocab: Vocab, defaults: Mapping[str, int]) -> SpecialIds:
    """Reads and finds the special ids, and marks their tokens as control in `vocab.attrs`.

    `defaults` (keys bos, eos, unknown, seperator) are what the kind of tokenizer takes when the
    file says nothing. TokenizerError names a key whose id the vocabulary does not have; ids that
    this engine has no use for (padding, mask, fill-in) are ignored then, as llama.cpp does.
    """
    bos, eos, unk, sep = (
        _declared_id(metadata, key, len(vocab), defaults.get(key))
        for key in ("bos", "eos", "unknown", "seperator")
    )
    eot = _declared_id(metadata, "eot", len(vocab), None)
    eom = _declared_id(metadata, "eom", len(vocab), None)
    if eot is None:
        eot = _turn_end(vocab, eos)
    if eom is None:
        eom = vocab.ids.get("<|eom_id|>")
    fill_in = {name: _fill_in_id(metadata, vocab, name) for name in _FILL_IN}
    eog = {i for name in ("fim_pad", "fim_rep", "fim_sep") if (i := fill_in[name]) is not None}
    eog |= _marked(vocab, (vocab.ids.get(text) for text in _EOG))
    _make_user_defined(vocab, (vocab.ids.get(text) for text in _ALWAYS_RENDERED))
    eog |= {i for i in (eos, eot, eom) if i is not None}
    _drop_false_ends(vocab, eog)
    return SpecialIds(bos=bos, eos=eos, eot=eot, unk=unk, sep=sep, eog=frozenset(eog))


def _declared_id(metadata: Metadata, key: str, n_vocab: int, default: int | None) -> int | None:
    name = f"{PREFIX}{key}_token_id"
    value = metadata.get(name)
    if value is None:
        return default if default is not None and default < n_vocab else None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TokenizerError(f"{name} must be an integer, not {value!r}")
    if not 0 <= value < n_vocab:
        raise TokenizerError(f"{name} is {value}, but the vocabulary has ids 0..{n_vocab - 1}")
    return value


def _turn_end(vocab: Vocab, eos: int | None) -> int | None:
    """The end-of-turn token by text: the first that is not EOS already, else EOS itself.

    llama.cpp takes whichever it meets first in its hash table; this order gives the same ids
    for the vocabularies it was compared with, and loses nothing: all of them end generation.
    """
    found = [vocab.ids[text] for text in _EOT if text in vocab.ids]
    return next((i for i in found if i != eos), found[0] if found else None)


def _fill_in_id(metadata: Metadata, vocab: Vocab, name: str) -> int | None:
    for key in (name, _OLD_KEYS.get(name)):
        value = metadata.get(f"{PREFIX}{key}_token_id") if key else None
        if type(value) is int and 0 <= value < len(vocab):
            return value
    found = next((vocab.ids[text] for text in _FILL_IN[name] if text in vocab.ids), None)
    _marked(vocab, (found,))
    return found


def _marked(vocab: Vocab, ids: Iterable[int | None]) -> set[int]:
    """The ids that are not None, after setting their control bit."""
    present = {i for i in ids if i is not None}
    vocab.attrs[list(present)] |= CONTROL
    return present


def _make_user_defined(vocab: Vocab, ids: Iterable[int | None]) -> None:
    vocab.attrs[[i for i in ids if i is not None]] = USER_DEFINED


def _drop_false_ends(vocab: Vocab, eog: set[int]) -> None:
    """Two families in which a usual end token is not one (gpt-oss and solar-open; gemma4)."""
    texts = {vocab.tokens[i]: i for i in eog}
    calls = "<|call|>" in texts or "<|calls|>" in texts
    if calls and ("<|return|>" in texts or "<|flush|>" in texts) and "<|end|>" in texts:
        eog.remove(texts["<|end|>"])
        vocab.attrs[texts["<|end|>"]] = USER_DEFINED
    if "</s>" in texts and ("<|tool_response>" in texts or "<|plamo:eos|>" in texts):
        eog.remove(texts["</s>"])
        vocab.attrs[texts["</s>"]] = NORMAL


def mark_stripping(metadata: Metadata, vocab: Vocab) -> None:
    """Which special tokens swallow the white space beside them; GGUF has no key for it.

    llama.cpp goes by the names of model, tokenizer and architecture, and so does this.
    """
    name = (read_str(metadata, "general.name") or "").lower()
    architecture = read_str(metadata, "general.architecture") or ""
    pre = read_str(metadata, PREFIX + "pre") or ""
    if any(part in pre for part in ("jina-v2-de", "jina-v2-es", "jina-v2-code")) or any(
        part in architecture for part in ("nomic-bert-moe", "jina-bert-v3")
    ):
        _set_bit(vocab, ("<mask>",), LSTRIP)
    elif "phi-3" in name or "phi3" in name:
        special = (vocab.attrs & (CONTROL | USER_DEFINED | UNKNOWN)) != 0
        vocab.attrs[special] |= RSTRIP
        _set_bit(vocab, ("</s>",), RSTRIP)
        for text in ("<unk>", "<s>", "<|endoftext|>"):
            if text in vocab.ids:
                vocab.attrs[vocab.ids[text]] &= ~np.uint8(RSTRIP)
    elif "modern-bert" in name:
        _set_bit(vocab, ("[MASK]",), LSTRIP)


def _set_bit(vocab: Vocab, texts: Iterable[str], bit: int) -> None:
    for text in texts:
        if text in vocab.ids:
            vocab.attrs[vocab.ids[text]] |= bit


class _Mark(NamedTuple):
    order: int
    text: str
    token_id: int
    attr: int


class Splitter:
    """Cuts a text at the special tokens that are spelled out in it.

    Longer tokens first, over the whole text, each from left to right: so a long token wins over
    a shorter one that overlaps it further left.
    """

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab

    @cached_property
    def _by_prefix(self) -> dict[str, list[_Mark]]:
        """Special tokens by their first three characters: thousands share `<un`."""
        attrs = self._vocab.attrs
        ids = np.nonzero(attrs & (CONTROL | USER_DEFINED | UNKNOWN))[0].tolist()
        texts = {i: self._vocab.tokens[i] for i in ids}
        ids.sort(key=lambda i: -len(raw_bytes(texts[i])))
        groups: dict[str, list[_Mark]] = {}
        for order, i in enumerate(ids):
            mark = _Mark(order, texts[i], i, int(attrs[i]))
            groups.setdefault(mark.text[:3], []).append(mark)
        return groups

    def split(self, text: str, parse_special: bool) -> list[int | str]:
        """Fragments in order: ids of special tokens, and the non-empty texts between them.

        User-defined tokens are always cut out, control and unknown ones if `parse_special`.
        """
        fragments: list[int | str] = [text] if text else []
        for mark in self._present(text, parse_special):
            fragments = [
                part
                for fragment in fragments
                for part in (_cut(fragment, mark) if isinstance(fragment, str) else (fragment,))
            ]
        return fragments

    def _present(self, text: str, parse_special: bool) -> list[_Mark]:
        skipped = 0 if parse_special else CONTROL | UNKNOWN
        return sorted(
            mark
            for prefix, marks in self._by_prefix.items()
            if prefix in text
            for mark in marks
            if not mark.attr & skipped and mark.text in text
        )


def _cut(text: str, mark: _Mark) -> list[int | str]:
    parts = text.split(mark.text)
    fragments: list[int | str] = []
    for i, part in enumerate(parts):
        if i > 0:
            fragments.append(mark.token_id)
            if mark.attr & RSTRIP:
                part = part.lstrip(_SPACES)
        if i < len(parts) - 1 and mark.attr & LSTRIP:
            part = part.rstrip(_SPACES)
        if part:
            fragments.append(part)
    return fragments
