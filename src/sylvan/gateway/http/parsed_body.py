"""Parses of a request body what routing needs; the worker validates the rest."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import orjson

from sylvan.api.multipart import parse_form
from sylvan.protocol.errors import RequestError

Fields = Mapping[str, Any]
PromptOf = Callable[[Fields], bytes]
"""Returns bytes such that prompts with a common prefix yield a common prefix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedBody:
    """A request body, parsed as far as routing needs.

    Attributes:
        raw: The bytes as received.
        fields: Its fields; empty for a route whose body is not parsed.
        model: Model name; None: not given.
        stream: Whether a stream was requested.
        prompt: See `RoutingRequest.prompt`.
        namespace: See `RoutingRequest.namespace`, less the tenant.
        rid: Request ID, if the client set one.
        token_ids: See `RoutingRequest.token_ids`.
    """

    raw: bytes
    fields: Fields
    model: str | None = None
    stream: bool = False
    prompt: bytes = b""
    namespace: str = ""
    rid: str | None = None
    token_ids: Sequence[int] | None = None


def read(raw: bytes, prompt_of: PromptOf, *, streams_by_default: bool = False) -> ParsedBody:
    """Parse a JSON body.

    Raises:
        RequestError: It is not a JSON object, or `model` is not a string.
    """
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"The body is not valid JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise RequestError("The body must be a JSON object.")
    fields = cast("dict[str, Any]", fields)
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise RequestError("model must be a string.", param="model")
    rid = fields.get("rid")
    prompt = prompt_of(fields)
    return ParsedBody(
        raw=raw,
        fields=fields,
        model=model or None,
        stream=fields.get("stream", streams_by_default) is True,
        prompt=prompt,
        token_ids=_given_ids(fields) if prompt else None,
        namespace=_namespace(fields),
        rid=rid if isinstance(rid, str) else None,
    )


def read_form(raw: bytes, content_type: str) -> ParsedBody:
    """Parse a form body.

    Raises:
        RequestError: It is not a form.
    """
    parts = parse_form(content_type, raw)
    fields = {
        name: part.content.decode("utf-8", "replace").strip()
        for name, part in parts.items()
        if part.filename is None
    }
    stream = fields.get("stream", "").lower() in ("true", "1")
    return ParsedBody(raw=raw, fields=fields, model=fields.get("model") or None, stream=stream)


def conversation(fields: Fields) -> bytes:
    """Read the prompt from messages in OpenAI's, Anthropic's or Ollama's format.

    Fields that chat templates render first come first. The next turn of a conversation starts with
    the bytes of this turn.
    """
    first = [fields.get(name) for name in ("tools", "system") if fields.get(name)]
    ids = fields.get("input_ids")
    if ids:
        return _prompt(ids)
    messages: Any = fields.get("messages") or []
    return b"".join(map(_dumped, first)) + _dumped(messages)[:-1]


def text(*names: str) -> PromptOf:
    """Read the prompt from the first given field: a text, token IDs, or a list of either."""

    def prompt(fields: Fields) -> bytes:
        for name in names:
            value = fields.get(name)
            if value:
                return _prompt(value)
        return b""

    return prompt


def responses(fields: Fields) -> bytes:
    """Read the prompt of `/v1/responses`."""
    parts = [fields.get(name) for name in ("tools", "instructions") if fields.get(name)]
    given = fields.get("input") or ""
    return b"".join(map(_dumped, parts)) + _dumped(given)[:-1]


def nothing(fields: Fields) -> bytes:
    """Return nothing, for routes without a prompt worth caching."""
    return b""


def _prompt(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode(errors="surrogatepass")
    if not isinstance(value, list) or not value:
        return b""
    items = cast("list[Any]", value)
    if isinstance(items[0], int):
        return _ids(items)
    return _prompt(items[0])  # the first prompt of a batch decides


def _given_ids(fields: Fields) -> Sequence[int] | None:
    """Return the token IDs of the only prompt, if it was given as IDs."""
    for name in ("input_ids", "prompt"):
        value = fields.get(name)
        if value:
            items = cast("list[Any]", value) if isinstance(value, list) else []
            return items if items and isinstance(items[0], int) else None
    return None


def _ids(value: Sequence[Any]) -> bytes:
    try:
        return array("i", value).tobytes()
    except (TypeError, OverflowError):  # the worker will report the error
        return b""


def _dumped(value: Any) -> bytes:
    return orjson.dumps(value)


def _namespace(fields: Fields) -> str:
    """Return the cache namespace, which keeps prefixes apart in a worker's cache."""
    names = ("lora_path", "lora_name", "extra_key", "cache_salt")
    given = [fields[name] for name in names if fields.get(name)]
    if not given:
        return ""
    return orjson.dumps(given).decode()
