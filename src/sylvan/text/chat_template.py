"""Renders chat messages to prompts like transformers, but content cannot forge control tokens.

The prompt's token ids equal those of `apply_chat_template(..., tokenize=True)` for all content that
spells no control token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import msgspec
from jinja2 import Template, TemplateError, TemplateSyntaxError

from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.protocol.media import IMAGE_TOKENS
from sylvan.text.control_tokens import ControlTokenEscaper, Marks, strings_in
from sylvan.text.jinja_env import MAX_TEMPLATE_CHARS, ChatEnvironment, RenderLimits
from sylvan.text.published_chat import has_images, join_parts
from sylvan.text.tokenizer import Tokenizer

_CONTINUE = "\U000fffff"  # outside the range of control-token marks
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message")
_LOOPS_OVER_CONTENT = re.compile(r"for\s+\w+\s+in\s+[\w.\[\]'\"]*content\b(?!\s*\.)")
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
BUILT_IN = {"chatml": _CHATML, "plain": _PLAIN}


class Encode(Protocol):
    """Turns text into token ids; see `Tokenizer.encode`."""

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text."""
        ...


class RenderedPrompt(msgspec.Struct, frozen=True):
    """A prompt.

    Attributes:
        text: The rendered text.
        input_ids: Its token ids.
    """

    text: str
    input_ids: list[int]


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a chat template.

    Attributes:
        messages: Messages in the OpenAI shape.
        tools: Tool definitions in the OpenAI shape, or None.
        documents: Documents for retrieval templates, or None.
        add_generation_prompt: End with the start of an assistant message.
        continue_final_message: Leave the last message open, for the model to continue.
        template: Name of one of the checkpoint's templates, or None for the default.
        kwargs: Further variables (`chat_template_kwargs`).
        allow_control_tokens: Recognise control tokens in contents.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str | None = None
    kwargs: Mapping[str, Any] | None = None
    allow_control_tokens: bool = False


class ChatTemplate:
    """The chat templates of a tokenizer, compiled; safe to share between threads.

    Args:
        tokenizer: Tokenises the prompts, and provides the chat templates.
        encode: Replaces the tokenizer's encoding of text whose control tokens are recognised.
        limits: Limits of one rendering.
        now: Local time, for templates that print the date.

    Raises:
        ConfigError: A template is not valid Jinja.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        encode: Encode | None = None,
        limits: RenderLimits | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._tokenizer = tokenizer
        self._encode = encode or tokenizer.encode
        self._image = IMAGE_TOKENS.get(tokenizer.files.architecture)
        self._env = ChatEnvironment(limits or RenderLimits(), now)
        self._sources = dict(tokenizer.chat_templates)
        self._compiled = {
            name: compile_template(self._env, name, source)
            for name, source in self._sources.items()
        }
        self._takes_parts = {
            name: bool(_LOOPS_OVER_CONTENT.search(s)) for name, s in self._sources.items()
        }
        plain = {
            text
            for text, token in tokenizer.protected.items()
            if token not in tokenizer.special_ids or "think" in text.lower()
        }
        self._neutraliser = ControlTokenEscaper(
            tokenizer.protected_pattern, list(tokenizer.protected), frozenset(plain)
        )

    def __bool__(self) -> bool:
        return bool(self._compiled)

    def source(self, request: ChatRequest | None = None) -> str:
        """Text of the template for the request, or of the default template."""
        return self._sources.get(self._choose(request), "") if self._compiled else ""

    def takes_parts(self, request: ChatRequest | None = None) -> bool:
        """Whether the template reads content as a list of parts rather than as one string."""
        return bool(self._compiled) and self._takes_parts[self._choose(request)]

    def render(self, request: ChatRequest) -> RenderedPrompt:
        """Render and tokenise.

        Raises:
            RequestError: the template rejects the messages, or there is no template.
        """
        self._check(request)
        name = self._choose(request)
        marks = self._neutraliser.begin(
            [list(request.messages), request.tools, request.documents, request.kwargs]
        )
        text = self._write(request, marks, name)
        if request.continue_final_message:
            text = _cut_at_mark(text)
        segments = marks.split(text)
        plain = "".join(part for part, _ in segments)
        if marks or (not request.allow_control_tokens and self._is_suspect(request)):
            return RenderedPrompt(plain, self._tokenizer.encode_segments(segments))
        ids = self._encode(plain, add_special_tokens=False)
        return RenderedPrompt(plain, ids)

    def _write(self, request: ChatRequest, marks: Marks, name: str) -> str:
        try:
            variables = self._variables(request, marks, name)
            return self._env.render_compiled(self._compiled[name], variables)
        except TemplateError as error:
            raise RequestError(f"Chat template: {error.message}", param="messages") from error
        except RecursionError as error:
            raise RequestError(
                "messages are nested too deeply for the chat template.", param="messages"
            ) from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise RequestError(
                f"The chat template cannot render these messages: {error}.", param="messages"
            ) from error

    def _choose(self, request: ChatRequest | None) -> str:
        if not self._compiled:
            raise RequestError(
                "This model has no chat template; start the server with a chat template, or use "
                "a completion endpoint.",
                param="messages",
            )
        if request is not None and request.template is not None:
            if request.template in self._compiled:
                return request.template
            raise RequestError(
                f"There is no chat template {request.template!r}; choose one of "
                f"{sorted(self._compiled)}.",
                param="chat_template",
            )
        if request is not None and request.tools and "tool_use" in self._compiled:
            return "tool_use"
        return "default" if "default" in self._compiled else next(iter(self._compiled))

    def _check(self, request: ChatRequest) -> None:
        if not request.messages:
            raise RequestError("messages must hold at least one message.", param="messages")
        if request.continue_final_message and request.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other.",
                param="continue_final_message",
            )
        for name in request.kwargs or ():
            if name in _RESERVED or name.startswith("_"):
                raise RequestError(
                    f"chat_template_kwargs must not set {name!r}.", param="chat_template_kwargs"
                )

    def _variables(self, request: ChatRequest, marks: Marks, name: str) -> dict[str, Any]:
        parts = self._takes_parts[name]
        images = not parts and self._image is not None
        messages = [
            _prepare(dict(message), parts=parts, images=images) for message in request.messages
        ]
        rest = {
            "tools": _plain(request.tools),
            "documents": _plain(request.documents),
            **(request.kwargs or {}),
        }
        if not request.allow_control_tokens:
            messages = [self._neutraliser.message(message, marks) for message in messages]
            rest = {key: self._neutraliser.value(value, marks) for key, value in rest.items()}
        if images:  # the placeholder is not text of the client
            for message in messages:
                if isinstance(message.get("content"), list):
                    message["content"] = join_parts(message["content"], self._image)
        if request.continue_final_message:
            _mark_end(messages[-1])
        return {
            **self._tokenizer.named_tokens,
            **rest,
            "messages": messages,
            "add_generation_prompt": request.add_generation_prompt,
        }

    def _is_suspect(self, request: ChatRequest) -> bool:
        """Whether normalisation would turn content into a control token that it does not spell."""
        if not self._tokenizer.normalises_into_control:
            return False
        contents = [list(request.messages), request.tools, request.documents, request.kwargs]
        return any(map(self._tokenizer.spells_control_token, strings_in(contents)))


def resolve_template(choice: str) -> str:
    """Text of a template given as a built-in name, a file, or the template itself.

    Raises:
        ConfigError: it is none of these, is unreadable, or is not valid Jinja.
    """
    source = _source(choice)
    name = "given" if source is choice else choice
    compile_template(ChatEnvironment(RenderLimits(), datetime.now), name, source)
    return source


def compile_template(env: ChatEnvironment, name: str, source: str) -> Template:
    """Compile one template.

    Raises:
        ConfigError: It is too long, or not valid Jinja; the message names it.
    """
    if len(source) > MAX_TEMPLATE_CHARS:
        raise ConfigError(f"Chat template {name!r} is over {MAX_TEMPLATE_CHARS} characters.")
    try:
        return env.from_string(source)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"Chat template {name!r} is not valid Jinja (line {error.lineno}): {error.message}"
        ) from error


def _source(choice: str) -> str:
    if choice in BUILT_IN:
        return BUILT_IN[choice]
    if "{{" in choice or "{%" in choice:
        return choice
    if choice.endswith(".json"):
        raise ConfigError(f"Chat template {choice!r} is JSON; give a Jinja template.")
    try:
        return Path(choice).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"Chat template {choice!r} is neither a file nor one of {sorted(BUILT_IN)}, and holds "
            "no Jinja."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"Chat template {choice!r} cannot be read: {error}") from error


def _prepare(message: dict[str, Any], *, parts: bool, images: bool) -> dict[str, Any]:
    """Convert a message to the shape that templates expect, like transformers and SGLang.

    Contents with `images` keep their parts.
    """
    message = {
        key: value if isinstance(value, str) else _plain(value)
        for key, value in message.items()
        if value is not None
    }
    reasoning = next((message[key] for key in _REASONING_KEYS if key in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    content = message.get("content")
    if isinstance(content, list) and not parts and not (images and has_images(content)):
        message["content"] = join_parts(content)
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            function["arguments"] = _parsed(function["arguments"])
    return message


def _parsed(arguments: str) -> Any:
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _plain(value: Any) -> Any:
    """A deep copy of plain JSON types: mappings become dicts, sequences lists."""
    if value is None or isinstance(value, str):  # abstract types take longer to recognise
        return value
    if isinstance(value, dict | Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _mark_end(message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CONTINUE + " "
        return
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += _CONTINUE + " "
            return
    raise RequestError(
        "continue_final_message needs a last message with text to continue.",
        param="continue_final_message",
    )


def _cut_at_mark(text: str) -> str:
    place = text.rfind(_CONTINUE)
    if place < 0:
        raise RequestError(
            "The chat template leaves out the final message, so it cannot be continued.",
            param="continue_final_message",
        )
    if text[place + 1 : place + 2] == " ":
        return text[:place]
    return text[:place].rstrip()
