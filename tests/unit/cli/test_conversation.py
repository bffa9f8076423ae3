from __future__ import annotations

import io
import json

import httpx
import pytest
from rich.console import Console

from sylvan.cli.client import ApiClient, ServerError
from sylvan.cli.conversation import ChatHistory


class ScriptedServer:
    """Answers like a server, from a list; remembers what it was asked."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.bodies = []

    def __call__(self, request):
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        self.bodies.append(json.loads(request.content))
        answer = self.answers.pop(0)
        if isinstance(answer, httpx.Response):
            return answer
        events = [{"choices": [{"delta": {"content": piece}}]} for piece in answer]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"]))


def client_of(server):
    return ApiClient("http://test/v1/", transport=httpx.MockTransport(server))


def talk(server, *lines, system=""):
    out = io.StringIO()
    chat = ChatHistory(client_of(server), Console(file=out), "tiny", system)
    going = [chat.turn(line) for line in lines]
    return chat, out.getvalue(), going


def test_answers_stream_and_history_is_sent():
    server = ScriptedServer(["Hel", "lo"], ["42"])

    chat, out, _ = talk(server, "hi", "17 + 25?", system="be brief")

    assert "Hello" in out
    assert [m["content"] for m in server.bodies[1]["messages"]] == [
        "be brief",
        "hi",
        "Hello",
        "17 + 25?",
    ]
    assert server.bodies[0]["model"] == "tiny"
    assert chat.messages[-1] == {"role": "assistant", "content": "42"}


def test_reset_and_system_forget_the_conversation():
    server = ScriptedServer(["a"], ["b"])

    chat, _, _ = talk(server, "hi", "/system be kind", "again", "/reset")

    assert server.bodies[1]["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "again"},
    ]
    assert chat.messages == []


@pytest.mark.parametrize("line", ["/quit", "/exit", None])
def test_conversation_ends(line):
    assert talk(ScriptedServer(), line)[2] == [False]


@pytest.mark.parametrize("line", ["/help", "/save", "/what", ""])
def test_other_lines_ask_nothing(line):
    server = ScriptedServer()

    assert talk(server, line)[2] == [True]
    assert server.bodies == []


def test_conversation_is_saved(tmp_path):
    file = tmp_path / "chat.json"

    _, out, _ = talk(ScriptedServer(["hello"]), "hi", f"/save {file}", "/save /no/such/dir/x")

    assert json.loads(file.read_text())[1] == {"role": "assistant", "content": "hello"}
    assert "cannot write" in out


def test_a_refused_question_is_not_remembered():
    refusal = httpx.Response(400, json={"error": {"message": "too long"}})

    chat, out, going = talk(ScriptedServer(refusal), "hi")

    assert "the server answered 400: too long" in out
    assert chat.messages == []
    assert going == [True]


def test_an_error_inside_a_stream_is_raised():
    reply = httpx.Response(200, text='data: {"error": {"message": "lost"}}\n\n')

    with client_of(ScriptedServer(reply)) as client, pytest.raises(ServerError, match="lost"):
        list(client.complete("x"))


def test_completions_stream():
    events = [{"choices": [{"text": t}]} for t in ("a", "", "b")]
    text = "".join(f"data: {json.dumps(e)}\n\n" for e in events)

    with client_of(ScriptedServer(httpx.Response(200, text=text))) as client:
        assert list(client.complete("x", max_tokens=2)) == ["a", "b"]
        assert client.model() == "tiny"


def test_a_server_that_is_not_there_is_named():
    with ApiClient("http://127.0.0.1:9") as client:
        assert not client.is_ready()
        with pytest.raises(ServerError, match="no server answers at http://127"):
            client.model()
