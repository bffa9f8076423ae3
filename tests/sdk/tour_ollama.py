"""The `ollama` package."""

from __future__ import annotations

import json
import sys

import ollama
from steps import EMBEDDER, HELLO, KEY, MODEL, TOOL, check_vectors, near, raises, run, step

URL, VECTORS = sys.argv[1:3]
SHORT = {"num_predict": 16, "temperature": 0}
client = ollama.Client(host=URL, headers={"authorization": f"Bearer {KEY}"}, timeout=120)


@step
def models():
    assert [m.model for m in client.list().models]
    assert client.show(MODEL).capabilities


@step
def chat():
    reply = client.chat(MODEL, HELLO, options=SHORT)
    assert reply.message.role == "assistant"
    assert reply.done
    assert reply.done_reason in ("stop", "length")
    assert 0 < reply.eval_count <= 16


@step
def streamed_chat():
    parts = list(client.chat(MODEL, HELLO, options=SHORT, stream=True))
    assert [p.done for p in parts] == [False] * (len(parts) - 1) + [True]
    whole = client.chat(MODEL, HELLO, options=SHORT)
    assert "".join(p.message.content or "" for p in parts) == whole.message.content
    assert parts[-1].eval_count == whole.eval_count


@step
def generate():
    whole = client.generate(MODEL, "Hello", options=SHORT)
    parts = client.generate(MODEL, "Hello", options=SHORT, stream=True)
    assert "".join(p.response for p in parts) == whole.response
    assert client.generate(MODEL, "Hello", raw=True, options=SHORT).done


@step
def structured():
    schema = {
        "type": "object",
        "properties": {"sunny": {"type": "boolean"}},
        "required": ["sunny"],
        "additionalProperties": False,
    }
    reply = client.chat(MODEL, HELLO, format=schema, options={"num_predict": 1200})
    assert isinstance(json.loads(reply.message.content)["sunny"], bool)


@step
def tools_with_results():
    reply = client.chat(MODEL, HELLO, tools=[TOOL], options=SHORT)
    assert reply.done
    calls = [
        {"function": {"name": "get_weather", "arguments": {"city": city, "days": 1}}}
        for city in ("Paris", "Rome")
    ]
    history = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_name": "get_weather", "content": "rain"},
        {"role": "tool", "tool_name": "get_weather", "content": "sun"},
    ]
    after = client.chat(MODEL, history, tools=[TOOL], options=SHORT)
    assert after.prompt_eval_count > reply.prompt_eval_count


@step
def thinking():
    assert client.chat(MODEL, HELLO, think=True, options=SHORT).done


@step
def embeddings():
    made = ollama.Client(host=VECTORS, headers={"authorization": f"Bearer {KEY}"}, timeout=120)
    reply = made.embed(EMBEDDER, ["one", "two"])
    check_vectors(reply.embeddings, 2)
    assert reply.prompt_eval_count > 0
    near(made.embed(EMBEDDER, "two").embeddings[0], reply.embeddings[1])
    near(made.embeddings(EMBEDDER, "two").embedding, reply.embeddings[1])
    assert len(made.embed(EMBEDDER, "two", dimensions=8).embeddings[0]) == 8
    check_vectors(made.embed(EMBEDDER, "long " * 1000).embeddings, 1)  # it is cut
    with raises(ollama.ResponseError) as caught:
        made.embed(EMBEDDER, "long " * 1000, truncate=False)
    assert caught.error.status_code == 400
    assert made.show(EMBEDDER).capabilities == ["embedding"]
    assert [model.name for model in made.ps().models] == [EMBEDDER]
    with raises(ollama.ResponseError) as caught:
        client.embed(MODEL, "one")
    assert "makes no embeddings" in caught.error.error


@step
def errors():
    wrong = ollama.Client(host=URL, headers={"authorization": "Bearer wrong"})
    for status, call in (
        (400, lambda: client.chat(MODEL, HELLO, options={"temperature": -1})),
        (401, lambda: wrong.chat(MODEL, HELLO)),
    ):
        with raises(ollama.ResponseError) as caught:
            call()
        assert caught.error.status_code == status
        assert caught.error.error


@step
def timeouts():
    hasty = ollama.Client(host=URL, headers={"authorization": f"Bearer {KEY}"}, timeout=0.001)
    with raises(Exception) as caught:
        long = {"type": "string", "minLength": 800}  # however slow the client is
        hasty.chat(MODEL, HELLO, format=long, options={"num_predict": 1000})
    assert "timeout" in type(caught.error).__name__.lower()


if __name__ == "__main__":
    run("ollama")
