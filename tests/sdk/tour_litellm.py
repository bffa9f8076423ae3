"""The `litellm` package, as a client of the routes of OpenAI, Anthropic, Ollama, Cohere and TEI."""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet

import litellm
from pydantic import BaseModel
from steps import (
    EMBEDDER,
    HELLO,
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

warnings.simplefilter("ignore")
litellm.suppress_debug_info = True
URL, VECTORS, LONG = sys.argv[1:4]
OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": KEY}


class Plan(BaseModel):
    city: Literal["Paris", "Rome"]
    sunny: bool


def ask(**fields):
    given = {**OPENAI, "messages": HELLO, "max_tokens": 16, "temperature": 0, **fields}
    return litellm.completion(num_retries=0, timeout=given.pop("timeout", 120), **given)


@step
def chat():
    for kind in (OPENAI, ANTHROPIC):
        reply = ask(**kind)
        assert reply.choices[0].finish_reason in ("stop", "length")
        assert reply.usage.completion_tokens <= 16


@step
def streamed_chat():
    for kind in (OPENAI, ANTHROPIC):
        text = "".join(c.choices[0].delta.content or "" for c in ask(stream=True, **kind))
        assert text == ask(**kind).choices[0].message.content


@step
def tools_with_results():
    for kind in (OPENAI, ANTHROPIC):
        fields = {"tools": [TOOL], "max_tokens": 1200, **kind}
        reply = ask(tool_choice="required", parallel_tool_calls=False, **fields)
        message = reply.choices[0].message
        [call] = message.tool_calls
        check(json.loads(call.function.arguments))
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        assert ask(messages=[*HELLO, message, result], **fields).choices


@step
def parallel_tools():
    reply = ask(tools=[TOOL], extra_body={"regex": TWO_CALLS}, max_tokens=200)
    calls = reply.choices[0].message.tool_calls
    assert len({call.id for call in calls}) == 2
    for call in calls:
        check(json.loads(call.function.arguments))


@step
def structured():
    reply = ask(response_format=Plan, max_tokens=1200)
    assert Plan.model_validate_json(reply.choices[0].message.content)


@step
def responses():
    reply = litellm.responses(input="Hello", max_output_tokens=8, **OPENAI)
    assert reply.output
    events = litellm.responses(input="Hello", max_output_tokens=8, stream=True, **OPENAI)
    kinds = [str(getattr(event, "type", "")).lower() for event in events]
    assert any("output_text" in kind for kind in kinds), kinds


@step
def embeddings():
    fields = {"model": f"openai/{EMBEDDER}", "api_base": f"{VECTORS}/v1", "api_key": KEY}
    reply = litellm.embedding(input=["one", "two"], **fields)
    check_vectors([item["embedding"] for item in reply.data], 2)
    assert reply.usage.prompt_tokens > 0
    plain = litellm.embedding(input=["two"], encoding_format="float", **fields)
    near(plain.data[0]["embedding"], reply.data[1]["embedding"])
    with raises(litellm.BadRequestError):
        litellm.embedding(input=["one"], **OPENAI)


@step
def rerank():
    """In the forms of vLLM (Jina), Cohere and TEI."""
    documents = ["one", "two three", "one one"]
    orders = []
    for provider in ("hosted_vllm", "cohere", "huggingface"):
        model = f"{provider}/{EMBEDDER}"
        given = {"query": "one", "documents": documents, "api_base": VECTORS, "api_key": KEY}
        results = litellm.rerank(model=model, **given).results
        scores = [one["relevance_score"] for one in results]
        assert scores == sorted(scores, reverse=True)
        orders.append([one["index"] for one in results])
    assert orders == [orders[0]] * 3
    assert sorted(orders[0]) == [0, 1, 2]


@step
def ollama():
    fields = {"api_base": URL, "api_key": KEY}
    texts = []
    for stream in (False, True):
        reply = ask(model=f"ollama_chat/{MODEL}", stream=stream, **fields)
        if stream:
            texts.append("".join(chunk.choices[0].delta.content or "" for chunk in reply))
        else:
            texts.append(reply.choices[0].message.content)
    assert texts[0] == texts[1] == ask().choices[0].message.content


@step
def fallbacks():
    """A prompt that is too long for one server goes to the next one."""
    small = {"model_name": "small", "litellm_params": OPENAI}
    large = {
        "model_name": "large",
        "litellm_params": {**OPENAI, "api_base": f"{LONG}/v1", "max_tokens": 4},
    }
    router = litellm.Router(
        model_list=[small, large], context_window_fallbacks=[{"small": ["large"]}], num_retries=0
    )
    messages = [{"role": "user", "content": "word " * 6000}]
    with raises(litellm.ContextWindowExceededError):
        ask(messages=messages)
    assert router.completion(model="small", messages=messages).usage.prompt_tokens > 6000


@step
def errors():
    for kind, fields in (
        (litellm.BadRequestError, {"extra_body": {"top_k": -7}}),
        (litellm.AuthenticationError, {"api_key": "wrong"}),
        (litellm.AuthenticationError, {**ANTHROPIC, "api_key": "wrong"}),
    ):
        with raises(kind):
            ask(**fields)


@step
def timeouts():
    with raises(litellm.Timeout):
        ask(max_tokens=400, timeout=0.001, extra_body={"ignore_eos": True})


@step
def retries():
    late = {"timeout": 0.001, "ignore_eos": True}
    with raises(Exception) as caught:
        litellm.completion(**OPENAI, messages=HELLO, max_tokens=400, num_retries=1, extra_body=late)
    assert caught.error.status_code == 503


if __name__ == "__main__":
    run("litellm")
