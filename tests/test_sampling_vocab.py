"""`sampling.vocab`: what samplers learn of a tokenizer."""

from minfer_jax.sampling import sampler_vocab
from minfer_jax.tokenizer import from_metadata

PIECES = ["<unk>", "<s>", "</s>", "<|eot|>", "▁a", "b", "<0x0A>"]


def tokenizer(**more):
    return from_metadata(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": PIECES,
            "tokenizer.ggml.scores": [0.0] * len(PIECES),
            "tokenizer.ggml.token_type": [2, 3, 3, 3, 1, 1, 6],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
            **more,
        }
    )


def test_what_samplers_learn():
    tok = tokenizer(**{"tokenizer.ggml.eot_token_id": 3})
    vocab = sampler_vocab(tok)
    assert vocab.n_vocab == 7
    assert vocab.eog == tok.eog == {2, 3}
    assert [vocab.pieces(i) for i in (3, 4, 5, 6)] == [b"<|eot|>", b" a", b"b", b"\n"]
    assert [vocab.plain(i) for i in (3, 4, 5, 6)] == [b"", b" a", b"b", b"\n"]
    assert vocab.encode("</s>") == tok.encode("</s>", add_special=False, parse_special=False)
    assert 2 not in vocab.encode("</s>") and 1 not in vocab.encode("a")


def test_a_text_ends_with_the_end_of_a_turn_else_of_the_sequence():
    assert sampler_vocab(tokenizer(**{"tokenizer.ggml.eot_token_id": 3})).end == 3
    plain = tokenizer()
    assert sampler_vocab(plain).end == (2 if plain.eot is None else plain.eot)


def test_two_vocabularies_are_never_the_same():
    tok = tokenizer()
    one, other = sampler_vocab(tok), sampler_vocab(tok)
    assert len({one, other}) == 2
    one.restarts["x",] = {}
    assert other.restarts == {}
