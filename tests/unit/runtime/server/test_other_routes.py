"""Parsers on their own, scores, cloud platforms, models of another kind."""

from __future__ import annotations

import math

import pytest

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.server.routes import ENDPOINTS
from sylvan.runtime.server.routes.platform_paths import with_other_paths
from sylvan.runtime.server.routes.unsupported import UNSUPPORTED
from tests.support.http import Client


def routes(text):
    """`GET/POST /a /b` in each line."""
    lines = [line.split() for line in text.strip().splitlines()]
    return {(m, path) for methods, *paths in lines for m in methods.split("/") for path in paths}


NEEDED = routes(
    """
    GET /ready /health /health_generate /model_info /get_model_info /server_info /get_server_info
    GET /v1/loads /metrics /v1/models /ping /api/tags /
    HEAD /
    POST/PUT /generate /encode /classify /v1/rerank
    POST /abort_request /parse_function_call /separate_reasoning /pause_generation
    POST /continue_generation /v1/completions /v1/chat/completions /v1/embeddings /v1/classify
    POST /v1/score /v1/tokenize /tokenize /v1/detokenize /detokenize /v1/responses /invocations
    POST /vertex_generate /v1/messages /v1/messages/count_tokens /api/chat /api/generate /api/show
    GET/POST /flush_cache /open_session /close_session /freeze_gc /v1/files /v1/batches
    GET /v1/models/{model:path} /v1/responses/{response_id} /v1/files/{file_id}/content
    POST /v1/responses/{response_id}/cancel /v1/batches/{batch_id}/cancel
    POST /update_weights_from_disk /init_weights_update_group /destroy_weights_update_group
    POST /update_weights_from_distributed /update_weights_from_tensor /update_weights_from_ipc
    POST /begin_weight_update /end_weight_update /update_weight_version
    GET/POST /get_weights_by_name /weights_checker
    GET/POST /release_memory_occupation /resume_memory_occupation
    """
)
CONTRACT = NEEDED | routes(
    """
    POST/PUT /set_internal_state
    POST /init_weights_send_group_for_remote_instance /send_weights_to_remote_instance
    GET /remote_instance_transfer_engine_info /get_remote_instance_transfer_engine_info
    POST /load_lora_adapter /load_lora_adapter_from_tensors /unload_lora_adapter
    GET/POST /start_profile /stop_profile /start_expert_distribution_record
    GET/POST /stop_expert_distribution_record /dump_expert_distribution_record
    GET/POST /set_trace_level /slow_down /configure_logging
    POST /hicache/storage-backend/clear /add_external_corpus /remove_external_corpus
    PUT/DELETE/GET /hicache/storage-backend
    GET /get_hicache_l3_cache_layout /list_external_corpora /is_scaling_elastic_ep /v1/realtime
    POST /pd_role_switch /scale_elastic_ep /v1/decisions /v1/systemone
    """
)
TOOLS = [{"type": "function", "function": {"name": n}} for n in ("f", "g")]


async def test_calls_are_found_in_a_text(client):
    text = 'Hi<tool_call>\n{"name": "g", "arguments": {"a": 1}}\n</tool_call>'
    body = {"text": text, "tools": TOOLS}
    for fields in ({}, {"tool_call_parser": "hermes"}):
        reply = (await client.post("/parse_function_call", {**body, **fields})).json()
        assert reply["normal_text"] == "Hi"
        assert reply["calls"] == [{"tool_index": 1, "name": "g", "parameters": '{"a": 1}'}]


async def test_thinking_is_found_in_a_text(client):
    body = {"text": "<think>a</think>b", "reasoning_parser": "qwen3", "return_blocks": True}
    reply = (await client.post("/separate_reasoning", body)).json()

    assert (reply["reasoning_text"], reply["text"]) == ("a", "b")
    assert reply["blocks"] == [{"type": "reasoning", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("path", "field"),
    [("/parse_function_call", "tool_call_parser"), ("/separate_reasoning", "reasoning_parser")],
)
async def test_unknown_parser_is_refused_with_the_nearest_name(client, path, field):
    response = await client.post(path, {"text": "x", "tools": [], field: "qwenn"})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert "Did you mean" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/parse_function_call", "text", {"text": "x" * 51, "tools": []}),
        ("/separate_reasoning", "text", {"text": "x" * 51}),
        ("/tokenize", "prompt", {"prompt": "x" * 51}),
        ("/v1/tokenize", "prompt", {"prompt": ["x" * 26, "y" * 25]}),
    ],
)
async def test_texts_that_are_only_read_are_bounded(engine, path, field, body):
    client = Client(engine, text_chars=50)
    response = await client.post(path, body)

    assert response.status_code == 413
    assert f"{field}: 51 characters are more than limits.text_chars=50" in response.text


@pytest.mark.parametrize("path", ["/v1/chat/render", "/v1/chat/completions"])
async def test_a_conversation_that_no_context_holds_is_not_rendered(client, monkeypatch, path):
    monkeypatch.setattr(client.context.template, "render", None)
    length = client.engine.manager.facts.context_len
    messages = [{"role": "user", "content": "x" * 256 * length}, {"role": "user", "content": "y"}]
    response = await client.post(path, {"messages": messages})

    assert response.status_code == 400
    assert response.json()["param"] == "messages"
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_scores_are_probabilities_of_labels(client):
    body = {"query": "q", "items": ["a", "b"], "label_token_ids": [5, 7]}
    reply = (await client.post("/v1/score", body)).json()
    assert reply["scores"] == [[pytest.approx(math.exp(-3))] * 2] * 2
    assert reply["object"] == "scoring"

    softmax = (await client.post("/v1/score", {**body, "apply_softmax": True})).json()
    assert softmax["scores"] == [[0.5, 0.5]] * 2
    first = client.engine.control.requests[-2].input_ids.tolist()
    await client.post("/v1/score", {**body, "item_first": True})
    assert client.engine.control.requests[-2].input_ids.tolist() == first[::-1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"label_token_ids": None}, "label_token_ids"),
        ({"label_token_ids": [10**6]}, "label_token_ids"),
        ({"label_token_ids": [[1]]}, "label_token_ids"),
        ({"items": None}, "items"),
        ({"query": [1]}, "items"),
    ],
)
async def test_bad_scores_are_refused(client, fields, param):
    body = {"query": "q", "items": ["a", "b"], "label_token_ids": [5, 7], **fields}
    response = await client.post("/v1/score", body)

    assert (response.status_code, response.json()["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/classify", {"input": ["x"]}),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}),
        ("/encode", {"text": "x"}),
        ("/classify", {"text": "x"}),
    ],
)
async def test_vectors_of_a_generating_model_are_refused(client, path, body):
    response = await client.post(path, body)

    assert response.status_code == 400
    assert "generates text" in response.text


@pytest.mark.parametrize("endpoint", UNSUPPORTED, ids=lambda e: e.path)
async def test_what_is_not_there_says_what_is_missing(client, endpoint):
    for method in endpoint.methods:
        response = await client.http.request(method, endpoint.path)

        assert response.status_code == 501
        reply = response.json()
        assert reply["success"] is False
        assert reply["message"] == reply["error"]["message"] == endpoint.missing_feature
        assert endpoint.missing_feature.endswith(".")


async def test_platforms_choose_paths_by_variables(engine, monkeypatch):
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/v9/predict")
    monkeypatch.setenv("SGLANG_OLLAMA_CHAT_ROUTE", "/ollama/chat")
    client = Client(engine)

    for path in ("/v9/predict", "/vertex_generate"):
        reply = (await client.post(path, {"instances": [{"text": "ab"}]})).json()
        assert reply["predictions"][0]["text"] == "ab"
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": False}
    assert (await client.post("/ollama/chat", body)).json()["done"]
    assert "/v9/predict" in (await client.get("/openapi.json")).json()["paths"]


@pytest.mark.parametrize("path", ["predict", "/v1/models", "/a/{b}"])
def test_paths_that_cannot_be_chosen_are_refused(path):
    with pytest.raises(ConfigError, match="AIP_PREDICT_ROUTE"):
        with_other_paths(ENDPOINTS, {"AIP_PREDICT_ROUTE": path}.get)


def test_every_route_of_the_contract_is_there():
    here = {(method, e.path) for e in ENDPOINTS for method in e.methods}

    assert CONTRACT - here == set()
    working = {(method, e.path) for e in ENDPOINTS if not e.missing_feature for method in e.methods}
    assert NEEDED - working == set()


async def test_cloud_platforms_have_their_routes(client):
    assert (await client.get("/ping")).status_code == 200
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    assert (await client.post("/invocations", chat)).json()["object"] == "chat.completion"
    body = {
        "instances": [{"text": "ab"}, {"text": "cd"}],
        "parameters": {"sampling_params": {"max_new_tokens": 2}},
    }
    reply = (await client.post("/vertex_generate", body)).json()
    assert [p["text"] for p in reply["predictions"]] == ["ab", "cd"]
    bad = await client.post("/vertex_generate", {"instances": [{"text": "a"}, {}]})
    assert bad.status_code == 400
