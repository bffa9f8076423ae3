"""Sessions and timeouts on a real server."""

from __future__ import annotations

import httpx
import pytest

from tests.e2e.conftest import running
from tests.support.random_model import write_random_model


@pytest.fixture(scope="module")
def http(server):
    headers = {"authorization": "Bearer secret"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        yield client


def turn(http, name, rid, parent, ids, **fields):
    params = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
    session = {"id": name, "rid": parent, **fields}
    body = {"input_ids": ids, "rid": rid, "session_params": session, "sampling_params": params}
    response = http.post("/generate", json={**body, "return_prompt_token_ids": True})
    assert response.status_code == 200, response.text
    return response.json()


def test_turns_of_a_session_find_all_that_was_computed(http):
    name = http.post("/open_session", json={"capacity_of_str_len": 1000}).json()
    first = turn(http, name, "turn-1", None, list(range(10, 47)))
    second = turn(http, name, "turn-2", "turn-1", [70, 71, 72])
    branch = turn(http, name, "turn-3", "turn-1", [80, 81])
    third = turn(http, name, "turn-4", "turn-2", [])

    history = first["prompt_token_ids"] + first["output_ids"]
    assert second["prompt_token_ids"] == [*history, 70, 71, 72]
    assert branch["prompt_token_ids"] == [*history, 80, 81]
    # the keys and values of the last token that was generated were never computed
    assert second["meta_info"]["cached_tokens"] == len(history) - 1
    assert branch["meta_info"]["cached_tokens"] in (len(history) - 1, len(history))
    whole = second["prompt_token_ids"] + second["output_ids"]
    assert third["prompt_token_ids"] == whole
    assert third["meta_info"]["cached_tokens"] == len(whole) - 1
    assert http.post("/close_session", json={"session_id": name}).status_code == 200
    gone = {"text": "x", "session_params": {"id": name}}
    assert http.post("/generate", json=gone).status_code == 400


def test_request_that_is_not_done_in_time_is_ended(http):
    params = {"max_new_tokens": 400, "ignore_eos": True}
    body = {"text": "Hello", "sampling_params": params, "timeout": 0.001}
    response = http.post("/generate", json=body)

    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert "not done after" in response.text


@pytest.mark.slow
def test_turns_of_a_session_on_two_ranks(tmp_path):
    model = write_random_model(tmp_path)
    flags = "--tp", "2", "--threads", "1", "--max-total-tokens", "4096"
    with (
        running(str(model), *flags) as made,
        httpx.Client(base_url=made.url, timeout=60) as client,
    ):
        test_turns_of_a_session_find_all_that_was_computed(client)
