"""LlamaIndex: its class for servers like OpenAI's."""

from __future__ import annotations

import sys

import openai
from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from steps import KEY, MODEL, raises, run, step

(URL, *_) = sys.argv[1:]


def model(**fields):
    given = {"model": MODEL, "temperature": 0, "max_tokens": 16, "max_retries": 0, "timeout": 120}
    given |= {"api_key": KEY, "is_chat_model": True, **fields}
    return OpenAILike(api_base=f"{URL}/v1", **given)


@step
def chat():
    reply = model().chat([ChatMessage(role="user", content="Hello")])
    assert reply.message.content
    assert reply.raw.usage.completion_tokens <= 16


@step
def streamed_chat():
    messages = [ChatMessage(role="user", content="Hello")]
    parts = [part.delta or "" for part in model().stream_chat(messages)]
    assert len(parts) > 1
    assert "".join(parts) == model().chat(messages).message.content


@step
def completion():
    assert model(is_chat_model=False).complete("Hello").text


@step
def errors():
    with raises(openai.AuthenticationError):
        model(api_key="wrong").complete("Hello")


if __name__ == "__main__":
    run("llama-index-llms-openai-like")
