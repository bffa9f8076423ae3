"""Batches over real processes: they outlive `kill -9`, give way to everyone, and can be ended."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager

import httpx
import pytest

from tests.e2e.conftest import running
from tests.support.random_model import write_random_model

ENDPOINT = "/v1/completions"
DEADLINE_S = 300  # a backstop: it takes seconds
LANES = 8  # lines of a batch that are worked on at once


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_random_model(tmp_path_factory.mktemp("batch-llama")))


@contextmanager
def serving(model, data):
    flags = ("--server.data-dir", str(data), "--scheduler.max-running-reqs", "1")
    with (
        running(model, *flags) as server,
        httpx.Client(base_url=server.url, timeout=DEADLINE_S) as http,
    ):
        yield server, http


def body(i, tokens):
    return {"prompt": f"line {i}", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def submit(http, count, tokens):
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": ENDPOINT, "body": body(i, tokens)}
        for i in range(count)
    ]
    files = {"file": ("in.jsonl", "\n".join(map(json.dumps, lines)).encode())}
    file = http.post("/v1/files", files=files, data={"purpose": "batch"}).json()["id"]
    wanted = {"input_file_id": file, "endpoint": ENDPOINT, "completion_window": "24h"}
    return http.post("/v1/batches", json=wanted).json()["id"], file


def state(http, batch):
    return http.get(f"/v1/batches/{batch}").json()


def answered(http, batch):
    return state(http, batch)["request_counts"]["completed"]


def until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def ended(http, batch):
    ends = ("completed", "failed", "expired", "cancelled")
    return until(lambda: s if (s := state(http, batch))["status"] in ends else None)


def lines_of(http, file):
    return [json.loads(x) for x in http.get(f"/v1/files/{file}/content").text.splitlines()]


@pytest.mark.slow
def test_a_batch_outlives_the_death_of_the_server(model, tmp_path):
    count = 40
    with serving(model, tmp_path) as (server, http):
        batch, file = submit(http, count, 100)
        before = until(lambda: answered(http, batch))
        content = http.get(f"/v1/files/{file}/content").content
        server.kill()

    with serving(model, tmp_path) as (_, http):
        done = ended(http, batch)
        text = http.get("/metrics").text
        again = http.post(ENDPOINT, json=body(7, 100)).json()["choices"][0]["text"]

        assert http.get(f"/v1/files/{file}/content").content == content
        lines = lines_of(http, done["output_file_id"])
    assert before < count
    assert done["status"] == "completed"
    assert done["request_counts"] == {"total": count, "completed": count, "failed": 0}
    assert sorted(x["custom_id"] for x in lines) == sorted(f"r{i}" for i in range(count))
    [seventh] = [x for x in lines if x["custom_id"] == "r7"]
    assert seventh["response"]["body"]["choices"][0]["text"] == again
    # what had been answered was not asked again
    counts = [x for x in text.splitlines() if x.startswith("sglang:num_requests_total{")]
    assert 0 < sum(float(x.rsplit(" ", 1)[1]) for x in counts) <= count - before


@pytest.mark.slow
def test_batches_give_way_and_can_be_ended(model, tmp_path):
    count = 60
    with serving(model, tmp_path) as (_, http):
        batch, _ = submit(http, count, 400)
        before = until(lambda: answered(http, batch))
        asked = 4
        for i in range(asked):
            http.post(ENDPOINT, json=body(i, 1)).raise_for_status()
        # each waits for the line that runs, and never for those that wait with it
        assert answered(http, batch) - before <= 2 * asked + 2 < asked * (LANES - 1)

        assert http.post(f"/v1/batches/{batch}/cancel").json()["status"] == "cancelling"
        done = ended(http, batch)
        until(lambda: http.get("/v1/loads").json()["loads"][0]["num_running_reqs"] == 0)
        assert http.get("/v1/loads").json()["loads"][0]["num_waiting_reqs"] == 0
        lines = lines_of(http, done["output_file_id"])

    assert done["status"] == "cancelled"
    assert before <= len(lines) == done["request_counts"]["completed"] < count
