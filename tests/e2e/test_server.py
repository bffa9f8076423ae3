"""A real server, by plain HTTP."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest


@pytest.fixture(scope="module")
def http(server):
    headers = {"authorization": "Bearer secret"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        yield client


@pytest.mark.parametrize("path", ["/live", "/ready", "/health", "/health_generate", "/ping"])
def test_server_is_healthy(http, path):
    assert http.get(path).status_code == 200


def test_stream_adds_up_to_the_whole_answer(http):
    params = {"max_new_tokens": 20, "temperature": 0}
    body = {"text": "Hello", "sampling_params": params}
    whole = http.post("/generate", json=body).json()
    streamed = http.post("/generate", json={**body, "stream": True}).text
    last = json.loads(streamed.split("\n\n")[-3].removeprefix("data: "))

    assert last["text"] == whole["text"]
    assert last["output_ids"] == whole["output_ids"]


def test_batch_equals_its_items_alone(http):
    params = {"max_new_tokens": 10, "temperature": 0}
    texts = ["Hello", "What is 1 + 1?", "A"]
    alone = [
        http.post("/generate", json={"text": t, "sampling_params": params}).json()["output_ids"]
        for t in texts
    ]
    batch = http.post("/generate", json={"text": texts, "sampling_params": params}).json()

    assert [reply["output_ids"] for reply in batch] == alone


def test_prompt_and_output_logprobs_agree(http):
    params = {"max_new_tokens": 6, "temperature": 0}
    body = {"text": "Hello", "sampling_params": params, "return_logprob": True}
    first = http.post("/generate", json={**body, "logprob_start_len": 0}).json()
    ids = [entry[1] for entry in first["meta_info"]["input_token_logprobs"]]
    again = {
        "input_ids": ids + first["output_ids"],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    second = http.post("/generate", json=again).json()["meta_info"]["input_token_logprobs"]

    generated = [lp for lp, *_ in first["meta_info"]["output_token_logprobs"]]
    assert [lp for lp, *_ in second[len(ids) :]] == pytest.approx(generated, abs=1e-4)


def test_anthropic_and_ollama_routes_answer(http):
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": "m", "max_tokens": 4, "messages": messages}
    assert http.post("/v1/messages", json=body).json()["stop_reason"] in ("max_tokens", "end_turn")
    body = {"model": "m", "messages": messages, "options": {"num_predict": 4}}
    lines = [json.loads(x) for x in http.post("/api/chat", json=body).text.splitlines()]
    assert lines[-1]["done"] is True


def test_scores_are_probabilities(http):
    body = {"query": "Hel", "items": ["lo", "p"], "label_token_ids": list(range(64))}
    reply = http.post("/v1/score", json={**body, "apply_softmax": True}).json()
    assert [sum(row) for row in reply["scores"]] == pytest.approx([1.0, 1.0], abs=1e-3)


def test_bad_requests_do_not_disturb_others(http):
    def bad(i):
        bodies = [
            {"text": "x", "sampling_params": {"n": 5_000_000}},
            {"input_ids": [10**9]},
            {"text": "x", "return_logprob": True, "top_logprobs_num": 10**6},
            {"text": "x", "sampling_params": {"logit_bias": {"999999": 5}}},
            {"text": "x" * 100_000},
        ]
        return http.post("/generate", json=bodies[i % 5]).status_code

    good = {"text": "Hello", "sampling_params": {"max_new_tokens": 30, "temperature": 0}}
    before = http.post("/generate", json=good).json()["output_ids"]
    with ThreadPoolExecutor(8) as pool:
        wanted = pool.submit(lambda: http.post("/generate", json=good).json()["output_ids"])
        statuses = set(pool.map(bad, range(40)))
        assert wanted.result() == before
    assert statuses == {400}


def test_nothing_runs_afterwards(http):
    body = {"text": "Hello", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    assert http.post("/generate", json=body).status_code == 200
    assert http.post("/flush_cache?timeout=10").status_code == 200
    info = http.get("/server_info").json()
    assert "secret" not in json.dumps(info)
    state = info["internal_states"][0]
    assert info["deterministic"] is info["effective_runner"].startswith("program")
    assert state["config"]["deterministic"] is info["deterministic"]
    assert state["num_running_reqs"] == 0
    assert 1e-4 < state["memory_usage"]["weight"] < 1e-2  # GB of a tiny model
    assert state["memory_usage"]["kvcache"] > 0
    assert state["memory_usage"]["token_capacity"] == state["max_total_num_tokens"]
    assert state["last_gen_throughput"] > 0


def test_paused_server_is_not_ready(http):
    def statuses():
        return [http.get(path).status_code for path in ("/live", "/ready", "/health")]

    params = {"max_new_tokens": 2000, "ignore_eos": True}
    body = {"text": "Hello", "stream": True, "sampling_params": params}
    with http.stream("POST", "/generate", json=body) as stream:
        events = stream.iter_lines()
        next(events)
        try:  # both while the same request is under way, which takes a fraction of a second
            for mode, queues in (
                ("in_place", {"waiting": 0, "grammar": 0, "paused": 1}),
                ("retract", {"waiting": 1, "grammar": 0, "paused": 0}),
            ):
                assert http.post("/pause_generation", json={"mode": mode}).status_code == 200
                assert statuses() == [200, 503, 503]
                assert http.get("/health_generate").status_code == 503
                assert http.get("/v1/loads").json()["loads"][0]["queues"] == queues
        finally:
            assert http.post("/continue_generation").status_code == 200
        assert statuses() == [200, 200, 200]
        assert any("[DONE]" in line for line in events)


def test_server_info_says_where_it_listens_and_what_it_holds(http, server):
    info = http.get("/server_info").json()

    assert info["port"] == int(server.url.rpartition(":")[2])
    assert info["max_req_input_len"] == info["context_length"] - 1 == 2047
    assert info["max_total_num_tokens"] == info["internal_states"][0]["max_total_num_tokens"]
    assert info["page_size"] == info["cache"]["page_size"]
    assert info["max_running_requests"] == info["scheduler"]["max_running_reqs"]
    assert http.get("/model_info").json()["load_format"] == info["load_format"]


def test_cache_is_explained(http):
    prompt = "the quick brown fox jumps over the lazy dog"
    for rid in ("first-look", "second-look"):
        body = {"text": prompt, "rid": rid, "sampling_params": {"max_new_tokens": 4}}
        assert http.post("/generate", json=body).status_code == 200

    told = http.get("/cache/explain", params={"rid": "second-look"}).json()
    assert told["reason"] == "all_cached"
    assert told["cached_tokens"] == told["prompt_tokens"] - 1
    tree = http.get("/cache/tree", params={"max_nodes": 5}).json()
    assert 1 <= len(tree["nodes"]) <= 5
    assert any(prompt[:9] in node["text"] for node in tree["nodes"])
    curve = http.get("/cache/curve", params={"points": 4}).json()["curve"]
    assert [p["hit_rate"] for p in curve] == sorted(p["hit_rate"] for p in curve)
    assert http.get("/cache/explain", params={"rid": "nobody"}).status_code == 404
    assert http.get("/cache/tree", params={"max_nodes": 0}).status_code == 400
