"""The OpenAI backend, with OpenAI's SDK against a server that speaks its wire format."""

from __future__ import annotations

import contextlib

import pytest

from sylvan import lang as sgl
from sylvan.lang.backends._token_search import integer_bias, search_choice
from sylvan.lang.errors import BackendError
from tests.support.wire import Events, Status, serving

pytest.importorskip("openai")

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


class Service:
    """Chat and text completions from a list of answers."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def __call__(self, asked):
        chat = asked.path == "/v1/chat/completions"
        if not chat and asked.path != "/v1/completions":
            return Status(404, {"error": {"message": asked.path}})
        texts = [self.answers.pop(0) for _ in range(asked.body.get("n", 1))]
        if asked.body.get("stream"):
            return self.stream(texts[0], chat)
        choices = [
            {"index": i, "finish_reason": "stop", "logprobs": None}
            | ({"message": {"role": "assistant", "content": t}} if chat else {"text": t})
            for i, t in enumerate(texts)
        ]
        kind = "chat.completion" if chat else "text_completion"
        return {"id": "c", "object": kind, "created": 1, "model": "m"} | {
            "choices": choices, "usage": USAGE,
        }  # fmt: skip

    def stream(self, text, chat):
        kind = "chat.completion.chunk" if chat else "text_completion"
        base = {"id": "c", "object": kind, "created": 1, "model": "m"}
        events = [
            {"choices": [{"index": 0, "finish_reason": None}
             | ({"delta": {"content": c}} if chat else {"text": c})]}
            for c in text
        ]  # fmt: skip
        events.append({"choices": [], "usage": USAGE})
        return Events([(None, base | event) for event in events])


@contextlib.contextmanager
def openai(service, model="gpt-4o", **options):
    with serving(service) as server:
        backend = sgl.OpenAI(
            model, base_url=server.url + "/v1", api_key="k", max_retries=0, **options
        )
        try:
            yield backend, server
        finally:
            backend.client.close()


@sgl.function
def chat(s, question):
    s += sgl.system("Be brief.")
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=16, temperature=0, stop="\n"))


def test_chat_programs_send_messages():
    with openai(Service("yes")) as (backend, server):
        state = chat.run("Q?", backend=backend)

        assert state["answer"] == "yes"
        assert state.get_meta_info("answer") == {"finish_reason": "stop"}
        assert server.asked[0].body == {
            "model": "gpt-4o",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Q?"},
            ],
            "max_tokens": 16,
            "n": 1,
            "temperature": 0,
            "top_p": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "stop": ["\n"],
        }
        assert server.asked[0].headers["Authorization"] == "Bearer k"
        assert backend.token_usage.prompt_tokens == 3
        backend.token_usage.reset()
        assert backend.token_usage.completion_tokens == 0


def test_multi_turn_chat_sends_the_history():
    @sgl.function
    def turns(s):
        for question in ("a", "b"):
            s += sgl.user(question)
            s += sgl.assistant(sgl.gen("x"))

    with openai(Service("1", "2")) as (backend, server):
        turns.run(backend=backend)
    assert server.asked[1].body["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "b"},
    ]


def test_completion_programs_send_text():
    @sgl.function
    def program(s):
        s += "Once" + sgl.gen("x", n=2, sampling_seed=7, logit_bias={"5": 1.0})

    with openai(Service(" upon", " more"), "gpt-3.5-turbo-instruct") as (backend, server):
        assert program.run(backend=backend)["x"] == [" upon", " more"]
    body = server.asked[0].body
    assert (body["prompt"], body["n"], body["seed"], body["logit_bias"]) == (
        "Once", 2, 7, {"5": 1.0},
    )  # fmt: skip


@pytest.mark.parametrize("model", ["gpt-4o", "gpt-3.5-turbo-instruct"])
def test_streaming(model):
    with openai(Service("hello"), model) as (backend, server):
        state = chat.run("Q?", backend=backend, stream=True)
        assert "".join(state.text_iter("answer")) == "hello"
        state.sync()
        assert backend.token_usage.completion_tokens == 2
    assert server.asked[0].body["stream_options"] == {"include_usage": True}


def test_reasoning_models_get_their_own_limit():
    with openai(Service("yes"), "o3-mini") as (backend, server):
        chat.run("Q?", backend=backend)
    assert server.asked[0].body["max_completion_tokens"] == 16
    assert "max_tokens" not in server.asked[0].body


def test_chat_gen_must_follow_the_opening_of_the_assistant():
    @sgl.function
    def program(s):
        s += sgl.user("q")
        s += sgl.assistant("So " + sgl.gen("x"))

    with (
        openai(Service("yes")) as (backend, _),
        pytest.raises(sgl.ProgramError, match="num_api_spec_tokens"),
    ):
        program.run(backend=backend)["x"]


def test_speculation_serves_several_gens_from_one_call():
    @sgl.function(num_api_spec_tokens=99)
    def program(s):
        s += sgl.user("q")
        s += sgl.assistant("Name:" + sgl.gen("n", stop=".") + ". Age:" + sgl.gen("a", stop="."))

    with openai(Service("Name: Ada. Age: 36. And")) as (backend, server):
        state = program.run(backend=backend)
        assert (state["n"], state["a"]) == (" Ada", " 36")
    assert len(server.asked) == 1
    assert server.asked[0].body["max_tokens"] == 99
    assert "stop" not in server.asked[0].body


def test_refusals_keep_their_status():
    refuse = Status(429, {"error": {"message": "slow down", "type": "rate_limit"}})
    with openai(lambda asked: refuse) as (backend, _):
        error = chat.run("Q?", backend=backend).error()
    assert isinstance(error.__cause__, BackendError)
    assert error.__cause__.status == 429
    assert "slow down" in str(error)


def test_what_the_service_does_not_know_is_said():
    @sgl.function
    def program(s):
        s += sgl.assistant(sgl.gen("x", regex="a+", top_k=3))

    with openai(Service("aa")) as (backend, _), pytest.warns(UserWarning, match="regex, top_k"):
        program.run(backend=backend, use_thread=False)


class Letters:
    """A tokenizer of one token per character."""

    n_vocab = 256

    def encode(self, text):
        return [ord(c) for c in text]

    def decode(self, tokens):
        return "".join(map(chr, tokens))


def test_typed_gens_of_completion_models():
    @sgl.function
    def program(s):
        s += sgl.gen_int("i") + sgl.gen_string("t")

    with openai(Service("42", "word"), "davinci-002", encoding=Letters()) as (backend, server):
        state = program.run(backend=backend)
        assert (state["i"], state["t"]) == ("42", '"word"')
    first, second = (asked.body for asked in server.asked)
    assert {chr(int(t)) for t in first["logit_bias"]} == set("0123456789 ")
    assert first["stop"] == [" "]
    assert (second["prompt"], second["stop"]) == ('42"', '"')


def test_typed_gens_of_chat_models_are_refused():
    @sgl.function
    def program(s):
        s += sgl.assistant(sgl.gen_int("i"))

    with openai(Service()) as (backend, _), pytest.raises(sgl.ProgramError, match="dtype int"):
        program.run(backend=backend)["i"]


def test_select_walks_the_choices_token_by_token():
    def service(asked):
        allowed = sorted(chr(int(t)) for t in asked.body["logit_bias"])
        return Service(allowed[-1])(asked)

    @sgl.function
    def program(s):
        s += "It is " + sgl.select("x", ["rat", "rot", "ox"])

    with openai(service, "davinci-002", encoding=Letters()) as (backend, server):
        state = program.run(backend=backend)
        assert state["x"] == "rot"
        assert state.get_meta_info("x") == {"scores": [1, 2, 0]}
    assert [asked.body["max_tokens"] for asked in server.asked] == [1, 1]


def test_select_of_chat_models_is_refused():
    @sgl.function
    def program(s):
        s += sgl.assistant(sgl.select("x", ["a", "b"]))

    with openai(Service()) as (backend, _), pytest.raises(sgl.ProgramError, match="chat models"):
        program.run(backend=backend)["x"]


def test_token_search_ends_when_nothing_is_hit():
    assert search_choice(Letters(), "p", ["ab", "ac"], lambda prompt, bias: "z") == [0, 0]
    assert search_choice(Letters(), "p", ["a", "ab"], lambda prompt, bias: "a") == [1, 1]
    assert len(integer_bias(Letters())) == 11


def test_crusoe_is_openai_at_another_address(monkeypatch):
    monkeypatch.delenv("CRUSOE_API_KEY", raising=False)
    with pytest.raises(ValueError, match="CRUSOE_API_KEY"):
        sgl.Crusoe("m")
    monkeypatch.setenv("CRUSOE_API_KEY", "k")
    backend = sgl.Crusoe("m")
    assert "crusoecloud" in str(backend.client.base_url)
    backend.client.close()


def test_missing_sdk_names_the_extra(monkeypatch):
    import sys

    from sylvan.lang.errors import MissingExtraError

    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(MissingExtraError, match=r"sylvan\[openai\]"):
        sgl.OpenAI("gpt-4o")
