"""jinja2 for templates that nobody vouches for: no access to Python, bounded memory and time.

jinja2's own sandbox keeps a template from reaching Python's internals and from changing the
messages, but not from asking for a terabyte (`'x' * 10**12`) or an hour (nested loops). Here:

- no value a template builds may weigh more than `max_chars` (`weight`: characters and elements,
  shared ones counted each time): operators, literals, calls and filters are checked, those that
  can multiply their input before they run (`growth`);
- text that is printed, also into a macro or a block, goes through `concat`, which counts it;
- loops, calls, operators and filters look at the clock.

It must not know what a conversation is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ClassVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from minfer_jax.chat.filters import raise_exception, strftime_now, tojson
from minfer_jax.chat.growth import LimitError, Refused, growth, number_bits, weight
from minfer_jax.errors import TemplateError

MAX_BITS = 1 << 16
"""The longest integer, in bits, that arithmetic may make."""
MAX_MESSAGE = 500
"""How much of an error's text is passed on, in characters."""

_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(vars(str)) - {"encode", "expandtabs", "maketrans", "translate"},
    dict: frozenset(("items", "keys", "values", "get", "copy")),
    list: frozenset(("index", "count", "copy")),
    tuple: frozenset(("index", "count")),
    int: frozenset(),
    float: frozenset(("is_integer",)),
    bytes: frozenset(),
}
"""What may be called on Python's own types; `to_bytes`, `translate` and such make any size."""


class _Meter:
    """What one render has left."""

    def __init__(self, max_chars: int, time_limit_s: float) -> None:
        self.max_chars = max_chars
        self.deadline = time.monotonic() + time_limit_s

    def tick(self) -> None:
        if time.monotonic() > self.deadline:
            raise LimitError("it takes too long")

    def check(self, size: int) -> None:
        if size > self.max_chars:
            raise LimitError(f"it makes more than {self.max_chars} characters")


_METER: ContextVar[_Meter] = ContextVar("_METER")


class BoundedTemplate:
    """A compiled template. Raises `TemplateError`, on one line, for whatever it does wrong."""

    def __init__(self, source: str, *, max_chars: int, time_limit_s: float) -> None:
        self.max_chars = max_chars
        self.time_limit_s = time_limit_s
        with self._bounds():
            environment = _Environment(
                trim_blocks=True,
                lstrip_blocks=True,
                optimized=False,
                extensions=["jinja2.ext.loopcontrols", _Generation],
            )
            tree = _Guards().visit(environment.parse(source))
            code = environment.compile(tree, filename="<chat template>")
            self._template = jinja2.Template.from_code(environment, code, environment.globals)

    def render(self, names: Mapping[str, Any]) -> str:
        with self._bounds():
            context = self._template.new_context(dict(names))
            return concat(self._template.root_render_func(context))

    @contextmanager
    def _bounds(self) -> Iterator[None]:
        token = _METER.set(_Meter(self.max_chars, self.time_limit_s))
        try:
            yield
        except Refused as error:
            raise TemplateError(f"the chat template refused: {_one_line(error)}") from error
        except LimitError as error:
            raise TemplateError(f"the chat template was stopped: {_one_line(error)}") from error
        except jinja2.TemplateSyntaxError as error:
            line = f"line {error.lineno}: {_one_line(error.message)}"
            raise TemplateError(f"the chat template is not valid: {line}") from error
        # It is foreign code: it can raise whatever Python can, up to RecursionError.
        except Exception as error:
            what = _one_line(error) or type(error).__name__
            raise TemplateError(f"the chat template failed: {what}") from error
        finally:
            _METER.reset(token)


def _one_line(error: object) -> str:
    line = " ".join(str(error)[:MAX_MESSAGE].split())
    return line if len(str(error)) <= MAX_MESSAGE else f"{line}..."


def concat(pieces: Iterable[str]) -> str:
    """Joins what a template prints, and stops it when that is too much."""
    meter, kept, size = _METER.get(), [], 0
    for piece in pieces:
        meter.tick()
        size += len(piece)
        meter.check(size)
        kept.append(piece)
    return "".join(kept)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))
    concat = staticmethod(concat)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.globals = {
            **{name: self.globals[name] for name in ("range", "dict", "cycler", "joiner")},
            "namespace": _Namespace,
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
        }
        self.filters = {
            **{name: _guarded(name, function) for name, function in self.filters.items()},
            "tojson": _guarded("tojson", lambda *args, **kwargs: concat(tojson(*args, **kwargs))),
            "_loop": _loop,
            "_literal": _literal,
        }

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if not super().is_safe_attribute(obj, attr, value):
            return False
        kind = next((kind for kind in _METHODS if isinstance(obj, kind)), None)
        return kind is None or attr in _METHODS[kind]

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        meter = _METER.get()
        meter.tick()
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            if number_bits(operator, left, right) > MAX_BITS:
                raise LimitError(f"{operator} makes too large a number")
        else:
            meter.check(growth(operator, left, (right,), {}, meter.max_chars))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _METER.get()
        meter.tick()
        # jinja2 wraps str.format; what it wraps is the method that is bound to the text.
        method = getattr(__obj, "__wrapped__", __obj)
        subject = getattr(method, "__self__", None)
        if isinstance(subject, str):
            args = tuple(_metered(a, meter) if isinstance(a, Iterator) else a for a in args)
            meter.check(growth(method.__name__, subject, args, kwargs, meter.max_chars))
        result = super().call(__context, __obj, *args, **kwargs)
        meter.check(weight(result, meter.max_chars))
        return result


class _Namespace(jinja2.utils.Namespace):
    def __repr__(self) -> str:
        # It may hold itself many times over; printing it all is exponential.
        return "<Namespace>"


class _Generation(Extension):
    """`{% generation %}` marks what to train on in Hugging Face's templates; here it is nothing."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Guards(NodeTransformer):
    """Puts a filter round each construct that the sandbox has no hook for."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_loop")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "join")

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_literal")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_literal")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_literal") if node.ctx == "load" else node


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _loop(value: Iterable[Any]) -> Iterator[Any]:
    meter = _METER.get()
    for item in value:
        meter.tick()
        yield item


def _literal(value: Any) -> Any:
    meter = _METER.get()
    meter.check(weight(value, meter.max_chars))
    return value


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its input metered and its growth known before it runs."""
    # A filter that wants the context or environment gets it first, before the value.
    at = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        meter = _METER.get()
        meter.tick()
        lead, value, rest = args[:at], args[at], args[at + 1 :]
        if isinstance(value, Iterator) or (name == "sum" and isinstance(value, list)):
            value = _metered(value, meter)
        if name == "join" and isinstance(value, Iterator):
            value = list(value)
        meter.check(growth(name, value, rest, kwargs, meter.max_chars))
        result = function(*lead, value, *rest, **kwargs)
        meter.check(weight(result, meter.max_chars))
        return result

    return guarded


def _metered(items: Iterable[Any], meter: _Meter) -> Iterator[Any]:
    """Items made one by one, by `map` say, may be small each and too much together."""
    total = 0
    for item in items:
        meter.tick()
        total += weight(item, meter.max_chars)
        meter.check(total)
        yield item
