"""The built-in model served from a real GPU; run with `--device cuda`."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.conftest import running
from tests.support.chosen import device_name

pytestmark = pytest.mark.gpu

TIMEOUT_S = 120
QUESTIONS = (
    "Sort: pear, apple, fig.",
    "What is 12 + 7?",
    "Count from 3 to 9.",
    "What is the capital of France?",
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def client(server) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=TIMEOUT_S)


def chat(http, question, **more) -> str:
    body = {
        "model": "sapling",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 64,
    }
    answer = http.post("/v1/chat/completions", json=body | more)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def flags(device):
    return ("--device", device, "--cache.max-tokens", "32768")


def ask_all(http) -> list:
    greedy = {"temperature": 0, "max_new_tokens": 24}
    batch = http.post("/generate", json={"text": list(QUESTIONS), "sampling_params": greedy}).json()
    return [
        [chat(http, question) for question in QUESTIONS],
        [reply["output_ids"] for reply in batch],
    ]


def test_answers_are_those_of_the_cpu():
    found = []
    for device in ("cpu", device_name()):
        whole = ("--dtype", "float32", *flags(device))
        with running("sapling", *whole) as server, client(server) as http:
            found.append(ask_all(http))

    assert found[0] == found[1]
    assert "19" in found[0][0][1]


def test_a_crowd_is_served_and_a_schema_is_kept():
    params = {"max_new_tokens": 64, "temperature": 0.7, "ignore_eos": True}

    def ask(number):
        body = {"text": f"Number {number}: ", "sampling_params": params}
        return http.post("/generate", json=body)

    with running("sapling", *flags(device_name())) as server, client(server) as http:
        assert "19" in chat(http, "What is 12 + 7?")
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
        said = json.loads(chat(http, "Extract the name: Anna is 31.", response_format=form))
        with ThreadPoolExecutor(64) as pool:
            answers = list(pool.map(ask, range(64)))

    assert set(said) == {"name", "age"}
    assert isinstance(said["name"], str)
    assert isinstance(said["age"], int)
    assert {answer.status_code for answer in answers} == {200}
    assert {len(answer.json()["output_ids"]) for answer in answers} == {64}
