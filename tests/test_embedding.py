"""`embedding`: what is batched with what, which rows make which vector, what is refused.

The contexts here are stand-ins whose hidden states name token, position and sequence, so that
every vector can be told beforehand; real models are in test_conformance_encoders.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from gguf_builder import f32_tensor, write_gguf

from minfer_jax import embedding
from minfer_jax.classifier import read_classifier
from minfer_jax.embedding import Embedder
from minfer_jax.errors import BatchError, ContextFullError, MinferError, ModelError, UsageError
from minfer_jax.gguf import open_gguf


class FakeContext:
    """Hidden states [token, position, 1]; remembers the batches as one list of ids a sequence."""

    def __init__(self, batches, n_ctx, n_seq_max=1, n_ubatch=512, **options):
        self.batches, self.n_ctx, self.n_seq_max, self.options = batches, n_ctx, n_seq_max, options
        self.n_ubatch = n_ubatch
        self.past = [0] * n_seq_max
        self.memory = SimpleNamespace(clear=self.forget)

    def forget(self):
        self.past = [0] * self.n_seq_max

    def decode(self, batch):
        assert len(batch.token) <= min(self.n_ctx, self.options["n_batch"])
        rows, texts = [], {}
        for token, seq, wanted in zip(batch.token, batch.seq_id, batch.logits, strict=True):
            assert wanted and 0 <= seq < self.n_seq_max
            rows.append([token, self.past[seq], 1.0])
            self.past[seq] += 1
            texts.setdefault(seq, []).append(token)
        self.hidden = np.array(rows, np.float32)
        self.batches.append(list(texts.values()))
        return 0

    def embeddings(self):
        return self.hidden


class Words:
    """Ids of words: their lengths, between 1 and 2."""

    def encode(self, text):
        return [1, *(len(word) for word in text.split()), 2]

    def encode_pair(self, first, second):
        return [*self.encode(first), 3, *self.encode(second)[1:]]


@pytest.fixture
def embedder(tmp_path):
    """An `Embedder` over stand-ins; its batches and contexts are attributes."""

    def make(*, encoder=True, n_ctx=64, n_ctx_train=100, pooling="mean", kv=None, tensors=()):
        path = write_gguf(tmp_path / "x.gguf", {"general.name": "x", **(kv or {})}, tensors)
        hp = SimpleNamespace(
            arch="bert",
            encoder=encoder,
            causal=not encoder,
            n_ctx_train=n_ctx_train,
            n_vocab=50,
            n_embd=3,
            pooling=pooling,
        )
        batches, contexts = [], []

        def context(**sizes):
            contexts.append(FakeContext(batches, **sizes))
            return contexts[-1]

        made = Embedder(open_gguf(path), hp, n_ctx=n_ctx, tokenizer=Words, context=context)
        made.batches, made.contexts = batches, contexts
        return made

    return make


@pytest.mark.parametrize(
    ("pooling", "vector"),
    [("mean", [6.0, 1.0, 1.0]), ("cls", [9.0, 0.0, 1.0]), ("last", [5.0, 2.0, 1.0])],
)
def test_the_vector_of_ids(embedder, pooling, vector):
    out = embedder().embed([9, 4, 5], pooling, False)
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out, vector)


def test_without_pooling_every_token_has_a_vector(embedder):
    one = embedder().embed([9, 4], "none", False)
    np.testing.assert_array_equal(one, [[9.0, 0.0, 1.0], [4.0, 1.0, 1.0]])
    several = embedder().embed([[9, 4], [7]], "none", False)
    assert [v.tolist() for v in several] == [[[9, 0, 1], [4, 1, 1]], [[7, 0, 1]]]


def test_the_files_own_pooling_unless_told_otherwise(embedder):
    assert embedder(pooling="cls").embed([9, 4], None, False)[0] == 9.0
    assert embedder(pooling="cls").embed([9, 4], "last", False)[0] == 4.0
    assert embedder(pooling="none").embed([9, 4], None, False).shape == (2, 3)


@pytest.mark.parametrize(
    ("normalized", "vector"),
    [
        (True, [0.6, 0.0, 0.8]),
        (2, [0.6, 0.0, 0.8]),
        (False, [3.0, 0.0, 4.0]),
        (-1, [3.0, 0.0, 4.0]),
        (1, [3 / 7, 0.0, 4 / 7]),
        (0, [24570.0, 0.0, 32760.0]),
    ],
)
def test_normalization(embedder, monkeypatch, normalized, vector):
    monkeypatch.setattr(FakeContext, "embeddings", lambda self: np.float32([[3.0, 0.0, 4.0]]))
    np.testing.assert_allclose(embedder().embed([9], "mean", normalized), vector, rtol=1e-6)


def test_a_text_is_what_its_tokens_are(embedder):
    one = embedder()
    np.testing.assert_array_equal(one.embed("abc de", None, True), one.embed([1, 3, 2, 2], None, 2))
    assert one.batches == [[[1, 3, 2, 2]], [[1, 3, 2, 2]]]


def test_several_texts_are_stacked_in_their_order(embedder):
    out = embedder().embed(["a", [30, 31], "bb cc"], "last", False)
    np.testing.assert_array_equal(out, [[2, 2, 1], [31, 1, 1], [2, 3, 1]])


def test_numpy_arrays_of_ids(embedder):
    one = embedder().embed(np.array([9, 4], np.int32), "last", False)
    np.testing.assert_array_equal(one, [4.0, 1.0, 1.0])
    two = embedder().embed(np.array([[9, 4], [7, 8]]), "last", False)
    np.testing.assert_array_equal(two, [[4.0, 1.0, 1.0], [8.0, 1.0, 1.0]])


def test_an_encoder_takes_several_texts_at_once_up_to_its_rows(embedder, monkeypatch):
    monkeypatch.setattr(embedding, "_ROWS", 6)
    some = embedder()
    texts = [[10] * n for n in (1, 2, 3, 1, 9, 5, 1, 1)]
    made = list(some.stream(texts, "none", -1))
    sizes = [[len(text) for text in batch] for batch in some.batches]
    assert sizes == [[1, 2, 3], [1], [9], [5, 1], [1]]
    assert [e.n_tokens for e in made] == [1, 2, 3, 1, 9, 5, 1, 1]
    for e in made:
        np.testing.assert_array_equal(e.vector[:, 1], range(e.n_tokens))  # each from position 0


def test_an_encoder_takes_no_more_texts_than_the_context_has_sequences(embedder, monkeypatch):
    monkeypatch.setattr(embedding, "_SEQUENCES", 2)
    some = embedder()
    list(some.stream([[5]] * 5))
    assert [len(batch) for batch in some.batches] == [2, 2, 1]


def test_an_encoder_takes_no_more_rows_than_the_context_holds(embedder):
    some = embedder(n_ctx=5)
    list(some.stream([[5] * n for n in (4, 1, 2, 4)]))
    assert [[len(text) for text in batch] for batch in some.batches] == [[4, 1], [2], [4]]


def test_a_decoder_takes_one_text_after_the_other(embedder):
    some = embedder(encoder=False)
    list(some.stream([[5, 6], [7]]))
    assert some.batches == [[[5, 6]], [[7]]]


def test_one_context_for_all_calls_made_when_it_is_needed(embedder):
    some = embedder(n_ctx=64, n_ctx_train=40)
    assert not some.contexts
    some.embed("a", None, True)
    some.embed("b", None, True)
    (context,) = some.contexts
    # What sees each other must be in one ubatch.
    assert (context.n_ctx, context.n_ubatch, context.n_seq_max) == (40, 40, 40)
    assert context.options == {"n_batch": 40, "embeddings": True}
    decoder = embedder(encoder=False, n_ctx=200, n_ctx_train=40)
    decoder.embed("a", None, True)
    (context,) = decoder.contexts
    assert (context.n_ctx, context.n_ubatch, context.n_seq_max) == (200, 512, 1)
    assert context.options == {"n_batch": 200, "embeddings": True}


def test_embeddings_come_as_they_are_computed(embedder):
    some = embedder(encoder=False)
    stream = some.stream([[5], [6]])
    assert some.batches == []
    next(stream)
    assert some.batches == [[[5]]]


@pytest.mark.parametrize(
    ("sizes", "limit", "advice"),
    [
        ({"n_ctx": 64, "n_ctx_train": 100}, 64, "shorten it"),
        ({"n_ctx": 64, "n_ctx_train": 32}, 32, "shorten it"),
        ({"n_ctx": 64, "n_ctx_train": 32, "encoder": False}, 64, "shorten it or raise n_ctx"),
    ],
)
def test_a_text_longer_than_the_context(embedder, sizes, limit, advice):
    some = embedder(**sizes)
    assert some.embed([5] * limit, None, True).shape == (3,)
    line = rf"^text 1 has {limit + 1} tokens, the context holds {limit}: {advice}$"
    with pytest.raises(ContextFullError, match=line):
        some.stream([[5], [5] * (limit + 1)])
    assert len(some.batches) == 1  # nothing of the second call was computed


@pytest.mark.parametrize(
    ("text", "error", "line"),
    [
        (b"abc", UsageError, "embed takes text, token ids, or a list of them, not bytes"),
        (7, UsageError, "embed takes text, token ids, or a list of them, not int"),
        ([], UsageError, "there is no text to embed: the list is empty"),
        (["a", b"b"], UsageError, "text 1 is bytes; allowed: text or token ids"),
        (["a", 7], UsageError, "text 1 is int; allowed: text or token ids"),
        (["a", []], UsageError, "text 1 has no tokens"),
        ([5, 50], BatchError, "token 1 of text 0 is 50; allowed: 0 to 49"),
        ([-1], BatchError, "token 0 of text 0 is -1; allowed: 0 to 49"),
        ([[5], [True]], BatchError, "token 0 of text 1 is True; allowed"),
        ([5, "a"], BatchError, "token 1 of text 0 is 'a'; allowed"),
        ([1.0], BatchError, "token 0 of text 0 is 1.0; allowed"),
        ([1 << 70], BatchError, "allowed: 0 to 49"),
    ],
)
def test_what_is_no_text(embedder, text, error, line):
    some = embedder()
    with pytest.raises(error, match=line):
        some.embed(text, None, True)
    assert not some.batches


def test_poolings_and_norms_that_there_are_not(embedder):
    some = embedder()
    with pytest.raises(UsageError, match="pooling is 'max'; allowed: none, mean, cls, last, rank"):
        some.embed("a", "max", True)
    with pytest.raises(UsageError, match="normalize is -2; allowed"):
        some.embed("a", None, -2)


def test_numbers_that_are_not_finite_are_an_error(embedder, monkeypatch):
    monkeypatch.setattr(FakeContext, "embeddings", lambda self: np.float32([[1.0, np.nan, 0.0]]))
    with pytest.raises(MinferError, match="not finite"):
        embedder().embed([9], None, False)


HEAD = f32_tensor("cls.output.weight", np.array([[1.0, 10.0, 100.0]]))


def test_rank_is_the_classifiers_score_and_never_normalized(embedder):
    out = embedder(tensors=[HEAD]).embed([9, 4, 5], "rank", True)
    np.testing.assert_array_equal(out, [109.0])  # of the first token: 9, position 0, 1


def test_rank_needs_a_classifier(embedder):
    with pytest.raises(ModelError, match=r"x\.gguf: no classifier"):
        embedder().embed([9], "rank", True)


def test_a_query_and_a_document_are_one_sequence(embedder):
    some = embedder(tensors=[HEAD])
    some.embed(["ab\tc dddd", "ab c", "a\tb\tcc"], "rank", True)
    assert some.batches == [[[1, 2, 2, 3, 1, 4, 2], [1, 2, 1, 2], [1, 1, 2, 3, 1, 2, 2]]]
    some.embed("ab\tc", "mean", True)  # elsewhere a tab is a tab
    assert some.batches[-1] == [[1, 2, 1, 2]]


def test_a_query_and_a_document_in_the_files_own_words(embedder):
    template = "Judge: {query} or {document} now"
    some = embedder(tensors=[HEAD], kv={"tokenizer.chat_template.rerank": template})
    some.embed("a{document}\tbb", "rank", True)
    assert some.batches == [[[1, 6, 11, 2, 2, 3, 2]]]


def test_the_classifier_is_read_once(embedder, monkeypatch):
    reads = []

    def read(*args):
        reads.append(1)
        return read_classifier(*args)

    monkeypatch.setattr(embedding, "read_classifier", read)
    some = embedder(tensors=[HEAD])
    some.embed([9], "mean", True)
    assert not reads
    some.embed([9], "rank", True)
    some.embed([9], "rank", True)
    assert len(reads) == 1
