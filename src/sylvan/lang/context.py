"""The contents of a program state: text, messages and variables, which backends read."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sylvan.lang.cancel import CancelScope
from sylvan.lang.chat_templates import Message, MessageFormat

Picture = tuple[Any, str]  # (as the program gave it, base64 data or a URL)


@dataclass(slots=True, eq=False)
class StateContext:
    """The contents of one state. Only the thread that executes its nodes changes it.

    Backends get it as `s`; names with a trailing underscore are those used by backends written for
    SGLang.
    """

    chat_template: MessageFormat
    arguments: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False
    num_api_spec_tokens: int | None = None
    scope: CancelScope = field(default_factory=CancelScope)
    sid: str = field(default_factory=lambda: uuid.uuid4().hex)

    text_: str = ""
    messages_: list[Message] = field(default_factory=list)
    images_: list[Picture] = field(default_factory=list)
    cur_images: list[Picture] = field(default_factory=list)  # of the open message
    cur_role: str | None = None
    cur_role_begin_pos: int = 0
    fork_start_text_pos: int = 0

    variables: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)  # positions in `text_`
    scopes: dict[str, int] = field(default_factory=dict)  # starts of variable scopes in `text_`

    def forked(self) -> StateContext:
        """An independent copy; nothing mutable is shared."""
        return StateContext(
            chat_template=self.chat_template,
            arguments=self.arguments,
            stream=self.stream,
            scope=self.scope.child(),
            text_=self.text_,
            messages_=list(self.messages_),
            images_=list(self.images_),
            cur_images=list(self.cur_images),
            cur_role=self.cur_role,
            cur_role_begin_pos=self.cur_role_begin_pos,
            fork_start_text_pos=len(self.text_),
            variables=dict(self.variables),
            meta_info=dict(self.meta_info),
            spans=dict(self.spans),
            scopes=dict(self.scopes),
        )

    def end_message(self, suffix: str) -> None:
        """Close the open message: add it to the chat messages, and append `suffix` to the text."""
        content = self.text_[self.cur_role_begin_pos :].lstrip()
        self.text_ += suffix
        assert self.cur_role is not None
        self.messages_.append({
            "role": self.cur_role,
            "content": _with_pictures(content, self.cur_images) if self.cur_images else content,
        })  # fmt: skip
        self.cur_images = []
        self.cur_role = None


def _with_pictures(text: str, pictures: list[Picture]) -> list[dict[str, Any]]:
    """Content parts in the OpenAI chat format."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    for _, data in pictures:
        is_url = data.startswith(("http://", "https://"))
        url = data if is_url else f"data:image/jpeg;base64,{data}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return parts
