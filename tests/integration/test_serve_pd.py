"""`sylvan serve --pd P:D`: prefill and decode servers behind a gateway, with one command."""

from __future__ import annotations

import hashlib
import json
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from tests.integration.test_serve_replicas import (
    FLAGS,
    interrupted,
    kill_busy,
    refused,
    replicas_of,
    serving,
    text_of,
    until,
    workers,
)
from tests.support.tiny import write_model

PROMPT = "The quick brown fox jumps over the lazy dog. " * 9


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def body(text=PROMPT, **fields):
    return {"prompt": text, "max_tokens": 16, "ignore_eos": True, "seed": 5, **fields}


def post(url, path, content):
    return httpx.post(url + path, json=content, timeout=120)


def choices(reply):
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"]


@pytest.fixture(scope="module")
def alone(model):
    """The answer of a single server."""
    with serving(model, "--threads", 1) as (_, url):
        yield {
            "plain": choices(post(url, "/v1/completions", body())),
            "samples": choices(post(url, "/v1/completions", body(n=3, logprobs=2))),
            "batch": choices(post(url, "/v1/completions", body(["abc" * 30, PROMPT]))),
            "native": native(post(url, "/generate", NATIVE)),
        }


NATIVE = {
    "text": PROMPT,
    "sampling_params": {"max_new_tokens": 5, "temperature": 0},
    "return_logprob": True,
    "logprob_start_len": 0,
}


def native(reply):
    assert reply.status_code == 200, reply.text
    info = reply.json()["meta_info"]
    return reply.json()["output_ids"], info["input_token_logprobs"], info["output_token_logprobs"]


@pytest.mark.slow
def test_two_servers_answer_as_one_and_survive_each_other(model, alone):
    flags = ("--threads", 1, "--disagg.timeout-s", 10)
    with serving(model, "--pd", "1:1", *flags) as (process, url):
        assert sorted(w["worker_type"] for w in workers(url)) == ["decode", "prefill"]
        assert choices(post(url, "/v1/completions", body())) == alone["plain"]
        assert choices(post(url, "/v1/completions", body(n=3, logprobs=2))) == alone["samples"]
        batch = choices(post(url, "/v1/completions", body(["abc" * 30, PROMPT])))
        assert batch == alone["batch"]
        assert native(post(url, "/generate", NATIVE)) == alone["native"]

        prefill, decode = replicas_of(process)
        for victim in (prefill, decode):
            with ThreadPoolExecutor(8) as pool:
                prompts = [f"{victim.pid} {i} " + PROMPT for i in range(8)]
                sent = [
                    pool.submit(post, url, "/v1/completions", body(text, max_tokens=300))
                    for text in prompts
                ]
                until(lambda: any(w["load"] for w in workers(url)))
                victim.kill()
                replies = [each.result() for each in sent]
            for reply in replies:
                assert reply.status_code in (200, 502, 503), reply.text
                if reply.status_code != 200:
                    assert reply.json()["error"]["message"]
            until(lambda: [w["is_healthy"] for w in workers(url)] == [True, True])
            assert choices(post(url, "/v1/completions", body())) == alone["plain"]

        until(lambda: holds_nothing(process))
        mine = [p for child in replicas_of(process) for p in child.children(recursive=True)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in mine))


@pytest.fixture(scope="module")
def two_decode(model):
    """One prefill server and two that decode: the process that owns them, and its URL."""
    with serving(model, "--pd", "1:2", "--threads", 1) as made:
        yield made


@pytest.mark.slow
def test_a_stream_outlives_its_decode_server(two_decode):
    process, url = two_decode
    assert all(w["continues_streams"] for w in workers(url))
    expected = text_of(url)
    known = {child.pid for child in replicas_of(process)}

    kill = partial(kill_busy, process, url, "decode")
    assert interrupted(lambda act: text_of(url, act), kill) == expected

    until(lambda: [w["is_healthy"] for w in workers(url)] == [True] * 3)
    assert len({child.pid for child in replicas_of(process)} - known) == 1
    until(lambda: holds_nothing(process))


STREAMED = {
    "text": PROMPT,
    "stream": True,
    "sampling_params": {"max_new_tokens": 1200, "ignore_eos": True, "sampling_seed": 5},
    "return_logprob": True,
    "logprob_start_len": 0,
}


def native_stream(url, act=None):
    """Each event of a stream without what differs between runs; `act` is called at the first."""
    events = []
    with httpx.stream("POST", f"{url}/generate", json=STREAMED, timeout=120) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                reply = json.loads(line[6:])
                assert "error" not in reply, reply
                info = reply["meta_info"]
                rows = info["input_token_logprobs"], info["output_token_logprobs"]
                events.append((reply["text"], *rows))
                if act is not None and len(events) == 1:
                    act()
    return events


@pytest.mark.slow
def test_a_stream_with_log_probabilities_outlives_its_decode_server(two_decode):
    process, url = two_decode
    *_, expected = native_stream(url)
    assert len(expected[1]) > 100

    kill = partial(kill_busy, process, url, "decode")
    events = interrupted(lambda act: native_stream(url, act), kill)

    assert events[-1] == expected
    assert all(rows == expected[1] for _, rows, _ in events)
    until(lambda: [w["is_healthy"] for w in workers(url)] == [True] * 3)


@pytest.mark.slow
def test_neither_server_shares_the_cache_of_a_tenant(model, tmp_path):
    keys = tmp_path / "keys.json"
    entries = [
        {"sha256": hashlib.sha256(f"sk-{name}".encode()).hexdigest(), "tenant": name}
        for name in ("a", "b")
    ]
    keys.write_text(json.dumps({"keys": entries}))
    flags = ("--threads", 1, "--server.api-key-file", keys)
    with serving(model, "--pd", "1:1", *flags) as (process, url):
        for name, stream in (("a", False), ("b", False), ("b", True)):
            asked = {**STREAMED, "stream": stream, "sampling_params": {"max_new_tokens": 4}}
            for path, content in (("/v1/completions", body()), ("/generate", asked)):
                headers = {"authorization": f"Bearer sk-{name}"}
                reply = httpx.post(url + path, json=content, headers=headers, timeout=120)
                assert reply.status_code == 200, reply.text

        for child in replicas_of(process):
            tree = own(child, "/cache/tree").json()
            assert len({node["namespace"] for node in tree["nodes"]}) == tree["namespaces"] == 2
            assert all(node["namespace"].startswith(":") for node in tree["nodes"])


def own(child, path):
    """The answer of a server behind the gateway."""
    config = child.cmdline()[child.cmdline().index("--config") + 1]
    settings = json.loads(Path(config).read_text())["server"]
    headers = {"authorization": f"Bearer {settings['api_key']}"}
    return httpx.get(f"http://127.0.0.1:{settings['port']}{path}", headers=headers)


def holds_nothing(process):
    """Whether no page of any server belongs to a request."""
    for child in replicas_of(process):
        load = own(child, "/v1/loads").json()["loads"][0]
        if load["num_running_reqs"] or load["num_waiting_reqs"] or load["num_used_tokens"]:
            return False
    return True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--pd", "1"), "--pd: expected PREFILL:DECODE, such as 1:1, got '1'"),
        (("--pd", "0:1"), "--pd: expected PREFILL:DECODE"),
        (("--pd", "1:1", "--dp", "2"), "--pd and --dp exclude each other"),
    ],
)
def test_what_cannot_be_served_is_refused(model, words, message):
    code, text = refused(model, *FLAGS, *words)

    assert code == 2
    assert message in text
