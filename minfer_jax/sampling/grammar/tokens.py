"""A tokenizer's vocabulary in the form that llguidance walks: the bytes of every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minfer_jax.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class TokenBytes:
    """What llguidance reads of a vocabulary; the names are those that it asks for.

    Control, unknown and end tokens are `special_token_ids`: no text spells them, so that only a
    grammar that names one can ask for it. All others are text, user-defined ones included.
    """

    bos_token_id: int | None = None
    """A grammar begins where the prompt has ended."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens: list[bytes] = [
            tokenizer.piece(i, special=False) for i in range(tokenizer.n_vocab)
        ]
        silent = {i for i, data in enumerate(self.tokens) if not data}
        self.special_token_ids: list[int] = sorted(silent | tokenizer.eog)
        for i in self.special_token_ids:
            self.tokens[i] = tokenizer.piece(i)
        self.end_ids: list[int] = sorted(tokenizer.eog)
        """Never empty: a vocabulary without an end gets one beyond its last token."""
        if not self.end_ids:
            self.end_ids = [len(self.tokens)]
            self.tokens.append(b"")
        self.eos_token_id = self.end_ids[0]

    def __call__(self, text: str | bytes) -> list[int]:
        """The ids of a text; asked only where llguidance would force a spelling."""
        return self._tokenizer.encode(text, add_special=False, parse_special=False)


def ll_tokenizer(tokenizer: Tokenizer) -> LLTokenizer:
    """The vocabulary as llguidance keeps it. Takes 0.9 s for 262k tokens: build it once."""
    from llguidance import LLTokenizer, TokenizerWrapper

    tokens = TokenBytes(tokenizer)
    return LLTokenizer(
        TokenizerWrapper(tokens), n_vocab=len(tokens.tokens), eos_token=tokens.end_ids
    )
