"""Chat templates: messages in, one string out, as Hugging Face's `apply_chat_template` does it.

The template comes out of a model file and is not trusted: `sandbox` runs it. What messages say is
data and is never parsed as a template. It is not marked in the result either: a control token
that a user spells out stands in the rendered text like one of the template's own, and whoever
tokenizes that text decides what it means.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from minfer_jax.errors import TemplateError

if TYPE_CHECKING:
    from minfer_jax.chat.sandbox import BoundedTemplate

MAX_CHARS = 4 << 20
"""The longest text that a template may render, in characters."""
TIME_LIMIT_S = 10.0
"""The longest time that one render may take; ordinary ones take a millisecond."""


class ChatTemplate:
    """A template and the special tokens it may print. Cheap to make: it compiles when first used.

    `bos_token` and `eos_token` are the tokens' texts, "" where a vocabulary has none: templates
    add them to strings, which fails on anything else. Safe to use from several threads.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str,
        eos_token: str,
        max_chars: int = MAX_CHARS,
        time_limit_s: float = TIME_LIMIT_S,
    ) -> None:
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.max_chars = max_chars
        self.time_limit_s = time_limit_s

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The prompt's text for `messages` (`role`, `content`, `tool_calls`... as OpenAI has them).

        `extra` are further names the template may read (`documents`, `enable_thinking`...). The
        given messages are not changed. Raises `TemplateError`, with the template's own message
        where it refuses the conversation by `raise_exception`.
        """
        return self._compiled.render(
            {
                "documents": None,
                **extra,
                "messages": [normalise(message) for message in messages],
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
                "bos_token": self.bos_token,
                "eos_token": self.eos_token,
            }
        )

    @cached_property
    def _compiled(self) -> BoundedTemplate:
        # jinja2 costs 30 ms to import, which a plain completion does not owe.
        from minfer_jax.chat.sandbox import BoundedTemplate

        return BoundedTemplate(
            self.source, max_chars=self.max_chars, time_limit_s=self.time_limit_s
        )


def normalise(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `message` as templates expect it.

    - `content` null or missing, as the OpenAI API allows beside tool calls, becomes "";
    - `arguments` of tool calls, in that API a string of JSON, become the object that it holds;
      text that is not a JSON object stays as it is.
    """
    if not isinstance(message, Mapping):
        raise TemplateError(f"a message must be a mapping, got {type(message).__name__}")
    result = dict(message)
    if result.get("content") is None:
        result["content"] = ""
    if isinstance(calls := result.get("tool_calls"), Sequence) and not isinstance(calls, str):
        result["tool_calls"] = [_with_arguments(call) for call in calls]
    if isinstance(call := result.get("function_call"), Mapping):
        result["function_call"] = _with_arguments(call)
    return result


def _with_arguments(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    result = dict(call)
    if isinstance(function := result.get("function"), Mapping):
        result["function"] = _with_arguments(function)
    if isinstance(text := result.get("arguments"), str):
        result["arguments"] = _decoded(text)
    return result


def _decoded(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
