"""Haystack: its generators and embedders for OpenAI."""

from __future__ import annotations

import sys

from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret
from steps import EMBEDDER, KEY, MODEL, WEATHER, check, check_vectors, run, step

URL, VECTORS = sys.argv[1:3]


def generator(**fields: object) -> OpenAIChatGenerator:
    settings = {"max_tokens": 200, "temperature": 0, **fields.pop("settings", {})}
    return OpenAIChatGenerator(
        api_key=Secret.from_token(KEY), model=MODEL, api_base_url=f"{URL}/v1",
        generation_kwargs=settings, max_retries=0, timeout=120, **fields,
    )  # fmt: skip


HELLO = [ChatMessage.from_user("Hello")]


@step
def streamed_chat():
    parts: list[str] = []
    plain = generator().run(HELLO)["replies"][0].text
    streamed = generator(streaming_callback=lambda chunk: parts.append(chunk.content)).run(HELLO)
    assert streamed["replies"][0].text == "".join(parts) == plain


@step
def tools():
    tool = Tool("get_weather", "Weather of a city", WEATHER, lambda city, days: f"{city} {days}")
    settings = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 1200}
    [reply] = generator(tools=[tool], settings=settings).run(HELLO)["replies"]
    check(reply.tool_calls[0].arguments)


@step
def vectors():
    embedder = OpenAITextEmbedder(
        api_key=Secret.from_token(KEY), model=EMBEDDER, api_base_url=f"{VECTORS}/v1"
    )
    check_vectors([embedder.run("text")["embedding"]], 1)


run("haystack-ai")
