"""Bytes and characters: what the other modules of this room need to know about UTF-8.

It knows nothing of tokens. Inside the room a text is a `str` in which every byte that is not
UTF-8 is a surrogate escape (PEP 383), so that no byte is lost until a tokenizer decides.
"""

from __future__ import annotations

import codecs

from minfer_jax.errors import TokenizerError

_LENGTH_BY_LEAD = (1,) * 12 + (2, 2, 3, 4)
"""Bytes of a character by the upper four bits of its first byte."""


class Utf8Stream:
    """Turns a stream of bytes, cut anywhere, into whole characters.

    The joined output equals `data.decode("utf-8", "replace")` of the joined input: a byte that
    cannot continue a character becomes one U+FFFD as soon as that is certain, an unfinished
    character one U+FFFD at `flush`.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """All characters that are complete by now; an unfinished one is kept back."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What was kept back, as U+FFFD, or `""`; the stream can be used again."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def text_of(source: str | bytes) -> str:
    """`source` as the room's text form. TokenizerError for a `str` with a lone surrogate."""
    if isinstance(source, bytes):
        return source.decode("utf-8", "surrogateescape")
    if not isinstance(source, str):
        raise TokenizerError(f"text must be str or bytes, not {type(source).__name__}")
    try:
        source.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"text holds a lone surrogate {source[error.start]!a} at character {error.start}, "
            "which is no Unicode text"
        ) from None
    return source


def bytes_of(text: str) -> bytes:
    """The bytes that `text_of` was given."""
    return text.encode("utf-8", "surrogateescape")


def is_valid(text: str) -> bool:
    """False if the text came from bytes that are not UTF-8."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def lenient(text: str) -> str:
    """The code points llama.cpp reads out of bytes that are not UTF-8.

    A byte that starts no well-formed sequence is U+FFFD by itself. Sequences are checked for
    their continuation bytes only: encoded surrogates and overlong forms give their code point.
    """
    data = bytes_of(text)
    points: list[str] = []
    i = 0
    while i < len(data):
        length = _sequence_length(data, i)
        point = data[i] if length == 1 else data[i] & (0x7F >> length)
        for byte in data[i + 1 : i + length]:
            point = point << 6 | byte & 0x3F
        if length == 0 or point > 0x10FFFF:
            points.append("\ufffd")
            i += 1
        else:
            points.append(chr(point))
            i += length
    return "".join(points)


def _sequence_length(data: bytes, start: int) -> int:
    """Bytes of the sequence at `start`, 0 if it is malformed."""
    lead = data[start]
    if lead < 0x80:
        return 1
    if lead < 0xC0 or lead > 0xF7:
        return 0
    length = _LENGTH_BY_LEAD[lead >> 4]
    rest = data[start + 1 : start + length]
    if len(rest) < length - 1 or any(byte & 0xC0 != 0x80 for byte in rest):
        return 0
    return length


def lead_byte_chunks(text: str) -> list[str]:
    """The bytes of `text` cut where the first byte of each chunk says, whatever the others are."""
    data = bytes_of(text)
    chunks: list[str] = []
    i = 0
    while i < len(data):
        length = _LENGTH_BY_LEAD[data[i] >> 4]
        chunks.append(data[i : i + length].decode("utf-8", "surrogateescape"))
        i += length
    return chunks
