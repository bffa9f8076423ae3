"""Routes for the gateway's tokenizers and its output parsers."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec

from sylvan.api.openai.chat import ChatTool
from sylvan.api.validation import parse
from sylvan.gateway.control.api import OwnRoute, Params
from sylvan.gateway.control.bodies import decoded
from sylvan.gateway.http.caller import Caller
from sylvan.gateway.text.library import PendingTokenizer, TextLibrary
from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.text import reasoning, tools
from sylvan.text.tools import ToolSpec
from sylvan.utils.threads import call_in_thread

MAX_BODY_BYTES = 16 << 20
MAX_TOOLS = 1024

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class AddTokenizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/tokenizers`.

    Attributes:
        name: Name of the model.
        source: Directory with the tokenizer files.
        chat_template_path: Template file that replaces the model's own.
    """

    name: Name
    source: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    chat_template_path: str | None = None


class ParseCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/parse/function_call`; `parser` and `tool_call_parser` are synonyms."""

    text: str
    tools: list[dict[str, Any]] = []
    tool_call_parser: Name | None = None
    parser: Name | None = None


class ParseReasoning(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/parse/reasoning`; `parser` and `reasoning_parser` are synonyms."""

    text: str
    reasoning_parser: Name | None = None
    parser: Name | None = None


@dataclass(frozen=True, slots=True)
class TextRoutes:
    """Lists, adds and removes tokenizers; parses texts.

    Attributes:
        library: The loaded tokenizers.
    """

    library: TextLibrary

    @property
    def routes(self) -> tuple[OwnRoute, ...]:
        """Return the routes."""
        all_, one = "/v1/tokenizers", "/v1/tokenizers/{id}"
        calls, thinking = "/parse/function_call", "/parse/reasoning"
        return (
            OwnRoute(path=all_, handler=self.show_all, level="operator"),
            OwnRoute(path=all_, handler=self.add, methods=("POST",), level="operator"),
            OwnRoute(path=one, handler=self.show, level="operator"),
            OwnRoute(path=one, handler=self.remove, methods=("DELETE",), level="operator"),
            OwnRoute(path=one + "/status", handler=self.status, level="operator"),
            OwnRoute(path=calls, handler=self.parse_calls, methods=("POST",)),
            OwnRoute(path=thinking, handler=self.parse_reasoning, methods=("POST",)),
        )

    async def show_all(self, caller: Caller, params: Params) -> None:
        """List the loaded tokenizers."""
        loaded = [_view(one) for one in self.library.all if one.text is not None]
        await caller.reply_json({"tokenizers": loaded})

    async def add(self, caller: Caller, params: Params) -> None:
        """Start loading a tokenizer."""
        body = decoded(await caller.body(MAX_BODY_BYTES), AddTokenizer)
        made = self.library.add(body.name, body.source, body.chat_template_path)
        content = {"id": made.id, "status": "pending", "message": "The tokenizer is being loaded."}
        await caller.reply_json(content, 202, ("location", f"/v1/tokenizers/{made.id}"))

    async def show(self, caller: Caller, params: Params) -> None:
        """Describe one tokenizer."""
        await caller.reply_json(_view(self._find(params)))

    async def status(self, caller: Caller, params: Params) -> None:
        """Return the loading state of a tokenizer."""
        found = self._find(params)
        status, message = "processing", "It is being loaded."
        if found.failure is not None:
            status, message = "failed", found.failure
        elif found.text is not None:
            status, message = "completed", "It is loaded."
        await caller.reply_json({"id": found.id, "status": status, "message": message})

    async def remove(self, caller: Caller, params: Params) -> None:
        """Unload a tokenizer."""
        found = self._find(params)
        self.library.remove(found)
        await caller.reply_json({"success": True, "message": f"{found.name} is forgotten."})

    async def parse_calls(self, caller: Caller, params: Params) -> None:
        """Extract tool calls from a text."""
        body = decoded(await caller.body(MAX_BODY_BYTES), ParseCalls)
        name = body.tool_call_parser or body.parser
        family = _parser("tool_call_parser", name, tools.family, "calls")
        if len(body.tools) > MAX_TOOLS:
            raise RequestError(f"tools: at most {MAX_TOOLS} are allowed.", param="tools")
        given = [parse(ChatTool, tool).model_dump(exclude_none=True) for tool in body.tools]
        specs = ToolSpec.from_openai(given) if given else None
        found = await call_in_thread(tools.parse, body.text, family.grammar, specs)
        calls = [{"name": call.name, "arguments": call.arguments or "{}"} for call in found.calls]
        content = {"normal_text": found.text, "tool_calls": calls, "success": True}
        await caller.reply_json(content)

    async def parse_reasoning(self, caller: Caller, params: Params) -> None:
        """Split a text into reasoning and answer."""
        body = decoded(await caller.body(MAX_BODY_BYTES), ParseReasoning)
        name = body.reasoning_parser or body.parser
        family = _parser("reasoning_parser", name, reasoning.family, "thinking")
        thought, text = await call_in_thread(
            reasoning.separate,
            body.text,
            family,
            start_in_reasoning=family.starts_in_reasoning(),
        )
        content = {"normal_text": text, "reasoning_text": thought, "success": True}
        await caller.reply_json(content)

    def _find(self, params: Params) -> PendingTokenizer:
        found = self.library.get(params["id"])
        if found is None:
            message = f"There is no tokenizer {params['id'][:200]!r}."
            raise RequestError(message, param="id", status=404)
        return found


def _view(one: PendingTokenizer) -> dict[str, Any]:
    text = one.text
    size = None if text is None else text.tokenizer.vocab_size
    return {"id": one.id, "name": one.name, "source": one.source, "vocab_size": size}


_F = TypeVar("_F")


def _parser(param: str, name: str | None, find: Callable[[str], _F | None], finds: str) -> _F:
    """Return the parser with a name.

    Raises:
        RequestError: No parser has that name; the message names the field.
    """
    with _asked_for(param):
        if name is None:
            raise ConfigError("must be given.")
        family = find(name)
    if family is None:
        raise RequestError(f"{param}: this parser finds no {finds}; name another one.", param=param)
    return family


@contextmanager
def _asked_for(param: str) -> Generator[None]:
    """Turn a configuration error into a request error: here the request chose the parser."""
    try:
        yield
    except ConfigError as error:
        raise RequestError(f"{param}: {error}", param=param) from error
