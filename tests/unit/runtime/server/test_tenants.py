"""Stored objects have an owner; for other callers they do not exist."""

from __future__ import annotations

import asyncio
import itertools
import json
import re

import pytest

from sylvan.config.values import Secret
from sylvan.runtime.server.routes import ENDPOINTS
from tests.support.http import two_tenants

DEADLINE_S = 60
KEYS = ("red", "blue", "plain")
"""Of two tenants, and of a client without a name."""
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
CHAT = [{"role": "user", "content": "x"}]
ASKED = {"custom_id": "a", "params": {"model": "m", "max_tokens": 1, "messages": CHAT}}
BATCH = {"endpoint": "/v1/completions", "completion_window": "24h"}
MESSAGES = "/v1/messages/batches"
ABSENT = {
    "response": "resp_" + "0" * 32,
    "conversation": "conv_" + "0" * 32,
    "item": "msg_" + "0" * 32,
    "file": "file-" + "0" * 24,
    "batch": "batch_" + "0" * 24,
    "message_batch": "msgbatch_" + "0" * 24,
    "session": "0" * 32,
    "rid": "0" * 32,
}
REFERENCES = {
    ("GET", "/v1/responses/{response_id}"): ("response", None),
    ("DELETE", "/v1/responses/{response_id}"): ("response", None),
    ("GET", "/v1/responses/{response_id}/input_items"): ("response", None),
    ("POST", "/v1/responses/{response_id}/cancel"): ("response", None),
    ("GET", "/v1/conversations/{conversation_id}"): ("conversation", None),
    ("POST", "/v1/conversations/{conversation_id}"): ("conversation", {"metadata": {}}),
    ("DELETE", "/v1/conversations/{conversation_id}"): ("conversation", None),
    ("GET", "/v1/conversations/{conversation_id}/items"): ("conversation", None),
    ("POST", "/v1/conversations/{conversation_id}/items"): ("conversation", {"items": CHAT}),
    ("GET", "/v1/conversations/{conversation_id}/items/{item_id}"): ("item", None),
    ("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}"): ("item", None),
    ("GET", "/v1/files/{file_id}"): ("file", None),
    ("DELETE", "/v1/files/{file_id}"): ("file", None),
    ("GET", "/v1/files/{file_id}/content"): ("file", None),
    ("GET", "/v1/batches/{batch_id}"): ("batch", None),
    ("DELETE", "/v1/batches/{batch_id}"): ("batch", None),
    ("POST", "/v1/batches/{batch_id}/cancel"): ("batch", None),
    ("GET", "/v1/messages/batches/{batch_id}"): ("message_batch", None),
    ("DELETE", "/v1/messages/batches/{batch_id}"): ("message_batch", None),
    ("POST", "/v1/messages/batches/{batch_id}/cancel"): ("message_batch", None),
    ("GET", "/v1/messages/batches/{batch_id}/results"): ("message_batch", None),
    ("GET", "/trace/{rid}"): ("rid", None),
    ("POST", "/v1/responses", "previous_response_id"): ("response", {"input": "x"}),
    ("POST", "/v1/responses", "conversation"): ("conversation", {"input": "x"}),
    ("POST", "/v1/responses/input_tokens", "previous_response_id"): ("response", {"input": "x"}),
    ("POST", "/v1/responses/input_tokens", "conversation"): ("conversation", {"input": "x"}),
    ("POST", "/v1/batches", "input_file_id"): ("file", BATCH),
    ("POST", "/close_session", "session_id"): ("session", {}),
    ("POST", "/generate", "session_id"): ("session", {"text": "x"}),
    ("POST", "/generate", "session_params"): ("session", {"text": "x"}),
    ("POST", "/abort_request", "rid"): ("rid", {}),
}
TURN = ("POST", "/generate", "session_params")
SILENT = (  # whatever is named, the answer is the same
    ("POST", "/abort_request", "rid"),
    ("POST", "/close_session", "session_id"),
    ("POST", "/generate", "session_id"),
)
NAMED = re.compile(
    r"(response|(^|_)file|batch|item|conversation|session)_id$|^conversation$|session_p"
)


def test_every_reference_to_something_stored_is_tried():
    ways = {(way[0], way[1]) for way in REFERENCES}
    fields = {(way[1], way[2]) for way in REFERENCES if len(way) == 3}
    made = {("/open_session", "session_id")}  # the client's own name for a new one
    for endpoint in ENDPOINTS:
        if "{" in endpoint.path and not endpoint.path.startswith(("/ui", "/v1/models")):
            for method in endpoint.methods:
                assert (method, endpoint.path) in ways
        if endpoint.body is not None:
            for name, field in endpoint.body.model_fields.items():
                if NAMED.search(field.alias or name):
                    assert (endpoint.path, field.alias or name) in fields | made


class World:
    """A server on which each key has one thing of every kind."""

    def __init__(self, engine, tmp_path):
        self.client = two_tenants(
            engine, tmp_path, api_key=Secret("plain"), admin_api_key=Secret("admin")
        )
        self.things = {}

    async def call(self, key, method, path, body=None, **more):
        headers = {"authorization": f"Bearer {key}"}
        sent = {} if body is None else {"json": body}
        return await self.client.http.request(method, path, headers=headers, **sent, **more)

    async def fill(self, key):
        """Have one thing of every kind."""

        async def made(path, body, **more):
            answer = await self.call(key, "POST", path, body, **more)
            assert answer.status_code == 200, answer.text
            return answer.json()

        content = json.dumps(LINE).encode()
        form = {"file": ("a.jsonl", content), "purpose": (None, "batch")}
        generated = await made("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 1}})
        conversation = await made("/v1/conversations", {"items": CHAT})
        items = await self.call(key, "GET", f"/v1/conversations/{conversation['id']}/items")
        file = await made("/v1/files", None, files=form)
        self.things[key] = {
            "response": (await made("/v1/responses", {"input": "x"}))["id"],
            "conversation": conversation["id"],
            "item": items.json()["data"][0]["id"],
            "file": file["id"],
            "batch": (await made("/v1/batches", {**BATCH, "input_file_id": file["id"]}))["id"],
            "message_batch": await self.answered(key, await made(MESSAGES, {"requests": [ASKED]})),
            "session": await made("/open_session", {"capacity_of_str_len": 100}),
            "rid": generated["meta_info"]["id"],
        }

    async def answered(self, key, batch):
        """The id of a batch of messages, once it has ended."""
        async with asyncio.timeout(DEADLINE_S):
            while batch["processing_status"] != "ended":
                await asyncio.sleep(0.01)
                batch = (await self.call(key, "GET", f"{MESSAGES}/{batch['id']}")).json()
        return batch["id"]

    async def ask(self, key, way, names):
        """The answer to a reference, with distinguishing names replaced."""
        kind, body = REFERENCES[way]
        of_path = {**names, "batch": names[kind]} if way[1].startswith(MESSAGES) else names
        path = re.sub(r"\{(\w+?)(_id)?\}", lambda found: of_path[found[1]], way[1])
        if len(way) == 3:
            value = {"id": names[kind]} if way[2] == "session_params" else names[kind]
            body = {**body, way[2]: value}
        answer = await self.call(key, way[0], path, body)
        if way[1] == "/generate" and answer.status_code == 200:
            return 200, answer.json()["text"]
        return answer.status_code, self.plain(answer.text, names)

    @staticmethod
    def plain(text, names):
        for name in sorted(names.values(), key=len, reverse=True):
            text = text.replace(name, "NAME")
        return re.sub(r"req_\w+|\d{10}(\.\d+)?", "", text)

    async def state(self, key):
        """All that the owner sees of its things."""
        names, found = self.things[key], []
        for way in REFERENCES:
            if way[0] == "GET" and "input_items" not in way[1]:
                found.append(await self.ask(key, way, names))
        return found


@pytest.fixture
async def world(engine, tmp_path):
    made = World(engine, tmp_path)
    for key in KEYS:
        await made.fill(key)
    yield made
    await made.client.http.aclose()


@pytest.mark.parametrize("way", REFERENCES, ids=" ".join)
async def test_what_belongs_to_another_is_not_there(world, way):
    for owner, other in itertools.permutations(KEYS, 2):
        before = await world.state(owner)
        theirs = await world.ask(other, way, world.things[owner])
        nothing = await world.ask(other, way, ABSENT)

        assert theirs == nothing, (owner, other)
        assert await world.state(owner) == before
        if REFERENCES[way][0] == "session":
            turn = await world.ask(owner, TURN, world.things[owner])
            assert turn[0] == 200, turn
    for owner in KEYS:
        if way not in SILENT:
            own = await world.ask(owner, way, world.things[owner])
            assert own != nothing, own
            assert own[0] < 500


async def test_lists_show_what_is_ones_own(world):
    for path, kind in (
        ("/v1/files", "file"),
        ("/v1/batches", "batch"),
        (MESSAGES, "message_batch"),
        ("/requests", "rid"),
    ):
        for key in ("red", "blue"):
            text = (await world.call(key, "GET", path)).text
            for owner in KEYS:
                assert (world.things[owner][kind] in text) == (owner == key), (path, key, owner)


async def test_names_of_one_tenant_are_free_for_another(world):
    """So that names of other tenants can be neither probed nor occupied."""
    for key in ("red", "blue"):
        answer = await world.call(
            key, "POST", "/open_session", {"capacity_of_str_len": 100, "session_id": "mine"}
        )
        assert answer.status_code == 200, answer.text
        again = await world.call(
            key, "POST", "/open_session", {"capacity_of_str_len": 100, "session_id": "mine"}
        )
        assert again.status_code == 400
        response = await world.call(
            key, "POST", "/v1/responses", {"input": key, "request_id": "resp_mine"}
        )
        assert response.status_code == 200, response.text
    for key in ("red", "blue"):
        items = await world.call(key, "GET", "/v1/responses/resp_mine/input_items")
        assert key in items.text
