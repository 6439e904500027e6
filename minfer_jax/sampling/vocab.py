"""What samplers may know of a vocabulary: which tokens end a text, and how tokens are spelled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minfer_jax.tokenizer import Tokenizer

RestartSequences = dict[int, frozenset[tuple[int, ...]]]
"""DRY's: the first token of each -> the tokens that follow it."""


@dataclass(frozen=True, eq=False)
class SamplerVocab:
    """One for each tokenizer: it keeps what a search of the whole vocabulary has found."""

    n_vocab: int
    eog: frozenset[int]
    """Every token that ends a text."""
    end: int | None
    """The one to end with: that of a turn, else that of a sequence."""
    pieces: Callable[[int], bytes]
    """A token's bytes, control tokens spelled out."""
    plain: Callable[[int], bytes]
    """A token's bytes, none for control tokens."""
    encode: Callable[[str], list[int]]
    """Token ids of a text, in which control tokens are not recognised."""
    restarts: dict[tuple[str, ...], RestartSequences] = field(default_factory=dict, repr=False)
    """By sequence breakers, for `dry.restart_sequences`."""


def sampler_vocab(tokenizer: Tokenizer) -> SamplerVocab:
    """What samplers may know of a tokenizer's vocabulary."""
    return SamplerVocab(
        n_vocab=tokenizer.n_vocab,
        eog=tokenizer.eog,
        end=tokenizer.eos if tokenizer.eot is None else tokenizer.eot,
        pieces=tokenizer.piece,
        plain=partial(tokenizer.piece, special=False),
        encode=partial(tokenizer.encode, add_special=False, parse_special=False),
    )
