"""Every field of every route with every kind of bad value: never a 5xx, never a request left."""

from __future__ import annotations

import json

import pytest

from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.server.routes import ENDPOINTS
from tests.support.http import checkpoint, client, engine

__all__ = ["checkpoint", "client", "engine"]

CHAT = [{"role": "user", "content": "x"}]
GOOD = {
    "/generate": {"text": "x"},
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 3},
    "/v1/chat/render": {"messages": CHAT},
    "/v1/responses": {"input": "x", "store": False},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/conversations": {"items": CHAT},
    "/v1/conversations/{conversation_id}": {"metadata": {}},
    "/v1/conversations/{conversation_id}/items": {"items": CHAT},
    "/v1/messages": {"model": "m", "max_tokens": 3, "messages": CHAT},
    "/v1/messages/count_tokens": {"model": "m", "messages": CHAT},
    "/v1/messages/batches": {
        "requests": [
            {"custom_id": "a", "params": {"model": "m", "max_tokens": 3, "messages": CHAT}}
        ]
    },
    "/api/chat": {"model": "m", "messages": CHAT, "stream": False},
    "/api/generate": {"model": "m", "prompt": "x", "stream": False},
    "/api/embed": {"model": "m", "input": "x"},
    "/api/embeddings": {"model": "m", "prompt": "x"},
    "/api/show": {"model": "scripted"},
    "/api/pull": {"model": "scripted", "stream": False},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/v1/score": {"query": "q", "items": ["a"], "label_token_ids": [1]},
    "/parse_function_call": {"text": "x", "tools": []},
    "/separate_reasoning": {"text": "x"},
    "/vertex_generate": {"instances": [{"text": "x"}]},
    "/abort_request": {"rid": "x"},
    "/pause_generation": {},
    "/continue_generation": {},
    "/open_session": {"capacity_of_str_len": 10},
    "/close_session": {"session_id": "x"},
    "/v1/embeddings": {"input": "x"},
    "/v1/rerank": {"query": "q", "documents": ["d"]},
    "/v2/rerank": {"query": "q", "documents": ["d"]},
    "/rerank": {"query": "q", "texts": ["d"]},
    "/v1/classify": {"input": "x"},
    "/encode": {"text": "x"},
    "/v1/batches": {
        "input_file_id": "f",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    },
}
GOOD |= {
    "/update_weights_from_disk": {"model_path": "/nowhere"},
    "/update_weights_from_tensor": {"serialized_named_tensors": [""]},
    "/update_weights_from_distributed": {"names": [], "dtypes": [], "shapes": []},
    "/update_weights_from_ipc": {"zmq_handles": {}},
    "/init_weights_update_group": {
        "master_address": "x", "master_port": 1, "rank_offset": 1, "world_size": 2,
    },
    "/destroy_weights_update_group": {},
    "/update_weight_version": {"new_version": "x"},
    "/begin_weight_update": {},
    "/end_weight_update": {},
    "/release_memory_occupation": {},
    "/resume_memory_occupation": {},
    "/add_external_corpus": {"documents": ["x"]},
    "/remove_external_corpus": {"corpus_id": "x"},
    "/configure_logging": {},
    "/pd_role_switch": {"new_role": "prefill"},
}  # fmt: skip
# NaN and infinities are no JSON; they are put in as text.
RAW = ["NaN", "Infinity", "-Infinity", "1e999", "9" * 30]
VALUES = [
    -1,
    0,
    1,
    2**31 - 1,
    2**31,
    2**63 - 1,
    2**63,
    10**9,
    -0.5,
    1e308,
    "",
    "x",
    "\u0000\ud7ff\uffff",
    None,
    True,
    [],
    {},
    [None],
    [-1],
    [[]],
    [[-1]],
    [{}],
    ["x", 1],
    {"x": "y"},
    {"type": "x"},
    {"type": "function", "function": {"name": 5}},
]


def test_every_route_with_a_body_is_tried():
    shared = {"/v1/tokenize", "/v1/detokenize", "/classify", "/invocations"}
    shared |= {"/weights_checker", "/get_weights_by_name"}  # the scripted engine has no weights
    # it has neither adapters nor a store of KV
    shared |= {f"{v}/{do}load_lora_adapter" for v in ("", "/v1") for do in ("", "un")}
    shared |= {"/load_lora_adapter_from_tensors", "/hicache/storage-backend"}
    shared |= {"/start_profile"}  # it writes files to any given path
    shared |= {"/config", "/config/revert"}  # settings change in servers of `sylvan serve` only
    paths = {e.path for e in ENDPOINTS if e.body is not None}
    assert paths - shared == set(GOOD)


def fields_of(path):
    model = next(e.body for e in ENDPOINTS if e.path == path and e.body is not None)
    return [field.alias or name for name, field in model.model_fields.items()]


async def try_(client, path, content):
    response = await client.http.post(
        path, content=content, headers={"content-type": "application/json"}
    )
    assert response.status_code in (200, 400, 404), (content[:300], response.text)
    if response.status_code != 200:
        assert response.json()["error"]


@pytest.mark.parametrize("path", GOOD)
async def test_no_value_of_any_field_is_a_server_error(client, path):
    for field in fields_of(path):
        for value in VALUES:
            if field == "stream" and value is True:
                continue
            await try_(client, path, json.dumps({**GOOD[path], field: value}))
        for text in RAW:
            body = json.dumps({**GOOD[path], field: "@"}).replace('"@"', text)
            await try_(client, path, body)

    assert client.engine.manager.num_live == 0
    response = await client.post(path, GOOD[path])
    assert response.status_code in (200, 400)


@pytest.mark.parametrize("path", ["/generate", "/api/chat"])
async def test_no_value_of_any_sampling_parameter_is_a_server_error(client, path):
    where = "sampling_params" if path == "/generate" else "options"
    for field in (*SamplingParams.__struct_fields__, "seed", "num_predict", "beam_width"):
        for value in VALUES:
            await try_(client, path, json.dumps({**GOOD[path], where: {field: value}}))

    assert client.engine.manager.num_live == 0


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool", "developer"])
async def test_no_message_is_a_server_error(client, role):
    for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/tokenize"):
        for field in ("content", "name", "tool_calls", "tool_call_id", "reasoning_content", "role"):
            for value in VALUES:
                message = {"role": role, "content": "x", field: value}
                await try_(client, path, json.dumps({**GOOD[path], "messages": [message]}))
