"""The functions that chat templates expect beside jinja2's own, as Hugging Face defines them.

They know nothing of the sandbox that runs them, beyond never doing more than they are asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NoReturn

from minfer_jax.chat.growth import LimitError, Refused


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> Iterator[str]:
    """`json.dumps`, piece by piece: insertion order, spaces, nothing escaped for HTML.

    jinja2's own filter of this name sorts keys and writes `<` and `é` as escapes, which is not
    what models were trained on.
    """
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=None if separators is None else (separators[0], separators[1]),
        sort_keys=sort_keys,
    )
    return encoder.iterencode(value)


def raise_exception(message: object = "") -> NoReturn:
    """How a template refuses a conversation."""
    raise Refused(message)


def strftime_now(form: str) -> str:
    """The local time now, in `strftime`'s format."""
    # The C library takes a field width, "%999999999d", and fills it.
    if len(form) > 200 or re.search(r"%\W*\d{2}", form):
        raise LimitError(f"strftime_now: {form[:40]!r} is too long or has a field width")
    return datetime.now().strftime(form)
