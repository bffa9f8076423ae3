"""Vertex AI, with Google's SDK against a server that speaks its wire format."""

from __future__ import annotations

import importlib.util

import pytest

from sylvan import lang as sgl
from sylvan.lang.errors import BackendError, MissingExtraError
from tests.support.wire import Events, Status, serving

try:
    HAS_SDK = importlib.util.find_spec("google.genai") is not None
except ModuleNotFoundError:
    HAS_SDK = False
needs_sdk = pytest.mark.skipif(not HAS_SDK, reason="the extra 'vertexai' is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # the package's own warnings


def reply(text):
    content = {"role": "model", "parts": [{"text": text}]}
    usage = {"promptTokenCount": 3, "candidatesTokenCount": 2}
    return {"candidates": [{"content": content, "index": 0}], "usageMetadata": usage}


@pytest.fixture
def vertex():
    from google import genai
    from google.oauth2.credentials import Credentials

    clients = []

    def make(url):
        client = genai.Client(
            vertexai=True,
            project="p",
            location="l",
            credentials=Credentials(token="t"),
            http_options={"base_url": url},
        )
        clients.append(client)
        return sgl.VertexAI("gemini-x", client=client)

    yield make
    for client in clients:
        client.close()


@sgl.function
def chat(s, question):
    s += sgl.system("Be brief.")
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("x", max_tokens=16, temperature=0, stop="END"))


@needs_sdk
def test_programs_send_contents(vertex):
    with serving(lambda asked: reply("yes")) as server:
        backend = vertex(server.url)
        assert chat.run("Q?", backend=backend)["x"] == "yes"
        assert backend.token_usage.completion_tokens == 2

    asked = server.asked[0]
    assert asked.path.endswith("/publishers/google/models/gemini-x:generateContent")
    assert asked.body["contents"] == [{"role": "user", "parts": [{"text": "Q?"}]}]
    assert asked.body["systemInstruction"]["parts"] == [{"text": "Be brief."}]
    config = asked.body["generationConfig"]
    assert (config["maxOutputTokens"], config["stopSequences"]) == (16, ["END"])


@needs_sdk
def test_streaming(vertex):
    answer = Events([(None, reply(c)) for c in "hello"], done=False)
    with serving(lambda asked: answer) as server:
        state = chat.run("Q?", backend=vertex(server.url), stream=True)
        assert "".join(state.text_iter("x")) == "hello"


@needs_sdk
def test_pictures_are_parts(vertex):
    @sgl.function
    def looking(s):
        s += sgl.user(sgl.image(b"jpg") + "What?")
        s += sgl.assistant(sgl.gen("x"))

    with serving(lambda asked: reply("a cat")) as server:
        assert looking.run(backend=vertex(server.url))["x"] == "a cat"
    parts = server.asked[0].body["contents"][0]["parts"]
    assert parts[1]["inlineData"]["data"] == "anBn"


@needs_sdk
def test_refusals_keep_their_status(vertex):
    refuse = Status(403, {"error": {"code": 403, "message": "no access", "status": "DENIED"}})
    with serving(lambda asked: refuse) as server:
        error = chat.run("Q?", backend=vertex(server.url)).error()
    assert isinstance(error.__cause__, BackendError)
    assert error.__cause__.status == 403


@pytest.mark.skipif(HAS_SDK, reason="the extra 'vertexai' is installed")
def test_missing_sdk_names_the_extra():
    with pytest.raises(MissingExtraError, match=r"sylvan\[vertexai\]"):
        sgl.VertexAI("gemini")
