"""The chat template of sapling and its rendering, shared by training and serving.

ChatML with tools in the Hermes form. Every assistant turn has a think block, which is empty if the
model did not think, so that a conversation's prompt is a prefix of its next prompt.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]

CHAT_TEMPLATE = r"""
{%- set first = messages[0] if messages and messages[0].role == 'system' else none %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if first is not none %}
        {{- first.content + '\n\n' }}
    {%- endif %}
    {{- 'You can call these tools:\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\n</tools>\nTo call one, write:\n<tool_call>\n{"name": ..., "arguments": {...}}' }}
    {{- '\n</tool_call><|im_end|>\n' }}
{%- elif first is not none %}
    {{- '<|im_start|>system\n' + first.content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n<think>\n' }}
        {%- if message.reasoning_content is string and message.reasoning_content %}
            {{- message.reasoning_content.strip('\n') }}
        {%- endif %}
        {{- '\n</think>\n\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {%- if content or not loop.first %}
                {{- '\n' }}
            {%- endif %}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if not enable_thinking %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
""".strip()

END_OF_TURN = "<|im_end|>"
ASSISTANT_HEADER = "<|im_start|>assistant\n"
EMPTY_THINK = "<think>\n\n</think>\n\n"


def _tojson(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@lru_cache(maxsize=1)
def _compiled() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _tojson
    return environment.from_string(CHAT_TEMPLATE)


def render(
    messages: list[Message],
    tools: list[dict[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = False,
    enable_thinking: bool = False,
) -> str:
    """Render a conversation exactly as transformers' `apply_chat_template` renders it."""
    return _compiled().render(
        messages=messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        enable_thinking=enable_thinking,
    )


def training_pieces(
    messages: list[Message], tools: list[dict[str, Any]] | None = None
) -> list[tuple[str, bool]]:
    """Split a rendered conversation into (text, whether to learn it) pieces.

    The model learns what it writes: from the end of each assistant turn's generation prompt to its
    end token. A turn with reasoning is learnt from `<think>` on; a turn without it starts after the
    empty block that the generation prompt already contains.
    """
    pieces: list[tuple[str, bool]] = []
    for index, chunk in enumerate(render(messages, tools).split(ASSISTANT_HEADER)):
        if index == 0:
            pieces.append((chunk, False))
            continue
        given = ASSISTANT_HEADER
        if chunk.startswith(EMPTY_THINK):
            given += EMPTY_THINK
        rest = chunk.removeprefix(EMPTY_THINK)
        cut = rest.index(END_OF_TURN) + len(END_OF_TURN)
        pieces += [(given, False), (rest[:cut], True), (rest[cut:], False)]
    return [piece for piece in pieces if piece[0]]
