"""`tokenize`: ids and pieces of a text, without starting jax."""

from __future__ import annotations

import json as jsonlib
import sys

from minfer_jax.cli.request import argument_bytes
from minfer_jax.cli.session import local_file
from minfer_jax.settings import Settings
from minfer_jax.tokenizer import load_tokenizer


def run_tokenize(
    model: str | None,
    text: str,
    *,
    add_special: bool,
    parse_special: bool,
    ids_only: bool,
    json: bool,
) -> None:
    """Print one line a token, or only the ids, or one JSON object."""
    tokenizer = load_tokenizer(local_file(model, Settings.from_env()))
    # Bytes, since an argument or stdin may hold anything; tokenizers take bytes as they are.
    data = sys.stdin.buffer.read() if text == "-" else argument_bytes(text)
    ids = tokenizer.encode(data, add_special=add_special, parse_special=parse_special)
    pieces = [tokenizer.piece(i).decode("utf-8", "replace") for i in ids]
    if json:
        print(jsonlib.dumps({"ids": ids, "pieces": pieces}, ensure_ascii=False))
    elif ids_only:
        print(ids)
    else:
        for i, piece in zip(ids, pieces, strict=True):
            print(f"{i:>8}  {piece!r}")
