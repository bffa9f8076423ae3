"""The Anthropic backend, with Anthropic's SDK against a server that speaks its wire format."""

from __future__ import annotations

import contextlib
import importlib.util

import pytest

from sylvan import lang as sgl
from sylvan.lang.errors import BackendError, MissingExtraError
from tests.support.wire import Events, Status, serving

HAS_SDK = importlib.util.find_spec("anthropic") is not None
needs_sdk = pytest.mark.skipif(not HAS_SDK, reason="the extra 'anthropic' is not installed")


def message(text):
    return {
        "id": "m", "type": "message", "role": "assistant", "model": "claude",
        "content": [{"type": "text", "text": text}], "stop_reason": "end_turn",
        "stop_sequence": None, "usage": {"input_tokens": 3, "output_tokens": 2},
    }  # fmt: skip


def events(text):
    start = message("") | {"content": [], "stop_reason": None}
    delta = {"stop_reason": "end_turn", "stop_sequence": None}
    found = [
        {"type": "message_start", "message": start},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *(
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": c}}
            for c in text
        ),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    ]
    return Events([(event["type"], event) for event in found], done=False)


@contextlib.contextmanager
def anthropic(answer):
    with serving(answer) as server:
        backend = sgl.Anthropic("claude-x", base_url=server.url, api_key="k", max_retries=0)
        try:
            yield backend, server
        finally:
            backend.client.close()


@sgl.function
def chat(s, question):
    s += sgl.system("Be brief.")
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=16, temperature=0, stop="END", top_k=5))


@needs_sdk
def test_programs_send_messages_and_keep_them():
    with anthropic(lambda asked: message("yes")) as (backend, server):
        state = chat.run("Q?", backend=backend)
        assert state["answer"] == "yes"
        assert state.get_meta_info("answer") == {"finish_reason": "end_turn"}
        # The system message is sent apart, and is still in the program's messages.
        assert [m["role"] for m in state.messages()] == ["system", "user", "assistant"]
        assert backend.token_usage.completion_tokens == 2

    asked = server.asked[0]
    assert asked.path == "/v1/messages"
    assert {"k", "Bearer k"} & set(asked.headers.values())
    assert asked.body == {
        "model": "claude-x",
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "Q?"}],
        "max_tokens": 16,
        "temperature": 0,
        "stop_sequences": ["END"],
        "top_k": 5,
    }


@needs_sdk
def test_plain_text_is_one_user_message():
    @sgl.function
    def program(s):
        s += "Hello" + sgl.gen("x")

    with anthropic(lambda asked: message("hi")) as (backend, server):
        assert program.run(backend=backend)["x"] == "hi"
    assert server.asked[0].body["messages"] == [{"role": "user", "content": "Hello"}]
    assert "system" not in server.asked[0].body


@needs_sdk
def test_streaming():
    with anthropic(lambda asked: events("hello")) as (backend, _):
        state = chat.run("Q?", backend=backend, stream=True)
        assert "".join(state.text_iter("answer")) == "hello"
        state.sync()
        assert backend.token_usage.completion_tokens == 2


@needs_sdk
def test_refusals_and_what_is_not_supported():
    refuse = Status(529, {"type": "error", "error": {"type": "overloaded_error"}})
    with anthropic(lambda asked: refuse) as (backend, _):
        error = chat.run("Q?", backend=backend).error()
        assert isinstance(error.__cause__, BackendError)
        assert error.__cause__.status == 529

        @sgl.function
        def many(s):
            s += sgl.gen("x", n=2)

        with pytest.raises(sgl.ProgramError, match="one sample"):
            many.run(backend=backend).text()


@pytest.mark.skipif(HAS_SDK, reason="the extra 'anthropic' is installed")
def test_missing_sdk_names_the_extra():
    with pytest.raises(MissingExtraError, match=r"sylvan\[anthropic\]"):
        sgl.Anthropic("claude")
