"""Texts to vectors: token ids, batches that fit a context, hidden states, pooling.

Encoders take several short texts in one batch, decoders one text after the other. Knows nothing of
files' names or of commands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from minfer_jax.batch import Batch
from minfer_jax.classifier import Classifier, read_classifier
from minfer_jax.errors import BatchError, ContextFullError, MinferError, UsageError
from minfer_jax.gguf import GGUFFile
from minfer_jax.models.hparams import HParams
from minfer_jax.pooling import POOLINGS, Pooling, check_norm, normalize, pool

if TYPE_CHECKING:
    from minfer_jax.context import Context
    from minfer_jax.tokenizer import Tokenizer

Text = str | Sequence[int]
"""A text, or its token ids."""

PAIR = "\t"
"""What stands between query and document in a text for a re-ranker."""

_ROWS = 512  # of several texts in one batch: every row costs as much as there are rows
_SEQUENCES = 64


@dataclass(frozen=True)
class Embedding:
    """What one text became."""

    n_tokens: int
    vector: np.ndarray
    """float32 [n_embd]; with pooling "none" [n_tokens, n_embd], with "rank" [labels]."""


class Embedder:
    """Embeds texts with one model, in a context that it makes at first use and keeps.

    `context` makes one, as `LanguageModel.context`; `tokenizer` is asked only when there is text.
    """

    def __init__(
        self,
        file: GGUFFile,
        hp: HParams,
        *,
        n_ctx: int,
        tokenizer: Callable[[], Tokenizer],
        context: Callable[..., Context],
    ) -> None:
        self._file = file
        self._hp = hp
        self._n_ctx = n_ctx
        self._tokenizer = tokenizer
        self._make_context = context

    @property
    def limit(self) -> int:
        """The most tokens that a text may have."""
        return min(self._n_ctx, self._hp.n_ctx_train) if self._hp.encoder else self._n_ctx

    @cached_property
    def _context(self) -> Context:
        n, options = self.limit, {}
        if self._hp.encoder:  # whose rows see each other, and so must be evaluated together
            options = {"n_seq_max": min(_SEQUENCES, n), "n_ubatch": n}
        return self._make_context(n_ctx=n, n_batch=n, embeddings=True, **options)

    @cached_property
    def _classifier(self) -> Classifier:
        return read_classifier(self._file, self._hp)

    def embed(
        self, text: Text | Sequence[Text], pooling: str | None, normalized: bool | int
    ) -> np.ndarray | list[np.ndarray]:
        """One text's vector, or those of several stacked; a list if each is [n_tokens, n_embd].

        As `stream`, of which `normalized` may be a norm or True for the euclidean one.
        """
        norm = (2 if normalized else -1) if isinstance(normalized, bool) else normalized
        texts, single = _texts_of(text)
        vectors = [e.vector for e in self.stream(texts, pooling, norm)]
        if single:
            return vectors[0]
        return vectors if self.pooling(pooling) == "none" else np.stack(vectors)

    def pooling(self, wanted: str | None) -> Pooling:
        """The kind `wanted`, or the one that the file names ("none" if it names none)."""
        for kind in POOLINGS:
            if kind == (self._hp.pooling if wanted is None else wanted):
                return kind
        raise UsageError(f"pooling is {wanted!r}; allowed: {', '.join(POOLINGS)}")

    def stream(
        self, texts: Sequence[Text], pooling: str | None = None, norm: int = 2
    ) -> Iterator[Embedding]:
        """The texts' embeddings in their order, computed as they are asked for.

        `norm` as `normalize` takes it; scores of a re-ranker are left as they are. Raises before
        any compute: `UsageError`, `ModelError` without a classifier, `TokenizerError`,
        `BatchError` for ids that are none, `ContextFullError` for a text longer than `limit`.
        """
        check_norm(norm)
        kind = self.pooling(pooling)
        classifier = self._classifier if kind == "rank" else None
        ids = [self._checked_ids(i, text, kind) for i, text in enumerate(texts)]

        def vector(hidden: np.ndarray) -> np.ndarray:
            return classifier.scores(hidden) if classifier else normalize(pool(hidden, kind), norm)

        return self._run(ids, vector)

    def _run(
        self, ids: list[list[int]], vector: Callable[[np.ndarray], np.ndarray]
    ) -> Iterator[Embedding]:
        for group in self._groups(ids):
            start = 0
            hidden = self._hidden(group)
            for text in group:
                stop = start + len(text)
                yield Embedding(len(text), _finite(vector(hidden[start:stop])))
                start = stop

    def _groups(self, ids: list[list[int]]) -> Iterator[list[list[int]]]:
        """Texts that share a batch, in order."""
        most = self._context.n_seq_max
        group: list[list[int]] = []
        for text in ids:
            rows = sum(map(len, group)) + len(text)
            if group and (rows > min(_ROWS, self.limit) or len(group) == most):
                yield group
                group = []
            group.append(text)
        if group:
            yield group

    def _hidden(self, group: list[list[int]]) -> np.ndarray:
        """Hidden states of the texts, each a sequence from position 0: float32 [n, n_embd]."""
        context = self._context
        context.memory.clear()
        token = [i for text in group for i in text]
        seq_id = [seq for seq, text in enumerate(group) for _ in text]
        if context.decode(Batch(token=token, seq_id=seq_id, logits=[True] * len(token))) == 1:
            raise ContextFullError(
                f"{len(token)} tokens do not fit into a context of {context.n_ctx}: raise n_ctx"
            )
        return context.embeddings()

    def _checked_ids(self, i: int, text: Text, kind: Pooling) -> list[int]:
        if isinstance(text, str):
            ids = self._ids(text, kind)
        else:
            ids = _given_ids(i, text, self._hp.n_vocab)
        if not ids:
            raise UsageError(f"text {i} has no tokens: there is nothing to embed")
        if len(ids) > self.limit:
            raise ContextFullError(
                f"text {i} has {len(ids)} tokens, the context holds {self.limit}: shorten it"
                + ("" if self._hp.encoder else " or raise n_ctx")
            )
        return ids

    def _ids(self, text: str, kind: Pooling) -> list[int]:
        """The tokens of a text, or of a query and a document, with the model's own around them."""
        tok = self._tokenizer()
        if kind != "rank" or PAIR not in text:
            return tok.encode(text)
        query, _, document = text.partition(PAIR)
        template = self._file.get_str("tokenizer.chat_template.rerank", None)
        if template:
            parts = {"query": query, "document": document}
            return tok.encode(re.sub(r"\{(query|document)\}", lambda m: parts[m[1]], template))
        return tok.encode_pair(query, document)


def _finite(vector: np.ndarray) -> np.ndarray:
    if not np.isfinite(vector).all():
        raise MinferError(
            "the model makes numbers that are not finite of this text: the file may be damaged"
        )
    return vector


def _texts_of(text: Any) -> tuple[list[Text], bool]:
    """The texts given, and whether it was one that was not in a list."""
    if isinstance(text, str):
        return [text], True
    if isinstance(text, bytes | bytearray) or not isinstance(text, Sequence | np.ndarray):
        raise UsageError(
            f"embed takes text, token ids, or a list of them, not {type(text).__name__}"
        )
    if not len(text):
        raise UsageError("there is no text to embed: the list is empty")
    several = isinstance(text[0], str | Sequence | np.ndarray)
    return (list(text), False) if several else ([list(text)], True)


def _given_ids(i: int, ids: Any, n_vocab: int) -> list[int]:
    """The token ids of text `i`, all of them in the vocabulary."""
    if isinstance(ids, bytes | bytearray) or not isinstance(ids, Sequence | np.ndarray):
        raise UsageError(f"text {i} is {type(ids).__name__}; allowed: text or token ids")
    for j, token in enumerate(ids):
        whole = isinstance(token, int | np.integer) and not isinstance(token, bool)
        if not whole or not 0 <= token < n_vocab:
            raise BatchError(f"token {j} of text {i} is {token!r}; allowed: 0 to {n_vocab - 1}")
    return [int(token) for token in ids]
