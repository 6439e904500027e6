"""`sampling.grammar.tokens`: the bytes of every token, and what is no text."""

from byte_vocabulary import ENDS, byte_tokenizer, endless_tokenizer

from minfer_jax.sampling.grammar.tokens import TokenBytes, ll_tokenizer
from minfer_jax.tokenizer import from_metadata, load_tokenizer


def test_byte_level_tokens():
    tokens = TokenBytes(byte_tokenizer(extra=["é ", "\n\n"]))
    assert tokens.tokens[:256] == [bytes([byte]) for byte in range(256)]
    assert tokens.tokens[256:] == [*(end.encode() for end in ENDS), "é ".encode(), b"\n\n"]
    assert tokens.special_token_ids == [256, 257]
    assert tokens.end_ids == [256, 257]
    assert tokens.eos_token_id == 256
    assert tokens("aé") == [97, 195, 169]


def test_spm_tokens():
    tokenizer = from_metadata(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "<0x0A>", "▁a", "▁", "<b>", "▁▁"],
            "tokenizer.ggml.token_type": [2, 3, 3, 6, 1, 1, 4, 4],
            "tokenizer.ggml.scores": [0.0] * 8,
        }
    )
    tokens = TokenBytes(tokenizer)
    # User-defined tokens are text, spelled as in the file.
    assert tokens.tokens[3:] == [b"\n", b" a", b" ", b"<b>", "▁▁".encode()]
    assert tokens.special_token_ids == [0, 1, 2]
    assert tokens.end_ids == [2]


def test_a_vocabulary_without_an_end():
    tokens = TokenBytes(endless_tokenizer())
    assert tokens.end_ids == [256]
    assert tokens.tokens[256] == b""


def test_llguidance_sees_the_same(smollm2_path):
    tokenizer = load_tokenizer(smollm2_path)
    ll = ll_tokenizer(tokenizer)
    assert ll.vocab_size == tokenizer.n_vocab == 49152
    assert ll.eos_tokens == sorted(tokenizer.eog) == [0, 2, 4]
    ids = tokenizer.encode("Grüße, 世界! 😀\n", add_special=False)
    assert ll.decode_bytes(ids) == "Grüße, 世界! 😀\n".encode()
    special = [i for i in range(tokenizer.n_vocab) if not tokenizer.piece(i, special=False)]
    assert [i for i in range(tokenizer.n_vocab) if ll.is_special_token(i)] == special
    assert len(special) == 17


def test_a_printable_end_is_no_text():
    """GPT-2's default, which a vocabulary with other ids may have by accident."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": list("abcdefghijkl"),
        "tokenizer.ggml.merges": [],
    }
    tokens = TokenBytes(from_metadata(metadata))
    assert (tokens.end_ids, tokens.special_token_ids) == ([11], [11])
