"""The packages `langchain-anthropic` and `langchain-ollama`."""

from __future__ import annotations

import sys

from langchain_anthropic import ChatAnthropic
from langchain_ollama import ChatOllama, OllamaEmbeddings
from steps import EMBEDDER, KEY, MODEL, check_vectors, run, step

URL, VECTORS = sys.argv[1:3]
HEADERS = {"headers": {"Authorization": f"Bearer {KEY}"}}


def models() -> list[object]:
    claude = ChatAnthropic(
        model=MODEL, base_url=URL, api_key=KEY, max_tokens=16, temperature=0, max_retries=0
    )
    ollama = ChatOllama(
        model=MODEL, base_url=URL, num_predict=16, temperature=0, client_kwargs=HEADERS
    )
    return [claude, ollama]


@step
def chats():
    for model in models():
        reply = model.invoke("Hello")
        assert isinstance(reply.content, str)
        assert reply.usage_metadata["output_tokens"] <= 16


@step
def streams_equal_answers():
    for model in models():
        text = "".join(str(chunk.text) for chunk in model.stream("Hello"))
        assert text == str(model.invoke("Hello").text)


@step
def vectors():
    made = OllamaEmbeddings(model=EMBEDDER, base_url=VECTORS, client_kwargs=HEADERS)
    check_vectors(made.embed_documents(["one", "two"]), 2)


run("langchain-anthropic")
