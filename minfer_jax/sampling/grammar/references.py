"""Where the `$ref`s of a JSON schema point to. Nothing is ever fetched."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from minfer_jax.errors import GrammarError


class Target(NamedTuple):
    """A schema, and the resource (the nearest schema with an `$id`) that its own `#` means."""

    schema: Any
    resource: dict[str, Any]


class References:
    """The places of one document that a `$ref` can name: pointers, anchors, `$id`s."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._resources: dict[str, dict[str, Any]] = {}
        self._anchors: dict[tuple[int, str], Any] = {}
        self._uris: dict[int, str] = {}
        pending: list[tuple[Any, dict[str, Any]]] = [(document, document)]
        self._add(document, "")
        while pending:
            value, resource = pending.pop()
            if isinstance(value, dict):
                resource = self.resource_of(value, resource)
                for key in ("$anchor", "$dynamicAnchor"):
                    if isinstance(value.get(key), str):
                        self._anchors.setdefault((id(resource), value[key]), value)
            children = value.values() if isinstance(value, dict) else value
            pending += [(child, resource) for child in children if isinstance(child, dict | list)]

    def resource_of(self, schema: dict[str, Any], outer: dict[str, Any]) -> dict[str, Any]:
        """The resource that `schema` belongs to: itself if it has an `$id`, else `outer`."""
        name = schema.get("$id")
        if not isinstance(name, str) or name.startswith("#"):
            return outer
        if id(schema) not in self._uris:
            self._add(schema, self._uris[id(outer)])
        return schema

    def resolve(self, reference: str, resource: dict[str, Any]) -> Target:
        """What `reference` means inside `resource`.

        GrammarError for one that this document does not hold; remote ones among them.
        """
        uri, fragment = _parts(reference)
        if uri:
            full = _joined(self._uris[id(resource)], uri)
            found = self._resources.get(full) or self._resources.get(uri)
            if found is None:
                raise GrammarError(
                    f"$ref {reference!r} points outside the schema, and nothing is fetched: "
                    "copy its target into $defs"
                )
            resource = found
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            anchored = self._anchors.get((id(resource), fragment))
            if anchored is None:
                raise GrammarError(f"$ref {reference!r} names an $anchor that does not exist")
            return Target(anchored, resource)
        return self._walk(reference, fragment, resource)

    def _walk(self, reference: str, pointer: str, resource: dict[str, Any]) -> Target:
        """Follow a JSON pointer (RFC 6901)."""
        value: Any = resource
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and key in value:
                value = value[key]
            elif isinstance(value, list) and _is_index(key) and int(key) < len(value):
                value = value[int(key)]
            else:
                raise GrammarError(f"$ref {reference!r} points to nothing: there is no {key!r}")
            if isinstance(value, dict):
                resource = self.resource_of(value, resource)
        return Target(value, resource)

    def _add(self, schema: dict[str, Any], base: str) -> None:
        name = schema.get("$id")
        uri = _parts(_joined(base, name))[0] if isinstance(name, str) else base
        self._uris[id(schema)] = uri
        if uri:
            self._resources.setdefault(uri, schema)


def _parts(uri: str) -> tuple[str, str]:
    """A URI and its fragment; GrammarError for what is none."""
    try:
        whole, fragment = urldefrag(uri)
    except ValueError as error:
        raise GrammarError(f"{uri!r} in the JSON schema is no URI: {error}") from None
    return whole, fragment


def _joined(base: str, uri: str) -> str:
    try:
        return urljoin(base, uri)
    except ValueError as error:
        raise GrammarError(f"{uri!r} in the JSON schema is no URI: {error}") from None


def _is_index(key: str) -> bool:
    return key.isascii() and key.isdecimal() and len(key) < 10
