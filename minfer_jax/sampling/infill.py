"""Infill: for a text between two others, end it as soon as the model sees little reason not to.

By llama.cpp. Tokens that begin alike count as one, so that many spellings of one word together
outweigh the end.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from minfer_jax.errors import UsageError
from minfer_jax.sampling.samplers import Candidates
from minfer_jax.sampling.vocab import SamplerVocab

_LEAST = 0.2  # probability that a token needs


def infill(c: Candidates, vocab: SamplerVocab) -> Candidates:
    """End tokens alone if they are likely enough, else the few tokens that are likely enough.

    `SamplingError` if no candidate is possible.
    """
    c = c.sort()
    probabilities = c.probabilities().astype(np.float64)
    ends = np.isin(c.ids, np.fromiter(vocab.eog, np.int32, len(vocab.eog)))
    of_ends = probabilities[ends].sum()
    if 3.0 * of_ends * len(c.ids) > probabilities.sum() - of_ends:
        return c.keep(ends)
    probabilities = _merged(probabilities, [vocab.plain(token) for token in c.ids.tolist()])
    kept = (probabilities >= _LEAST) | ends
    texts = int((kept & ~ends).sum())
    if not texts:
        return Candidates(np.array([end_of(vocab)], np.int32), np.ones(1, np.float32), ordered=True)
    probabilities /= probabilities[kept].sum()
    kept &= (probabilities >= 1.0 / (texts + 1)) | ends
    return c.keep(kept & ((probabilities > 0.0) | ~ends))


def end_of(vocab: SamplerVocab) -> int:
    """The token to end with; `UsageError` if the vocabulary has none."""
    if vocab.end is None:
        raise UsageError("infill needs a vocabulary with an end token, and this one has none")
    return vocab.end


def _merged(probabilities: np.ndarray, pieces: list[bytes]) -> np.ndarray:
    """Where a token's bytes begin another's, the likelier of the two gets both probabilities.

    In the order of the candidates; one that has given its own away has nothing left to give.
    """
    merged = probabilities.tolist()
    for i, longer in enumerate(_continuations(pieces)):
        for j in longer:
            to, by = (j, i) if merged[j] > merged[i] else (i, j)
            merged[to] += merged[by]
            merged[by] = 0.0
    return np.array(merged)


def _continuations(pieces: list[bytes]) -> list[list[int]]:
    """For each piece the others, in order, that begin with it. None for an empty piece."""
    places: defaultdict[bytes, list[int]] = defaultdict(list)
    for i, piece in enumerate(pieces):
        places[piece].append(i)
    found: list[list[int]] = [[] for _ in pieces]
    for j, piece in enumerate(pieces):
        for n in range(1, len(piece) + 1):
            for i in places.get(piece[:n], ()):
                if i != j:
                    found[i].append(j)
    return found
