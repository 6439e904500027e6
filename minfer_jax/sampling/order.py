"""Which samplers run, and in which order: llama.cpp's names, aliases and letters for them."""

from __future__ import annotations

from collections.abc import Iterable

from minfer_jax.errors import UsageError

LETTERS = {
    "penalties": "e",
    "dry": "d",
    "top_n_sigma": "s",
    "top_k": "k",
    "typ_p": "y",
    "top_p": "p",
    "min_p": "m",
    "xtc": "x",
    "temperature": "t",
    "infill": "i",
    "adaptive_p": "a",
}
"""Every sampler that an order may name, with the letter that stands for it."""

DEFAULT_SAMPLERS = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)

_ALIASES = {
    **{name.replace("_", mark): name for name in LETTERS for mark in ("_", "-", "")},
    "nucleus": "top_p",
    "temp": "temperature",
    "typ": "typ_p",
}


def parse_samplers(text: str) -> tuple[str, ...]:
    """An order as `penalties;top_k;temp`, in any case, with `-` or nothing for `_`; "" for none.

    Raises `UsageError` for a name that is unknown or repeated.
    """
    return checked_order(text.split(";") if text.strip() else ())


def parse_sampler_letters(text: str) -> tuple[str, ...]:
    """An order as `edskypmxt`, a letter for each sampler.

    Raises `UsageError` for a letter that is unknown or repeated.
    """
    names = {letter: name for name, letter in LETTERS.items()}
    for letter in text:
        if letter not in names:
            known = ", ".join(f"{key} ({name})" for key, name in names.items())
            raise UsageError(f"unknown sampler {letter!r} in {text!r}; known: {known}")
    return checked_order(names[letter] for letter in text)


def checked_order(names: Iterable[str]) -> tuple[str, ...]:
    """The samplers' own names for names and aliases; `UsageError` as for `parse_samplers`."""
    order: list[str] = []
    for given in names:
        name = _ALIASES.get(given.strip().lower())
        if name is None:
            raise UsageError(f"unknown sampler {given!r}; known: {', '.join(LETTERS)}")
        if name in order:
            raise UsageError(f"sampler {name!r} is named twice")
        order.append(name)
    return tuple(order)
