"""A JSON schema as a grammar: checked, brought into one form, and handed to llguidance.

What llguidance accepts is narrower than JSON Schema 2020-12, and where it deviates it is corrected
here, so that a finished document is valid but for what a note says. An assertion that cannot be
enforced is left out, which only ever allows more, and noted. References all point into `$defs`,
branches without a finite document become `false`, old drafts' spellings the new ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from minfer_jax.errors import GrammarError
from minfer_jax.sampling.grammar.documents import read_json
from minfer_jax.sampling.grammar.finite import finite_definitions, is_finite, pruned
from minfer_jax.sampling.grammar.nesting import check_nesting
from minfer_jax.sampling.grammar.pattern import Inexpressible, whole_string
from minfer_jax.sampling.grammar.references import References
from minfer_jax.sampling.grammar.values import (
    MAX_BOUND,
    Place,
    count_of,
    kind_of,
    not_above,
    number,
    shown,
    unspellable,
    wrong,
)

_OPTIONS = {
    # One space, or a line break with its indentation: a model cannot go on with spaces for ever.
    "whitespace_pattern": r"[\x20]|\r?\n[\x20\x09]{0,40}",
    # Every string has one spelling. With \u, "\u0061" would pass for a name other than "a".
    "json_allowed_escapes": 'nrbtf\\"',
    # Told apart only where that is provable; otherwise "at least one" is enforced, and noted.
    "coerce_one_of": True,
}
_MAX_SCHEMAS = 10_000
_MAX_PROPERTIES = 2_000
"""Names of one object; compiling them takes time with the square of their number."""
_MAX_COUNT = 1 << 31
"""No text is as long, so that a higher maximum means nothing."""
_OPEN = "a name may fit a pattern that was left out"
"""A mark on an object's schema while its keywords are read."""

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_FORMATS = (
    *("date-time", "time", "date", "duration", "email", "hostname"),
    *("ipv4", "ipv6", "uri", "uuid"),
)
_SILENT = (
    *("$schema", "$id", "id", "$comment", "$anchor", "$dynamicAnchor", "$vocabulary", "$defs"),
    *("definitions", "title", "description", "default", "example", "examples", "deprecated"),
    *("readOnly", "writeOnly", "contentMediaType", "contentEncoding", "contentSchema"),
    *("then", "else", "minContains", "maxContains", "x-guidance"),
)
"""Without an effect of their own on what is valid, or a part of a keyword that is noted."""
_UNENFORCED: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "if": (),
    "contains": (),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
    **dict.fromkeys(("propertyNames", "unevaluatedItems", "unevaluatedProperties"), (True, {})),
    **dict.fromkeys(("$dynamicRef", "$recursiveRef"), ()),
}
"""Assertions that llguidance does not know, and the values with which they assert nothing."""


def lark_of_schema(text: str) -> tuple[str, tuple[str, ...]]:
    """A JSON schema in llguidance's dialect of Lark, and what of it is not enforced.

    GrammarError, with the place, for text that is not JSON or not a schema, for a reference to
    nothing, to another document or without an end, and for a schema that nothing can match.
    """
    document = read_json(text)
    if not isinstance(document, dict | bool):
        raise GrammarError(f"a JSON schema is an object or a boolean, not {kind_of(document)}")
    try:
        json.dumps(document, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise GrammarError("the JSON schema holds a lone surrogate, no Unicode text") from None
    reader = _Reader(document)
    schema = {"x-guidance": _OPTIONS, **reader.read()}
    return f"start: %json {json.dumps(schema)}", tuple(reader.notes)


class _Reader:
    """One pass over a schema and over all that it refers to."""

    def __init__(self, document: dict[str, Any] | bool) -> None:
        self._root: dict[str, Any] = (
            document if isinstance(document, dict) else {} if document else {"enum": []}
        )
        self._references = References(self._root)
        self._names: dict[int, str] = {}
        self._pending: list[tuple[str, Any, Place]] = []
        self._definitions: dict[str, Any] = {}
        self._n_schemas = 0
        self.notes: dict[str, None] = {}

    def read(self) -> dict[str, Any]:
        """The schema in the form that llguidance gets."""
        root = self._schema(self._root, Place("#", self._root))
        while self._pending:
            name, schema, place = self._pending.pop()
            self._definitions[name] = self._schema(schema, place)
        finite = finite_definitions(self._definitions)
        if not is_finite(root, finite):
            raise GrammarError(
                "nothing can match the JSON schema: it refers to itself without an end, or asks "
                "for a value of which there is none"
            )
        root = pruned(root, finite)  # an object, as `is_finite(False)` is not
        definitions = {name: pruned(schema, finite) for name, schema in self._definitions.items()}
        check_nesting(root, definitions)
        return {**root, "$defs": definitions} if definitions else root

    def _schema(self, schema: Any, place: Place) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise GrammarError(
                f"JSON schema, {place.path}: a schema is an object or a boolean, "
                f"not {kind_of(schema)}"
            )
        self._n_schemas += 1
        if self._n_schemas > _MAX_SCHEMAS:
            raise GrammarError(f"the JSON schema has more than {_MAX_SCHEMAS} parts")
        if schema.get("not", False) in (True, {}):
            return False
        place = place._replace(resource=self._references.resource_of(schema, place.resource))
        schema = _in_new_spelling(schema)
        out: dict[str, Any] = {}
        for keyword, value in schema.items():
            read = _READERS.get(keyword)
            if read is not None:
                read(self, out, value, place.at(keyword))
            elif keyword not in _SILENT:
                self._unknown(keyword, value, place)
        if out.pop(_OPEN, False) and out.pop("additionalProperties", True) not in (True, {}):
            # It speaks of the names that no pattern has, and a pattern has been left out.
            self._note(place.at("additionalProperties"), "not enforced, as a pattern is not")
        self._check_strings(out, place)
        self._check_objects(out, place)
        return out

    def _note(self, place: Place, text: str) -> None:
        self.notes[f"JSON schema, {place.path}: {text}"] = None

    def _unknown(self, keyword: str, value: Any, place: Place) -> None:
        if keyword in _UNENFORCED:
            if value not in _UNENFORCED[keyword]:
                self._note(place, f"{keyword!r} is not enforced")
        elif not keyword.startswith("x-"):
            self._note(place, f"the unknown keyword {keyword!r} has no effect")

    # One reader a keyword: it checks `value` and writes to `out` what llguidance is to see.

    def _reference(self, out: dict[str, Any], value: Any, place: Place) -> None:
        if not isinstance(value, str):
            raise wrong(place, "a text", value)
        try:
            target = self._references.resolve(value, place.resource)
        except GrammarError as error:
            raise GrammarError(f"JSON schema, {place.path}: {error}") from None
        name = self._names.get(id(target.schema))
        if name is None:
            name = self._names[id(target.schema)] = f"d{len(self._names)}"
            self._pending.append((name, target.schema, Place(value, target.resource)))
        out["$ref"] = f"#/$defs/{name}"

    def _sub_schema(self, out: dict[str, Any], value: Any, place: Place) -> None:
        out[place.keyword] = self._schema(value, place)

    def _sub_schemas(self, out: dict[str, Any], value: Any, place: Place) -> None:
        if not isinstance(value, list) or not value:
            raise wrong(place, "a list of schemas, not empty", value)
        out[place.keyword] = [self._schema(part, place.at(i)) for i, part in enumerate(value)]

    def _prefix(self, out: dict[str, Any], value: Any, place: Place) -> None:
        if value != []:
            self._sub_schemas(out, value, place)

    def _properties(self, out: dict[str, Any], value: Any, place: Place) -> None:
        if not isinstance(value, dict):
            raise wrong(place, "an object of schemas", value)
        if len(value) > _MAX_PROPERTIES:
            raise GrammarError(
                f"JSON schema, {place.path}: {len(value)} names; allowed: {_MAX_PROPERTIES}"
            )
        out["properties"] = {
            name: self._schema(part, place.at(name)) for name, part in value.items()
        }

    def _pattern_properties(self, out: dict[str, Any], value: Any, place: Place) -> None:
        if not isinstance(value, dict):
            raise wrong(place, "an object of schemas", value)
        found: dict[str, Any] = {}
        for name, part in value.items():
            pattern = self._expressed(name, place.at(name))
            schema = self._schema(part, place.at(name))
            if pattern is None:
                out[_OPEN] = True
            elif pattern in found:  # spelled in another way
                found[pattern] = {"allOf": [found[pattern], schema]}
            else:
                found[pattern] = schema
        problem = _problem({"patternProperties": dict.fromkeys(found, True)}) if found else ""
        if problem:
            out[_OPEN] = True
            self._note(place, f"not enforced: {problem}")
        elif found:
            out["patternProperties"] = found

    def _required(self, out: dict[str, Any], value: Any, place: Place) -> None:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise wrong(place, "a list of names", value)
        out["required"] = value

    def _type(self, out: dict[str, Any], value: Any, place: Place) -> None:
        kinds = [value] if isinstance(value, str) else value
        if not isinstance(kinds, list) or not kinds or any(kind not in _TYPES for kind in kinds):
            raise wrong(place, f"one or several of {', '.join(_TYPES)}", value)
        out["type"] = value

    def _const(self, out: dict[str, Any], value: Any, place: Place) -> None:
        problem = unspellable(value)
        if problem:
            raise GrammarError(f"JSON schema, {place.path}: {problem}")
        out["const"] = value

    def _enum(self, out: dict[str, Any], value: Any, place: Place) -> None:
        if not isinstance(value, list):
            raise wrong(place, "a list of values", value)
        out["enum"] = []
        for i, item in enumerate(value):
            problem = unspellable(item)
            if problem:
                self._note(place.at(i), f"the value is left out: {problem}")
            else:
                out["enum"].append(item)

    def _minimum(self, out: dict[str, Any], value: Any, place: Place) -> None:
        # As the maximum of the numbers with the other sign.
        out[place.keyword] = -self._bound(-number(value, place), value, place)

    def _maximum(self, out: dict[str, Any], value: Any, place: Place) -> None:
        out[place.keyword] = self._bound(number(value, place), value, place)

    def _bound(self, maximum: int | float, value: Any, place: Place) -> int | float:
        if maximum < -MAX_BOUND:
            raise GrammarError(f"JSON schema, {place.path}: {shown(value)} is beyond 2**62")
        if maximum > MAX_BOUND:
            sign = "-" if value < 0 else ""
            self._note(place, f"{shown(value)} is taken as {sign}2**62")
        return not_above(min(maximum, MAX_BOUND))

    def _multiple(self, out: dict[str, Any], value: Any, place: Place) -> None:
        if number(value, place) <= 0:
            raise wrong(place, "a number above 0", value)
        problem = _problem({"type": "number", "multipleOf": value})
        if problem:
            self._note(place, f"not enforced: {problem}")
        else:
            out["multipleOf"] = value

    def _least(self, out: dict[str, Any], value: Any, place: Place) -> None:
        out[place.keyword] = count = count_of(value, place)
        if count > _MAX_COUNT:
            raise GrammarError(f"JSON schema, {place.path}: {shown(value)} is above {_MAX_COUNT}")

    def _most(self, out: dict[str, Any], value: Any, place: Place) -> None:
        count = count_of(value, place)
        if count <= _MAX_COUNT:
            out[place.keyword] = count

    def _pattern(self, out: dict[str, Any], value: Any, place: Place) -> None:
        if not isinstance(value, str):
            raise wrong(place, "a text", value)
        pattern = self._expressed(value, place)
        if pattern is not None:
            out["pattern"] = pattern

    def _format(self, out: dict[str, Any], value: Any, place: Place) -> None:
        if value in _FORMATS:
            out["format"] = value
        else:
            self._note(place, f"the format {value!r} is not enforced")

    def _expressed(self, pattern: str, place: Place) -> str | None:
        """A pattern for llguidance; None, and a note, if it cannot be enforced."""
        try:
            found = whole_string(pattern)
            reason = _problem({"type": "string", "pattern": found})
        except Inexpressible as error:
            reason = str(error)
        if not reason:
            return found
        self._note(place, f"the pattern {pattern!r} is not enforced: {reason}")
        return None

    def _check_strings(self, out: dict[str, Any], place: Place) -> None:
        """Take a pattern or format out that its own neighbours make too complex."""
        keys = [key for key in ("pattern", "format") if key in out]
        if not keys or len(out.keys() & {*keys, "minLength", "maxLength"}) < 2:
            return
        together = {key: out[key] for key in (*keys, "minLength", "maxLength") if key in out}
        reason = _problem({"type": "string", **together})
        if reason:
            for key in keys:
                del out[key]
            self._note(place, f"{' and '.join(keys)} are not enforced: {reason}")

    def _check_objects(self, out: dict[str, Any], place: Place) -> None:
        """Take counts of properties out that always hold, or that llguidance cannot count."""
        if "minProperties" in out and out["minProperties"] <= len(set(out.get("required", ()))):
            del out["minProperties"]
        if "maxProperties" in out and out.get("additionalProperties") is False:
            names = out.get("properties", {})
            if not out.get("patternProperties") and len(names) <= out["maxProperties"]:
                del out["maxProperties"]
        counts = [key for key in ("minProperties", "maxProperties") if key in out]
        if not counts:
            return
        if out.get("minProperties", 0) > out.get("maxProperties", _MAX_COUNT):
            return  # llguidance finds it impossible
        alike = {key: out[key] for key in (*counts, "required") if key in out}
        alike["properties"] = dict.fromkeys(out.get("properties", ()), True)
        if out.get("additionalProperties") is False and not out.get("patternProperties"):
            alike["additionalProperties"] = False
        reason = _problem({"type": "object", **alike})
        if reason:
            for key in counts:
                del out[key]
            self._note(place, f"{' and '.join(counts)} are not enforced: {reason}")
        elif out.get("minProperties", 0) > len(alike.get("required", ())) + 1 and (
            "additionalProperties" not in alike
        ):
            self._note(place, "'minProperties' counts a repeated name twice")


_Read = Callable[[_Reader, dict[str, Any], Any, Place], None]
_READERS: dict[str, _Read] = {
    "$ref": _Reader._reference,
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), _Reader._sub_schemas),
    "prefixItems": _Reader._prefix,
    **dict.fromkeys(("items", "additionalProperties"), _Reader._sub_schema),
    "properties": _Reader._properties,
    "patternProperties": _Reader._pattern_properties,
    "required": _Reader._required,
    "type": _Reader._type,
    "const": _Reader._const,
    "enum": _Reader._enum,
    **dict.fromkeys(("minimum", "exclusiveMinimum"), _Reader._minimum),
    **dict.fromkeys(("maximum", "exclusiveMaximum"), _Reader._maximum),
    "multipleOf": _Reader._multiple,
    **dict.fromkeys(("minLength", "minItems", "minProperties"), _Reader._least),
    **dict.fromkeys(("maxLength", "maxItems", "maxProperties"), _Reader._most),
    "pattern": _Reader._pattern,
    "format": _Reader._format,
}


def _in_new_spelling(schema: dict[str, Any]) -> dict[str, Any]:
    """Tuples and exclusive bounds as 2020-12 writes them, at their places."""
    tuples = isinstance(schema.get("items"), list)
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "items" and tuples:
            out["prefixItems"] = value
        elif key == "additionalItems":
            if tuples:
                out["items"] = value
        elif key in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
            bound = "minimum" if key == "exclusiveMinimum" else "maximum"
            if value and bound in schema:
                out[key] = schema[bound]
        else:
            out[key] = value
    return out


def _problem(schema: dict[str, Any]) -> str:
    """Why llguidance cannot take a schema; empty if it can, or if nothing matches it."""
    from llguidance import LLMatcher

    whole = {"x-guidance": _OPTIONS, **schema}
    message = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(whole)))
    if not message or message.startswith(("WARNING", "Unsatisfiable")):
        return ""
    return " ".join(message.split())[:200]
