"""Chat templates of the language: how roles are written in the text of a program.

These belong to the frontend, by model name; the server handles a model's own Jinja template. A
program appends to a text, so a template here is a prefix and a suffix per role.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from sylvan.lang.template_table import MATCHES, NAMED_TEMPLATES, TemplateRow
from sylvan.protocol.errors import ConfigError

Message = dict[str, Any]  # {"role": ..., "content": ...} as in the OpenAI chat format
MatchingFunction = Callable[[str], str | None]


class ChatTemplateStyle(Enum):
    """Whether a role's prefix depends on earlier messages."""

    PLAIN = auto()
    LLAMA2 = auto()  # the system message is inside the first user message


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFormat:
    """How chat messages are written as text.

    `role_prefix_and_suffix` maps a role to the text before and after a message; `stop_str` end a
    `gen` in addition to its own stops; `image_token` and `video_token` represent an image and a
    video in the text.
    """

    name: str
    default_system_prompt: str | None
    role_prefix_and_suffix: Mapping[str, tuple[str, str]]
    stop_str: tuple[str, ...] = ()
    image_token: str = "<image>"
    video_token: str = "<video>"
    audio_token: str = "<audio>"
    style: ChatTemplateStyle = ChatTemplateStyle.PLAIN

    def get_prefix_and_suffix(self, role: str, hist_messages: Sequence[Message]) -> tuple[str, str]:
        """Text before and after a message of `role` that follows `hist_messages`."""
        prefix, suffix = self._of(role)
        if self.style is ChatTemplateStyle.LLAMA2:
            if role == "system" and not hist_messages:
                return self._of("user")[0] + prefix, suffix
            if role == "user" and len(hist_messages) == 1 and hist_messages[0]["content"]:
                return "", suffix
        return prefix, suffix

    def get_prompt(self, messages: Sequence[Message]) -> str:
        """The text of a whole chat. System content None means the default, if there is one."""
        parts: list[str] = []
        for i, message in enumerate(messages):
            role, content = message["role"], message["content"]
            if role == "system" and content is None:
                content = self.default_system_prompt
                if content is None:
                    continue
            prefix, suffix = self.get_prefix_and_suffix(role, messages[:i])
            parts.append(f"{prefix}{content}{suffix}")
        return "".join(parts)

    def _of(self, role: str) -> tuple[str, str]:
        return self.role_prefix_and_suffix.get(role, ("", ""))


class ChatTemplateRegistry:
    """Templates by name, and functions that name a model's template; the first match wins.

    Registered functions are asked before the built-in table, the latest first.
    """

    def __init__(self, rows: Mapping[str, TemplateRow] = NAMED_TEMPLATES) -> None:
        self._templates = {name: _from_row(name, row) for name, row in rows.items()}
        self._functions: list[MatchingFunction] = []

    def register(self, template: MessageFormat) -> None:
        """Add a template, or replace the one of its name."""
        self._templates[template.name] = template

    def register_matching(self, function: MatchingFunction) -> MatchingFunction:
        """Ask `function(model_path)` for a template's name; None lets the others decide."""
        self._functions.insert(0, function)
        return function

    def names(self) -> tuple[str, ...]:
        """Names of all templates."""
        return tuple(self._templates)

    def get(self, name: str) -> MessageFormat:
        """The template of that name.

        Raises:
            ConfigError: there is none.
        """
        if name not in self._templates:
            raise ConfigError(
                f"unknown chat template {name!r}; choose from {', '.join(self._templates)}"
            )
        return self._templates[name]

    def for_model(self, model_path: str) -> MessageFormat:
        """The template of a model, by its path or name; `default` if none matches."""
        for function in self._functions:
            if (name := function(model_path)) is not None:
                return self.get(name)
        for pattern, but_not, name in MATCHES:
            if pattern.search(model_path) and not (but_not and but_not.search(model_path)):
                return self.get(name)
        return self.get("default")


def _from_row(name: str, row: TemplateRow) -> MessageFormat:
    return MessageFormat(
        name=name,
        default_system_prompt=row.default_system,
        role_prefix_and_suffix=row.turns,
        stop_str=row.stop,
        image_token=row.image_token,
        video_token=row.video_token,
        audio_token=row.audio_token,
        style=ChatTemplateStyle.LLAMA2 if row.system_in_user else ChatTemplateStyle.PLAIN,
    )


templates = ChatTemplateRegistry()

get_chat_template = templates.get
get_chat_template_by_model_path = templates.for_model
register_chat_template = templates.register
register_chat_template_matching_function = templates.register_matching
