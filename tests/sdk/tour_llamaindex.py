"""LlamaIndex: its class for servers like OpenAI's."""

from __future__ import annotations

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from steps import KEY, MODEL, run, step

URL = sys.argv[1]
LLM = OpenAILike(
    MODEL, api_base=f"{URL}/v1", api_key=KEY, is_chat_model=True, max_tokens=16, temperature=0,
    max_retries=0, timeout=120,
)  # fmt: skip
HELLO = [ChatMessage(role="user", content="Hello")]


@step
def chat():
    assert isinstance(LLM.chat(HELLO).message.content, str)


@step
def streamed_chat():
    text = "".join(part.delta or "" for part in LLM.stream_chat(HELLO))
    assert text == LLM.chat(HELLO).message.content


@step
def completion():
    plain = OpenAILike(
        MODEL, api_base=f"{URL}/v1", api_key=KEY, is_chat_model=False, max_tokens=8, temperature=0
    )
    assert isinstance(plain.complete("Hello").text, str)


run("llama-index-llms-openai-like")
