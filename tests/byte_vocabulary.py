"""A vocabulary of all bytes, so that an id below 256 is a byte and a text's ids are its bytes."""

from collections.abc import Sequence

from minfer_jax.errors import SamplingError
from minfer_jax.sampling.grammar import GrammarConstraint, GrammarEngine, grammar_spec
from minfer_jax.tokenizer import Tokenizer, from_metadata

ENDS = ("<|im_end|>", "<|end|>")
"""Ids 256 and 257, both of which end a generation."""


def byte_tokenizer(extra: Sequence[str] = (), control: Sequence[str] = ENDS) -> Tokenizer:
    """Bytes, then `control` tokens, then `extra` ones, spelled as text."""
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    characters = [chr(byte if byte in kept else next(others)) for byte in range(256)]
    spelled = ["".join(characters[byte] for byte in text.encode()) for text in extra]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*characters, *control, *spelled],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(control) + [1] * len(extra),
        "tokenizer.ggml.merges": [],
    }
    metadata["tokenizer.ggml.eos_token_id"] = 256
    return from_metadata(metadata)


def endless_tokenizer() -> Tokenizer:
    """Bytes, and no end of a generation."""
    tokens = [f"\\x{byte:02x}" for byte in range(256)]
    return from_metadata({"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": tokens})


ENGINE = GrammarEngine(byte_tokenizer())


def constraint(**asked) -> GrammarConstraint:
    """Of `grammar_spec`'s arguments."""
    spec = grammar_spec(**asked)
    assert spec is not None
    return ENGINE.constraint(spec)


def accepts(text: str, **asked) -> bool:
    """Whether the grammar allows the whole text, and then an end."""
    started = constraint(**asked)
    try:
        for byte in text.encode():
            started.accept(byte)
        started.accept(256)
    except SamplingError:
        return False
    return True


def allowed_after(started: GrammarConstraint, text: str | bytes = b"") -> set[int]:
    """The ids that may follow the bytes of `text`."""
    for byte in text.encode() if isinstance(text, str) else text:
        started.accept(byte)
    return {i for i, allowed in enumerate(started.allowed()) if allowed}
