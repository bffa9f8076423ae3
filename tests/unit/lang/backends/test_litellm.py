"""LiteLLM against a server that speaks the OpenAI wire format."""

from __future__ import annotations

import importlib.util

import pytest

from sylvan import lang as sgl
from sylvan.lang.errors import MissingExtraError
from tests.support.wire import Events, serving

HAS_SDK = importlib.util.find_spec("litellm") is not None
pytestmark = pytest.mark.filterwarnings("ignore")  # the package's own warnings


@sgl.function
def chat(s):
    s += sgl.user("Q?")
    s += sgl.assistant(sgl.gen("x", max_tokens=4, stop="END"))


def answer(asked):
    base = {"id": "c", "created": 1, "model": "m"}
    if asked.body.get("stream"):
        deltas = [{"index": 0, "delta": {"content": c}, "finish_reason": None} for c in "yes"]
        end = {"index": 0, "delta": {}, "finish_reason": "stop"}
        return Events([
            (None, base | {"object": "chat.completion.chunk", "choices": [d]})
            for d in [*deltas, end]
        ])  # fmt: skip
    message = {"role": "assistant", "content": "yes"}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return base | {"object": "chat.completion", "choices": choices, "usage": usage}


@pytest.mark.skipif(not HAS_SDK, reason="the extra 'litellm' is not installed")
@pytest.mark.parametrize("stream", [False, True])
def test_programs_send_messages(stream):
    with serving(answer) as server:
        backend = sgl.LiteLLM("openai/m", base_url=server.url + "/v1", api_key="k")
        state = chat.run(backend=backend, stream=stream)
        assert state.error() is None
        assert "".join(state.text_iter("x")) == "yes"
        assert backend.get_model_name() == "openai/m"
    body = server.asked[0].body
    assert body["messages"] == [{"role": "user", "content": "Q?"}]
    assert (body["max_tokens"], body["stop"]) == (4, ["END"])


@pytest.mark.skipif(HAS_SDK, reason="the extra 'litellm' is installed")
def test_missing_sdk_names_the_extra():
    with pytest.raises(MissingExtraError, match=r"sylvan\[litellm\]"):
        sgl.LiteLLM("openai/m")
