"""DRY, "don't repeat yourself": tokens that would make a repetition longer become less likely.

By p-e-w (github.com/oobabooga/text-generation-webui, pull request 5677), with llama.cpp's edge
cases. A repetition is an end of the text that occurs earlier in it too; sequence breakers, such as
a newline, end one.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from minfer_jax.sampling.samplers import Candidates, add
from minfer_jax.sampling.vocab import RestartSequences, SamplerVocab

_MAX_BREAKER = 40  # bytes of a breaker that count
_MAX_TAIL = 20  # tokens that a restart sequence may have after its first
_LOG_FLOAT_MAX = 88.7228391


def dry(
    c: Candidates,
    tokens: np.ndarray,
    restarts: RestartSequences,
    *,
    multiplier: float,
    base: float,
    allowed: int,
) -> Candidates:
    """Subtract multiplier * base ** (n - allowed) from each token that would go on with a
    repetition of n >= allowed of the last `tokens`, int [n_tokens]."""
    lengths = extended_repeats(tokens, restarts, allowed)
    exponents = {
        token: n - allowed for token, n in lengths.items() if () not in restarts.get(token, ())
    }
    if not exponents:
        return c
    # No power may overflow float32.
    most = int(_LOG_FLOAT_MAX / math.log(base)) if base > 1.000001 else max(exponents.values())
    return add(c, {t: -multiplier * base ** min(e, most) for t, e in exponents.items()})


def extended_repeats(
    tokens: np.ndarray, restarts: RestartSequences, allowed: int
) -> dict[int, int]:
    """Token -> length of the longest repetition, at least `allowed`, that it would go on with."""
    if len(tokens) <= allowed:
        return {}
    backwards = tokens[::-1].tolist()
    limit = _tokens_since_restart(backwards, restarts)
    if limit < allowed:
        return {}
    repeats = np.minimum(_repeats(backwards, tokens[::-1]), limit)
    at = np.flatnonzero(repeats >= allowed)
    longest: dict[int, int] = {}
    for k, n in zip(at[at > 0].tolist(), repeats[at[at > 0]].tolist(), strict=True):
        token = backwards[k - 1]
        longest[token] = max(longest.get(token, 0), n)
    return longest


def _repeats(backwards: list[int], array: np.ndarray) -> np.ndarray:
    """How many tokens from k on equal those from 0 on, for each k: int [n_tokens], 0 at k = 0.

    Both arguments are the same tokens.

    The Z-algorithm (Gusfield 1997, section 1.3): linear, because no token is compared again once
    it has been found equal. Only positions of the first token can have a length.
    """
    n = len(backwards)
    lengths = [0] * n
    left = right = 0  # the match that reaches furthest, its end excluded
    for k in (np.flatnonzero(array[1:] == array[0]) + 1).tolist():
        length = min(lengths[k - left], right - k) if k < right else 0
        if k + length >= right:
            while k + length < n and backwards[length] == backwards[k + length]:
                length += 1
            left, right = k, k + length
        lengths[k] = length
    return np.array(lengths)


def _tokens_since_restart(backwards: list[int], restarts: RestartSequences) -> int:
    """Tokens after the last restart sequence, of which the longest counts; all if there is none."""
    for i, token in enumerate(backwards):
        if token in restarts:
            matches = [
                len(tail)
                for tail in restarts[token]
                if tail == tuple(reversed(backwards[max(0, i - len(tail)) : i]))
            ]
            if matches:
                return i - max(matches)
    return len(backwards)


_KEPT = 4
"""Sets of breakers that a vocabulary remembers."""


def restart_sequences(vocab: SamplerVocab, breakers: tuple[str, ...]) -> RestartSequences:
    """Every sequence of tokens that spells a breaker, with what else the first token may hold.

    Those are tokens that contain a breaker, and tokens that end with its beginning, followed by
    the tokens of its rest. The first call for `breakers` searches the vocabulary.
    """
    known = vocab.restarts.get(breakers)
    if known is None:
        while len(vocab.restarts) >= _KEPT:  # each may be as large as the vocabulary
            vocab.restarts.pop(next(iter(vocab.restarts)))
        known = vocab.restarts[breakers] = _search(vocab, breakers)
    return known


def _search(vocab: SamplerVocab, breakers: tuple[str, ...]) -> RestartSequences:
    found: defaultdict[int, set[tuple[int, ...]]] = defaultdict(set)
    pieces = [vocab.pieces(token) for token in range(vocab.n_vocab)]
    for text in breakers:
        breaker = text.encode()[:_MAX_BREAKER].decode(errors="ignore").encode()
        whole = {token for token, piece in enumerate(pieces) if breaker in piece}
        for token in whole:
            found[token].add(())
        for cut in range(1, len(breaker)):
            try:
                rest = breaker[cut:].decode()
            except UnicodeDecodeError:
                continue  # within a character
            start = breaker[:cut]
            heads = {token for token, piece in enumerate(pieces) if piece.endswith(start)} - whole
            if heads:
                tail = tuple(vocab.encode(rest)[:_MAX_TAIL])
                for token in heads:
                    found[token].add(tail)
    return {token: frozenset(tails) for token, tails in found.items()}
