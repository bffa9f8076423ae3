"""The `langchain-openai` package."""

from __future__ import annotations

import sys
from typing import Literal

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel
from steps import (
    EMBEDDER,
    KEY,
    MODEL,
    TOOL,
    TWO_CALLS,
    check,
    check_vectors,
    near,
    raises,
    run,
    step,
)

URL, VECTORS = sys.argv[1:3]


class Plan(BaseModel):
    city: Literal["Paris", "Rome"]
    sunny: bool


def model(**fields):
    given = {"model": MODEL, "temperature": 0, "max_tokens": 16, "max_retries": 0, **fields}
    return ChatOpenAI(base_url=f"{URL}/v1", api_key=given.pop("api_key", KEY), **given)


@step
def chat():
    reply = model().invoke("Hello")
    assert isinstance(reply.content, str)
    assert reply.usage_metadata["output_tokens"] <= 16
    assert len(model().batch(["Hello", "Hi"])) == 2


@step
def streamed_chat():
    chunks = list(model(stream_usage=True).stream("Hello"))
    assert "".join(c.content for c in chunks) == model().invoke("Hello").content
    assert any(c.usage_metadata for c in chunks)


@step
def tools_with_results():
    bound = model(max_tokens=1200).bind_tools(
        [TOOL], tool_choice="required", parallel_tool_calls=False
    )
    message = bound.invoke("Hello")
    [call] = message.tool_calls
    check(call["args"])
    gathered = None
    for chunk in bound.stream("Hello"):
        gathered = chunk if gathered is None else gathered + chunk
    check(gathered.tool_calls[0]["args"])
    result = ToolMessage("rain", tool_call_id=call["id"])
    history = [HumanMessage("Hello"), message, result]
    assert model().bind_tools([TOOL]).invoke(history).response_metadata


@step
def parallel_tools():
    bound = model(max_tokens=200, extra_body={"regex": TWO_CALLS}).bind_tools([TOOL])
    calls = bound.invoke("Hello").tool_calls
    assert len({call["id"] for call in calls}) == 2
    for call in calls:
        check(call["args"])


@step
def structured():
    for method in ("json_schema", "function_calling"):
        made = model(max_tokens=1200).with_structured_output(Plan, method=method)
        assert isinstance(made.invoke("Hello"), Plan)


@step
def responses():
    reply = model(use_responses_api=True).invoke("Hello")
    assert reply.response_metadata["id"].startswith("resp_")
    assert list(model(use_responses_api=True).stream("Hello"))


@step
def embeddings():
    fields = {"api_key": KEY, "check_embedding_ctx_length": False, "max_retries": 0}
    made = OpenAIEmbeddings(model=EMBEDDER, base_url=f"{VECTORS}/v1", **fields)
    vectors = made.embed_documents(["one", "two"])
    check_vectors(vectors, 2)
    near(made.embed_query("two"), vectors[1])
    with raises(openai.BadRequestError):
        OpenAIEmbeddings(model=MODEL, base_url=f"{URL}/v1", **fields).embed_query("one")


@step
def errors():
    for kind, fields in (
        (openai.BadRequestError, {"temperature": -1}),
        (openai.AuthenticationError, {"api_key": "wrong"}),
    ):
        with raises(kind):
            model(**fields).invoke("Hello")


@step
def timeouts():
    with raises(openai.APITimeoutError):
        model(timeout=0.001, max_tokens=400, extra_body={"ignore_eos": True}).invoke("Hello")


@step
def retries():
    late = {"timeout": 0.001, "ignore_eos": True}
    with raises(openai.InternalServerError) as caught:
        model(max_retries=1, max_tokens=400, extra_body=late).invoke("Hello")
    assert caught.error.status_code == 503


if __name__ == "__main__":
    run("langchain-openai")
