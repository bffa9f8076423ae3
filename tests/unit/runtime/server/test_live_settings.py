"""Settings that change while a server runs, over its routes."""

from __future__ import annotations

import hashlib
import json

import httpx
import pytest

from sylvan.config.fields import replaced
from sylvan.config.live import LiveSettings
from sylvan.config.schema import SERVE
from sylvan.config.tree import Config
from sylvan.config.values import Secret
from sylvan.runtime.server.app import app_of
from sylvan.runtime.server.connections import ConnectionLimits, Connections
from sylvan.runtime.server.context import make_context
from sylvan.runtime.server.live_settings import LIVE
from sylvan.runtime.server.settings import ServerSettings


def key_file(path, **keys):
    entries = [
        {"sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant, **more}
        for key, (tenant, more) in keys.items()
    ]
    path.write_text(json.dumps({"keys": entries}))


class Server:
    """The application of a configuration that can be read again."""

    def __init__(self, engine, tmp_path):
        self.keys = tmp_path / "keys.json"
        key_file(self.keys, old=("acme", {"requests_per_minute": 2}))
        given = {
            "model": str(engine.manager.facts.model_path),
            "server.admin_api_key": Secret("root"),
            "server.api_key_file": str(self.keys),
        }
        self.sources = replaced(Config(), given)
        self.connections = Connections(ConnectionLimits.from_config(self.sources.limits))
        live = LiveSettings(SERVE, self.sources, LIVE, lambda: self.sources, lambda: 0.0)
        settings = ServerSettings.from_config(self.sources)
        context = make_context(engine.manager, settings, live=live, connections=self.connections)
        transport = httpx.ASGITransport(app_of(context), raise_app_exceptions=True)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:30000")

    async def call(self, method, path, body=None, key="root"):
        headers = {"Authorization": f"Bearer {key}"}
        return await self.http.request(method, path, json=body, headers=headers)

    async def status(self, key, path="/v1/models"):
        return (await self.call("GET", path, key=key)).status_code


@pytest.fixture
def server(engine, tmp_path):
    return Server(engine, tmp_path)


async def test_keys_are_read_again_while_the_server_runs(server):
    assert [await server.status(key) for key in ("old", "new")] == [200, 401]
    key_file(server.keys, new=("acme", {}))

    reply = await server.call("POST", "/config/reload")

    assert reply.status_code == 200, reply.text
    assert [await server.status(key) for key in ("old", "new")] == [401, 200]


async def test_what_was_spent_of_a_budget_outlives_a_reload(server):
    async def ask():
        body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
        return (await server.call("POST", "/generate", body, key="old")).status_code

    assert [await ask() for _ in range(3)] == [200, 200, 429]
    await server.call("POST", "/config/reload")
    assert await ask() == 429
    key_file(server.keys, old=("acme", {"requests_per_minute": 3}))
    await server.call("POST", "/config/reload")
    assert await ask() == 200


async def test_a_key_file_that_cannot_be_read_changes_nothing(server):
    server.keys.write_text("{")

    reply = await server.call("PATCH", "/config", {"limits": {"samples": 2}})

    assert reply.status_code == 400
    assert "keys.json cannot be used" in reply.text
    assert await server.status("old") == 200
    told = (await server.call("GET", "/config")).json()
    assert (told["settings"]["limits.samples"], told["journal"]) == (4096, [])


async def test_limits_change_for_requests_and_connections(server):
    body = {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 1}}
    patch = {"limits": {"samples": 1, "connections": 7, "connections_per_address": 5}}

    dry = await server.call("PATCH", "/config?dry_run=true", patch)
    assert dry.json()["dry_run"] is True
    assert (await server.call("POST", "/generate", body)).status_code == 200
    done = await server.call("PATCH", "/config", patch)

    assert done.json()["changes"] == dry.json()["changes"]
    assert (await server.call("POST", "/generate", body)).status_code == 400
    assert (server.connections.limits.total, server.connections.limits.per_address) == (7, 5)
    back = await server.call("POST", "/config/revert", {"to": 0})
    assert back.status_code == 200
    assert (await server.call("POST", "/generate", body)).status_code == 200
    assert server.connections.limits.total > 7


async def test_the_admin_key_itself_can_change_and_is_not_shown(server):
    reply = await server.call("PATCH", "/config", {"server": {"admin_api_key": "other"}})

    assert reply.status_code == 200
    assert "other" not in reply.text
    assert await server.status("root", "/config") == 403
    assert await server.status("other", "/config") == 200


@pytest.mark.parametrize("key", ["old", "nobody"])
async def test_only_the_operator_may(server, key):
    assert (await server.call("PATCH", "/config", {}, key)).status_code == 403


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({}, "nothing to change"),
        ({"scheduler": {"policy": "fcfs"}}, "scheduler.policy: cannot change while"),
        ({"limits": {"samples": "many"}}, "limits.samples: expected"),
        ({"limits": {"sampels": 3}}, "did you mean limits.samples"),
    ],
)
async def test_bad_changes_name_the_setting(server, body, why):
    reply = await server.call("PATCH", "/config", body)

    assert (reply.status_code, why in reply.text) == (400, True), reply.text
