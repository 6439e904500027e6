"""Flags of the samplers and of grammars, as groups that any command can take.

Spelled and defined as in llama.cpp. A group is a dataclass whose fields are flags; a command that
`spread` decorates names the group as one parameter. Nothing heavy is imported before a group is
asked for what it says.
"""

from __future__ import annotations

import codecs
import functools
import inspect
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from minfer_jax.cli.config import typed_first
from minfer_jax.errors import UsageError

if TYPE_CHECKING:
    from minfer_jax.sampling.grammar import GrammarSpec
    from minfer_jax.sampling.params import SamplingParams

_Option = functools.partial(typer.Option, rich_help_panel="Sampling")
_GrammarOption = functools.partial(
    typer.Option, rich_help_panel="Grammar (one of these)", show_default=False
)


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """How the next token is chosen."""

    seed: Annotated[
        int, _Option("-s", "--seed", help="Decides all draws; -1 takes a random one.")
    ] = 42
    samplers: Annotated[
        str | None,
        _Option(
            "--samplers",
            metavar="NAMES",
            help="Those that run, in order, as top_k;temp. Default: penalties; dry; top_n_sigma;"
            " top_k; typ_p; top_p; min_p; xtc; temperature. Others: adaptive_p; infill.",
            show_default=False,
        ),
    ] = None
    sampler_seq: Annotated[
        str | None,
        _Option(
            "--sampler-seq",
            "--sampling-seq",
            metavar="LETTERS",
            help="The same with a letter each. Default: edskypmxt.",
            show_default=False,
        ),
    ] = None
    temp: Annotated[
        float, _Option("--temp", "--temperature", help="0: always the likeliest token.")
    ] = 0.8
    dynatemp_range: Annotated[
        float,
        _Option("--dynatemp-range", help="Temperature by entropy: +- this much. 0: off."),
    ] = 0.0
    dynatemp_exp: Annotated[
        float, _Option("--dynatemp-exp", help="Exponent of the entropy in it.")
    ] = 1.0
    top_k: Annotated[int, _Option("--top-k", help="Keep the k likeliest. 0: all.")] = 40
    top_p: Annotated[
        float, _Option("--top-p", help="Keep the likeliest up to this total. 1: all.")
    ] = 0.95
    min_p: Annotated[
        float, _Option("--min-p", help="Keep those this likely, relative to the likeliest. 0: all.")
    ] = 0.05
    typical_p: Annotated[
        float,
        _Option("--typical", "--typical-p", help="Locally typical: up to this total. 1: off."),
    ] = 1.0
    top_n_sigma: Annotated[
        float,
        _Option(
            "--top-nsigma",
            "--top-n-sigma",
            help="Keep logits so many standard deviations from the highest. 0: off.",
        ),
    ] = -1.0
    xtc_probability: Annotated[
        float,
        _Option("--xtc-probability", help="How often the likely tokens but the last go. 0: off."),
    ] = 0.0
    xtc_threshold: Annotated[
        float, _Option("--xtc-threshold", help="What counts as likely. Over 0.5: off.")
    ] = 0.1
    mirostat: Annotated[
        int, _Option("--mirostat", help="1 or 2: hold the surprise at a target. 0: off.")
    ] = 0
    mirostat_lr: Annotated[float, _Option("--mirostat-lr", help="Its learning rate, eta.")] = 0.1
    mirostat_ent: Annotated[float, _Option("--mirostat-ent", help="Its target, tau, in bits.")] = (
        5.0
    )
    adaptive_target: Annotated[
        float,
        _Option(
            "--adaptive-target", help="Prefer this probability, with adaptive_p. Below 0: off."
        ),
    ] = -1.0
    adaptive_decay: Annotated[
        float, _Option("--adaptive-decay", help="How slowly it adapts, 0 to 0.99.")
    ] = 0.9
    repeat_last_n: Annotated[
        int, _Option("--repeat-last-n", help="Window of the next three. 0: off, -1: everything.")
    ] = 64
    repeat_penalty: Annotated[
        float, _Option("--repeat-penalty", help="Factor for tokens in the window. 1: off.")
    ] = 1.0
    presence_penalty: Annotated[
        float, _Option("--presence-penalty", help="Taken off once. 0: off.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, _Option("--frequency-penalty", help="Taken off for each time. 0: off.")
    ] = 0.0
    dry_multiplier: Annotated[
        float, _Option("--dry-multiplier", help="Weight of the DRY penalty. 0: off.")
    ] = 0.0
    dry_base: Annotated[
        float, _Option("--dry-base", help="It grows by this with each token repeated.")
    ] = 1.75
    dry_allowed_length: Annotated[
        int, _Option("--dry-allowed-length", help="Repeats of this length are free.")
    ] = 2
    dry_penalty_last_n: Annotated[
        int, _Option("--dry-penalty-last-n", help="Its window. 0: off, -1: everything.")
    ] = 64
    dry_sequence_breaker: Annotated[
        list[str] | None,
        _Option(
            "--dry-sequence-breaker",
            metavar="TEXT",
            help="Ends a repeat; may be repeated, and takes the place of the default ones: line"
            " end, colon, quote, asterisk. none: there are none.",
            show_default=False,
        ),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        _Option(
            "-l",
            "--logit-bias",
            metavar="ID+BIAS",
            help="Add to a token's logit, as 15043+1 or 15043-inf; may be repeated.",
            show_default=False,
        ),
    ] = None
    ignore_eos: Annotated[
        bool, _Option("--ignore-eos", help="Never choose a token that ends the answer.")
    ] = False
    min_keep: Annotated[
        int, _Option("--min-keep", help="Samplers that cut leave at least this many.")
    ] = 0

    def params(self, ctx: typer.Context) -> SamplingParams:
        """What the flags say; raises `UsageError`."""
        from minfer_jax.sampling.params import SamplingParams

        values: dict[str, Any] = {
            **{name: value for name, value in vars(self).items() if name not in _TRANSLATED},
            **self._order(ctx),
            **_breakers(self.dry_sequence_breaker),
            "dynatemp_exponent": self.dynatemp_exp,
            "mirostat_eta": self.mirostat_lr,
            "mirostat_tau": self.mirostat_ent,
            "logit_bias": tuple(map(_bias, self.logit_bias or [])),
        }
        return SamplingParams(**values)

    def _order(self, ctx: typer.Context) -> dict[str, Any]:
        from minfer_jax.sampling.order import parse_sampler_letters, parse_samplers

        match list(typed_first(ctx, samplers=self.samplers, sampler_seq=self.sampler_seq).items()):
            case []:
                return {}
            case [("samplers", names)]:
                return {"samplers": parse_samplers(names)}
            case [("sampler_seq", letters)]:
                return {"samplers": parse_sampler_letters(letters)}
        raise UsageError("give one of --samplers and --sampler-seq")


_TRANSLATED = frozenset(
    [
        "samplers",
        "sampler_seq",
        "dynatemp_exp",
        "mirostat_lr",
        "mirostat_ent",
        "dry_sequence_breaker",
        "logit_bias",
    ]
)


@dataclass(frozen=True, kw_only=True)
class GrammarFlags:
    """What the text has to look like."""

    grammar: Annotated[
        str | None, _GrammarOption("--grammar", help="Text of this grammar, in GBNF.")
    ] = None
    grammar_file: Annotated[
        str | None, _GrammarOption("--grammar-file", metavar="FILE", help="The same from a file.")
    ] = None
    json_schema: Annotated[
        str | None,
        _GrammarOption(
            "-j", "--json-schema", help="JSON that fits this schema; @FILE reads it from a file."
        ),
    ] = None
    json_schema_file: Annotated[
        str | None,
        _GrammarOption("-jf", "--json-schema-file", metavar="FILE", help="The same from a file."),
    ] = None
    json_object: Annotated[bool, _GrammarOption("--json-object", help="Any JSON object.")] = False
    regex: Annotated[
        str | None, _GrammarOption("--regex", help="Text that matches as a whole.")
    ] = None
    lark: Annotated[
        str | None, _GrammarOption("--lark", help="Text of this grammar, in llguidance's Lark.")
    ] = None

    def spec(self, ctx: typer.Context) -> GrammarSpec | None:
        """What the flags ask for, checked as far as that goes without a vocabulary, or None.

        Raises `UsageError`, `GrammarError` being one.
        """
        json_object = "true" if self.json_object else None
        given = typed_first(ctx, **{**vars(self), "json_object": json_object})
        if not given:
            return None
        if len(given) > 1:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise UsageError(f"give one grammar or schema, not {flags}")
        from minfer_jax.sampling.grammar import check_grammar, grammar_spec

        [(name, value)] = given.items()
        if name == "json_object":
            return grammar_spec(json_object=True)
        asked: dict[str, Any] = {name.removesuffix("_file"): _text(name, value)}
        if spec := grammar_spec(**asked):
            check_grammar(spec)
        return spec


def spread(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command with the flags of its groups as parameters of its own, where the groups stood."""
    signature = inspect.signature(command, eval_str=True)
    groups = {
        name: {p.name: p for p in _parameters(param.annotation)}
        for name, param in signature.parameters.items()
        if param.annotation in (SamplingFlags, GrammarFlags)
    }

    @functools.wraps(command)
    def spread_out(**values: Any) -> Any:
        for name, members in groups.items():
            group = signature.parameters[name].annotation
            values[name] = group(**{member: values.pop(member) for member in members})
        return command(**values)

    parameters = [
        member.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, param in signature.parameters.items()
        for member in groups.get(name, {name: param}).values()
    ]
    spread_out.__dict__["__signature__"] = signature.replace(parameters=parameters)
    return spread_out


def _parameters(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name]
        )
        for f in fields(group)
    ]


def _text(name: str, value: str) -> str:
    """The text of a grammar: of the flag itself or of the file that it names."""
    from minfer_jax.cli.request import argument_bytes, utf8_text

    flag = f"--{name.replace('_', '-')}"
    if name.endswith("_file"):
        return _read(flag, value)
    if name == "json_schema" and value.startswith("@"):
        return _read(flag, value[1:])
    if name == "json_schema" and not value.lstrip().startswith(("{", "true", "false")):
        if not os.path.isfile(value):
            raise UsageError(
                f"{flag} {value[:40]!r} is neither a schema (an object, true or false) nor a file"
            )
        return _read(flag, value)
    return utf8_text(f"the text of {flag}", argument_bytes(value))


_MOST_BYTES = 1 << 24


def _read(flag: str, path: str) -> str:
    from minfer_jax.cli.request import utf8_text

    try:
        with Path(path).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # a name that no file can have is a ValueError
        raise UsageError(f"{flag} {path}: {getattr(error, 'strerror', error)}") from error
    if len(data) > _MOST_BYTES:
        raise UsageError(f"{flag} {path}: more than {_MOST_BYTES >> 20} MiB")
    return utf8_text(f"{flag} {path}", data.removeprefix(codecs.BOM_UTF8))


_BIAS = re.compile(
    r"\s*([0-9]{1,10})\s*([+-])\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|inf)\s*", re.I
)


def _bias(text: str) -> tuple[int, float]:
    found = _BIAS.fullmatch(text)
    if found is None:
        raise UsageError(
            f"--logit-bias is {text!r}; allowed: a token's id, + or -, and a number: 15043-1.5"
        )
    token, sign, size = found.groups()
    return int(token), float(sign + size)


_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


def _breakers(given: list[str] | None) -> dict[str, tuple[str, ...]]:
    """The breakers to use instead of the default ones: those after the last `none`."""
    if not given:
        return {}
    last = max((i for i, text in enumerate(given) if text == "none"), default=-1)
    return {"dry_sequence_breakers": tuple(map(_unescaped, given[last + 1 :]))}


def _unescaped(text: str) -> str:
    r"""With \n, \r, \t, \\, \" and \' as the characters they stand for, since shells keep them."""
    return re.sub(r"""\\([nrt\\"'])""", lambda m: _ESCAPES.get(m[1], m[1]), text)
