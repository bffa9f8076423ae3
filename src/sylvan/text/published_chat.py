"""Chat formats of models whose published code renders prompts in Python instead of Jinja.

Their templates, if any, take contents as strings. That code puts a placeholder where an image
stands, and a line break between the parts of a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sylvan.protocol.errors import RequestError

TEMPLATES: Mapping[str, str] = MappingProxyType(
    {
        "DeepseekVLV2ForCausalLM": (  # deepseek_vl2/models/conversation.py
            "{{ bos_token }}{% for message in messages %}"
            "{% if message.role == 'system' %}{{ message.content }}\n\n"
            "{% elif message.role == 'user' %}<|User|>: {{ message.content }}\n\n"
            "{% else %}<|Assistant|>: {{ message.content }}{{ eos_token }}{% endif %}"
            "{% endfor %}{% if add_generation_prompt %}<|Assistant|>:{% endif %}"
        )
    }
)
"""Templates of checkpoints that have none, by architecture."""


def has_images(content: Any) -> bool:
    """Whether a message's content has parts that are images."""
    return isinstance(content, list) and any(map(_is_image, content))


def join_parts(parts: list[Any], image: str | None = None) -> str:
    """Join the parts of a message for a template that takes strings.

    Args:
        parts: Of the types `text` and `image`.
        image: Placeholder of an image; None: the model takes texts.

    Raises:
        RequestError: A part has another type; the message names it.
    """
    texts: list[str] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if image is not None and _is_image(part):
            text = image
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(
                f"The chat template of this model takes text only, not {kind!r} parts.",
                param="messages",
            )
        texts.append(text)
    return (" " if image is None else "\n").join(texts)


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image"
