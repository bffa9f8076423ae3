"""Tokenizers and parsers of the gateway itself."""

from __future__ import annotations

import json

import pytest

from sylvan.config.values import Secret
from tests.support.cluster import gateway
from tests.support.scripted import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("scripted"))


@pytest.fixture
async def front():
    async with gateway() as made:
        yield made


async def loaded(front, name):
    library = front.runtime._library
    return await library.get(name).task


async def test_tokenizers_come_and_go(front, checkpoint):
    body = {"name": "m", "source": str(checkpoint)}
    added = await front.post("/v1/tokenizers", body)
    made = added.json()
    path = f"/v1/tokenizers/{made['id']}"
    assert (added.status_code, made["status"], added.headers["location"]) == (202, "pending", path)
    assert (await front.post("/v1/tokenizers", body)).status_code == 409

    text = await loaded(front, "m")
    status = (await front.get(f"{path}/status")).json()
    assert status == {"id": made["id"], "status": "completed", "message": "It is loaded."}
    shown = {**body, "id": made["id"], "vocab_size": text.tokenizer.vocab_size}
    assert (await front.get(path)).json() == shown
    assert (await front.get("/v1/tokenizers")).json() == {"tokenizers": [shown]}

    assert (await front.http.delete(path)).json()["success"] is True
    assert (await front.get(path)).status_code == 404
    assert (await front.get("/v1/tokenizers")).json() == {"tokenizers": []}
    assert (await front.post("/v1/tokenizers", body)).status_code == 202


async def test_a_template_may_be_given(front, checkpoint, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    body = {"name": "m", "source": str(checkpoint), "chat_template_path": str(file)}
    await front.post("/v1/tokenizers", body)
    text = await loaded(front, "m")
    assert text.tokenizer.chat_template == file.read_text()


async def test_what_cannot_be_loaded_says_why(front, tmp_path):
    body = {"name": "m", "source": str(tmp_path)}
    made = (await front.post("/v1/tokenizers", body)).json()
    with pytest.raises(Exception, match="cannot be used"):
        await loaded(front, "m")
    status = (await front.get(f"/v1/tokenizers/{made['id']}/status")).json()
    assert status["status"] == "failed"
    assert str(tmp_path) in status["message"]
    assert (await front.get("/v1/tokenizers")).json() == {"tokenizers": []}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"source": "x"}, "body"),
        ({"name": "", "source": "x"}, "name"),
        ({"name": "m", "source": 3}, "source"),
        ({"name": "m", "source": "x", "more": 1}, "more"),
    ],
)
async def test_bodies_are_checked(front, body, param):
    reply = await front.post("/v1/tokenizers", body)
    assert reply.status_code == 400
    assert param in reply.json()["error"]["message"]


async def test_tokenizers_are_for_operators_and_parsers_for_clients():
    async with gateway(
        server__api_key=Secret("client"), control__api_keys=(Secret("1:ops:admin:boss"),)
    ) as front:
        client = {"authorization": "Bearer client"}
        body = {"text": "x", "parser": "deepseek-r1"}
        assert (await front.get("/v1/tokenizers", headers=client)).status_code == 401
        boss = {"authorization": "Bearer boss"}
        assert (await front.get("/v1/tokenizers", headers=boss)).status_code == 200
        assert (await front.post("/parse/reasoning", body)).status_code == 401
        assert (await front.post("/parse/reasoning", body, headers=client)).status_code == 200


async def test_thinking_is_split_from_the_answer(front):
    text = "<think>Let me see.</think>It is 42."
    for field in ("parser", "reasoning_parser"):
        reply = await front.post("/parse/reasoning", {"text": text, field: "deepseek-r1"})
        assert reply.json() == {
            "normal_text": "It is 42.",
            "reasoning_text": "Let me see.",
            "success": True,
        }


async def test_calls_are_found(front):
    call = {"name": "weather", "arguments": {"city": "Oslo"}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    body = {
        "text": f"Wait. <tool_call>\n{json.dumps(call)}\n</tool_call>",
        "tool_call_parser": "qwen25",
        "tools": [tool],
    }
    reply = (await front.post("/parse/function_call", body)).json()
    assert reply["normal_text"].strip() == "Wait."
    [found] = reply["tool_calls"]
    assert found["name"] == "weather"
    assert json.loads(found["arguments"]) == {"city": "Oslo"}


@pytest.mark.parametrize("path", ["/parse/reasoning", "/parse/function_call"])
@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"text": "x", "parser": "nobody's"}, "nobody's"),
        ({"text": "x"}, "must be given"),
        ({"text": 3, "parser": "x"}, "text"),
        ({"parser": "x"}, "text"),
    ],
)
async def test_parsers_that_are_none_are_refused(front, path, body, why):
    reply = await front.post(path, body)
    assert reply.status_code == 400
    assert why in reply.json()["error"]["message"]
