"""`--config FILE`: defaults for a command's flags out of a TOML file. Flags win over it."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import typer

from minfer_jax.errors import UsageError

_NOT_IN_FILE = ("config", "debug", "text")


def typed_first(ctx: typer.Context, **values: str | None) -> dict[str, str]:
    """Of several ways to say one thing those on the command line, or else those in the file."""
    given = {name: value for name, value in values.items() if value is not None}
    typed = {name: value for name, value in given.items() if not _from_file(ctx, name)}
    return typed or given


def _from_file(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "DEFAULT_MAP"


def _load(ctx: typer.Context, path: str | None) -> str | None:
    """Make the file's values the defaults of the command's other parameters."""
    if path is None:
        return None
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: not valid TOML: {error}") from error
    kinds = _kinds(ctx.command)
    for key, value in values.items():
        if key not in kinds:
            known = ", ".join(sorted(kinds))
            raise UsageError(f"--config {path}: unknown key {key!r}; known: {known}")
        if not (allowed := kinds[key]).fits(value):
            raise UsageError(f"--config {path}: {key} is {value!r}; allowed: {allowed.words}")
    ctx.default_map = {**(ctx.default_map or {}), **values}
    return path


class _Kind(NamedTuple):
    """What a TOML value may be."""

    words: str
    fits: Callable[[Any], bool]


_TEXT = _Kind("a string", lambda v: type(v) is str)
_TEXTS = _Kind("a list of strings", lambda v: type(v) is list and all(map(_TEXT.fits, v)))
_KINDS = {
    bool: _Kind("true or false", lambda v: type(v) is bool),
    int: _Kind("an integer", lambda v: type(v) is int),
    float: _Kind("a number", lambda v: type(v) in (int, float)),
}


def _kinds(command: Any) -> dict[str, _Kind]:
    """What each of a command's parameters may be, by their annotations."""
    annotated = inspect.signature(command.callback, eval_str=True).parameters
    names = [p.name for p in command.params if p.name in annotated and p.name not in _NOT_IN_FILE]
    return {name: _kind(annotated[name].annotation) for name in names}


def _kind(annotation: Any) -> _Kind:
    """That of `Annotated[int | None, ...]` is an integer: None is what a flag left out is."""
    plain = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    options = get_args(plain) if isinstance(plain, UnionType) else (plain,)
    kind = next(option for option in options if option is not NoneType)
    return _TEXTS if get_origin(kind) is list else _KINDS.get(kind, _TEXT)


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
