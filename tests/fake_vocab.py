"""A vocabulary of a few pieces, for samplers that ask how tokens are spelled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minfer_jax.sampling import SamplerVocab


def vocab_of(pieces: Sequence[str], *, control: Iterable[str] = ()) -> SamplerVocab:
    """Token i spells `pieces[i]`. Those of `control` end a text; the first of them is `end`.

    `encode` takes the longest piece that fits, again and again.
    """
    spelled = [piece.encode() for piece in pieces]
    ends = [pieces.index(piece) for piece in control]

    def encode(text: str) -> list[int]:
        rest, ids = text.encode(), []
        while rest:
            fits = [i for i in range(len(spelled)) if i not in ends and rest.startswith(spelled[i])]
            ids.append(max(fits, key=lambda i: len(spelled[i])))
            rest = rest[len(spelled[ids[-1]]) :]
        return ids

    return SamplerVocab(
        n_vocab=len(pieces),
        eog=frozenset(ends),
        end=ends[0] if ends else None,
        pieces=spelled.__getitem__,
        plain=lambda i: b"" if i in ends else spelled[i],
        encode=encode,
    )
