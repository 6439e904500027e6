"""`--config FILE`: defaults for a command's flags out of a TOML file. Flags win over it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import typer

from minfer_jax.errors import UsageError


def _load(ctx: typer.Context, path: str | None) -> str | None:
    """Make the file's values the defaults of the command's other parameters."""
    if path is None:
        return None
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: not valid TOML: {error}") from error
    known = {p.name for p in ctx.command.params if p.name not in ("config", "debug", "text")}
    for key in values:
        if key not in known:
            names = ", ".join(sorted(str(name) for name in known))
            raise UsageError(f"--config {path}: unknown key {key!r}; known: {names}")
    ctx.default_map = {**(ctx.default_map or {}), **values}
    return path


ConfigFile = Annotated[
    str | None,
    typer.Option(
        "--config",
        help="TOML file with defaults for these flags.",
        callback=_load,
        is_eager=True,
        show_default=False,
    ),
]
