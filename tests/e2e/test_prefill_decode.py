"""Prefill and decode apart: the answers of one server, by two that know of each other's KV."""

from __future__ import annotations

import itertools
import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Server, running
from tests.support.adapters import write_random_adapter
from tests.support.draft_heads import write_head
from tests.support.random_model import write_random_model
from tests.support.tiny import write_model

FLAGS = ("--load-format", "dummy", "--device", "cpu", "--dtype", "float32", "--threads", "1")
FLAGS = (*FLAGS, "--page-size", "16", "--max-total-tokens", "16Ki", "--chunked-prefill-size", "64")
PROMPT = "The quick brown fox jumps over the lazy dog. " * 12
ROOMS = itertools.count(1000)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny"))


class Pair:
    """A prefill and a decode server, asked as a gateway asks them."""

    def __init__(self, prefill: Server, decode: Server, port: int) -> None:
        self.prefill, self.decode, self.port = prefill, decode, port

    def meeting(self, room: int | None = None) -> dict[str, Any]:
        number = next(ROOMS) * 100 if room is None else room
        place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port}
        return {**place, "bootstrap_room": number}

    def ask(
        self, path: str, body: dict[str, Any], meeting: dict[str, Any] | None = None
    ) -> tuple[httpx.Response, httpx.Response]:
        """The answer of both servers."""
        both = {**body, **(meeting or self.meeting())}
        with ThreadPoolExecutor(2) as pool:
            urls = (self.prefill.url, self.decode.url)
            replies = [pool.submit(httpx.post, url + path, json=both, timeout=60) for url in urls]
            prefill, decode = (reply.result() for reply in replies)
        return prefill, decode

    def alone(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """The answer of the prefill server alone."""
        return httpx.post(self.prefill.url + path, json=body, timeout=60)

    def counts(self, server: Server) -> dict[str, Any]:
        state = httpx.get(server.url + "/server_info", timeout=60).json()["internal_states"][0]
        return state["disaggregation"]


@pytest.fixture(scope="module", params=["tcp", pytest.param("shm", marks=pytest.mark.slow)])
def pair(request, model):
    port = free_port()
    flags = (*FLAGS, "--disaggregation-transfer-backend", request.param)
    prefill = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port))
    with (
        running(model, *flags, *prefill) as first,
        running(model, *flags, "--disaggregation-mode", "decode") as second,
    ):
        yield Pair(first, second, port)


def generate(text: str = PROMPT, **sampling: Any) -> dict[str, Any]:
    params = {"max_new_tokens": 12, "ignore_eos": True, **sampling}
    return {"text": text, "sampling_params": params}


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 1.0, "sampling_seed": 7}], ids=str
)
def test_the_answer_is_that_of_one_server(pair, sampling):
    body = generate(**sampling)
    before = pair.counts(pair.decode)

    prefill, decode = pair.ask("/generate", body)

    assert prefill.status_code == decode.status_code == 200, (prefill.text, decode.text)
    assert decode.json()["output_ids"] == pair.alone("/generate", body).json()["output_ids"]
    assert prefill.json()["output_ids"] == decode.json()["output_ids"][:1]
    after = pair.counts(pair.decode)
    assert after["done"] == before["done"] + 1
    assert after["failed"] == after["refused"] == 0


CHAT = [{"role": "user", "content": PROMPT}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "samples": ("/v1/chat/completions", {"messages": CHAT, "n": 3, "max_tokens": 6, "seed": 1}),
    "batch": (
        "/v1/completions",
        {"prompt": [PROMPT, "b" * 99], "n": 2, "max_tokens": 5, "seed": 2},
    ),
    "log probabilities": (
        "/v1/chat/completions",
        {"messages": CHAT, "logprobs": True, "top_logprobs": 2, "max_tokens": 5, "seed": 3},
    ),
    "grammar": (
        "/v1/chat/completions",
        {
            "messages": CHAT,
            "max_tokens": 40,
            "seed": 4,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
            },
        },
    ),
    "penalties": (
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 9, "seed": 5, "frequency_penalty": 1.5},
    ),
    "stop": (
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 60, "seed": 6, "stop": ["a", "e"]},
    ),
    "one token": ("/v1/completions", {"prompt": "x", "max_tokens": 4, "seed": 7}),
    "no token": ("/generate", generate(max_new_tokens=0)),
    "echo": ("/v1/completions", {"prompt": "ab", "max_tokens": 2, "seed": 1, "echo": True}),
    "log probabilities of the prompt": (
        "/v1/completions",
        {"prompt": "abc", "max_tokens": 2, "seed": 1, "echo": True, "logprobs": 1},
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_whatever_is_asked_for_comes_as_from_one_server(pair, name):
    path, body = REQUESTS[name]

    prefill, decode = pair.ask(path, body)

    assert prefill.status_code == decode.status_code == 200, (prefill.text, decode.text)
    alone = pair.alone(path, body).json()
    assert content(decode.json()) == content(alone)


def content(reply: dict[str, Any]) -> Any:
    """An answer without names and times."""
    return reply.get("choices") or (reply["output_ids"], reply["meta_info"]["finish_reason"])


def test_streams_are_those_of_one_server(pair):
    body = {"prompt": PROMPT + "s", "max_tokens": 9, "seed": 8, "stream": True}

    prefill, decode = pair.ask("/v1/completions", body)

    assert prefill.text.rstrip().endswith("[DONE]")
    assert events(decode.text) == events(pair.alone("/v1/completions", body).text)


def events(text: str) -> tuple[str, str]:
    """The text of a stream, and why it ended; how it was divided is up to its reader."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


def test_pages_that_the_decode_server_has_do_not_come_again(pair):
    body = generate(PROMPT + "again", temperature=0)
    pair.ask("/generate", body)
    before = pair.counts(pair.decode)

    _, decode = pair.ask("/generate", body)

    after = pair.counts(pair.decode)
    assert after["done"] == before["done"] + 1
    assert after["num_bytes"] == before["num_bytes"]
    assert decode.json()["output_ids"] == pair.alone("/generate", body).json()["output_ids"]


def test_a_room_is_used_once(pair):
    meeting = pair.meeting()
    assert pair.ask("/generate", generate("once"), meeting)[1].status_code == 200

    prefill, decode = pair.ask("/generate", generate("once more"), meeting)

    assert (prefill.status_code, decode.status_code) == (400, 503)
    for reply in (prefill, decode):
        assert f"bootstrap_room {meeting['bootstrap_room']} was used before" in reply.text


def test_servers_that_were_given_different_prompts_refuse(pair):
    meeting = pair.meeting()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(
            httpx.post, pair.prefill.url + "/generate", json={**generate("one"), **meeting}
        )
        second = pool.submit(
            httpx.post, pair.decode.url + "/generate", json={**generate("two"), **meeting}
        )
        assert first.result().status_code == 200
        assert second.result().status_code == 503
    assert "prompt or adapter of the prefill and the decode server differ" in second.result().text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bootstrap_room", -1),
        ("bootstrap_room", "x"),
        ("bootstrap_room", [1, 2, 3]),
        ("bootstrap_port", 0),
        ("bootstrap_host", 5),
        ("bootstrap_host", ["a", "b"]),
    ],
)
def test_malformed_meetings_are_refused_by_name(pair, name, value):
    body = {**generate("hello"), **pair.meeting(), name: value}

    reply = httpx.post(pair.decode.url + "/generate", json=body)

    assert reply.status_code == 400
    assert name in reply.text


def test_an_unreachable_address_means_that_the_prompt_is_computed_here(pair):
    meeting = {**pair.meeting(), "bootstrap_port": free_port()}
    body = generate(PROMPT + "nobody", temperature=0)

    reply = httpx.post(pair.decode.url + "/generate", json={**body, **meeting}, timeout=60)

    assert reply.json()["output_ids"] == pair.alone("/generate", body).json()["output_ids"]


@pytest.mark.slow
def test_many_at_once_all_get_their_own(pair):
    prompts = [f"{i} " * (3 + 7 * i) for i in range(24)]
    bodies = [
        generate(prompt, temperature=1.0, sampling_seed=i) for i, prompt in enumerate(prompts)
    ]
    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda body: pair.ask("/generate", body)[1].json(), bodies))
    for body, reply in zip(bodies, replies, strict=True):
        assert reply["output_ids"] == pair.alone("/generate", body).json()["output_ids"]


@pytest.mark.slow
def test_a_draft_head_goes_along(tmp_path):
    """The head's KV of the prompt is transferred with the model's."""
    model = str(write_random_model(tmp_path / "model", context_len=256))
    head = write_head(tmp_path / "head", "eagle3")
    speculation = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(head))
    port = free_port()
    flags = ("--device", "cpu", "--dtype", "float32", "--threads", "1", "--page-size", "16")
    flags = (*flags, "--max-total-tokens", "4Ki", *speculation, "--speculative.adaptive", "false")
    prefill = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port))
    body = {
        "input_ids": [i % 200 for i in range(3, 70)],
        "sampling_params": {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True},
    }
    with (
        running(model, *flags, *prefill) as first,
        running(model, *flags, "--disaggregation-mode", "decode") as second,
    ):
        pair = Pair(first, second, port)
        alone = pair.alone("/generate", body).json()
        _, decode = pair.ask("/generate", body)

    assert decode.status_code == 200, decode.text
    assert decode.json()["output_ids"] == alone["output_ids"]
    counts = [reply["meta_info"]["spec_num_correct_drafts"] for reply in (alone, decode.json())]
    assert counts[0] == counts[1]
    assert decode.json()["meta_info"]["spec_verify_ct"] > 3


@pytest.mark.slow
@pytest.mark.parametrize("transfer", ["tcp", "shm"])
def test_adapters_tools_and_drafts_go_along(tmp_path, transfer):
    model = write_random_model(tmp_path / "model", context_len=2048)
    adapter = write_random_adapter(tmp_path / "adapter", model, 1)
    ids = [i % 200 for i in range(3, 90)]
    params = {"max_new_tokens": 12, "temperature": 1.0, "sampling_seed": 3, "ignore_eos": True}
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "model": ("/generate", {"input_ids": ids, "sampling_params": params}),
        "adapter": ("/generate", {"input_ids": ids, "sampling_params": params, "lora_path": "a"}),
        "repeats": ("/generate", {"input_ids": [5, 6, 7] * 30, "sampling_params": params}),
        "tools": (
            "/v1/chat/completions",
            {"messages": CHAT[:1], "tools": [tool], "tool_choice": "required", "temperature": 0}
            | {"max_tokens": 30},
        ),
    }
    port = free_port()
    flags = ("--device", "cpu", "--dtype", "float32", "--threads", "1", "--page-size", "16")
    flags = (*flags, "--max-total-tokens", "8Ki", "--speculative-algorithm", "ngram")
    flags = (*flags, "--disaggregation-transfer-backend", transfer, "--lora-paths", f"a={adapter}")
    prefill = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port))
    with (
        running(str(model), *flags, *prefill) as first,
        running(str(model), *flags, "--disaggregation-mode", "decode") as second,
    ):
        pair = Pair(first, second, port)
        found = {}
        for name, (path, body) in asked.items():
            _, decode = pair.ask(path, body)
            assert decode.status_code == 200, (name, decode.text)
            alone = pair.alone(path, body)
            found[name], wanted = (
                re.sub(r"call_[0-9a-f]+", "", json.dumps(content(reply.json())))
                for reply in (decode, alone)
            )
            assert found[name] == wanted, name
        counts = pair.counts(second)

    assert found["adapter"] != found["model"]
    assert counts["done"] == len(asked)
    assert counts["failed"] == counts["refused"] == 0
