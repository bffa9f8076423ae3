"""Semantic Kernel, over a client of the OpenAI package."""

from __future__ import annotations

import asyncio
import sys

from openai import AsyncOpenAI
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from steps import KEY, MODEL, run, step

URL = sys.argv[1]
SETTINGS = OpenAIChatPromptExecutionSettings(max_tokens=16, temperature=0)


def service() -> OpenAIChatCompletion:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    return OpenAIChatCompletion(ai_model_id=MODEL, async_client=client)


def history() -> ChatHistory:
    made = ChatHistory()
    made.add_user_message("Hello")
    return made


@step
def streamed_chat():
    async def both() -> tuple[str, str]:
        whole = await service().get_chat_message_content(history(), SETTINGS)
        parts = service().get_streaming_chat_message_content(history(), SETTINGS)
        return str(whole), "".join([str(part) async for part in parts if part])

    whole, text = asyncio.run(both())
    assert text == whole


run("semantic-kernel")
