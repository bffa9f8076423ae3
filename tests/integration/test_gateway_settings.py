"""Settings of a gateway that operators change while it runs."""

from __future__ import annotations

import asyncio

import pytest

from sylvan.config.fields import replaced
from sylvan.config.values import Secret
from tests.support.cluster import QUICK, gateway, scripted, until
from tests.support.scripted import write_checkpoint

KEYS = {
    "server.api_key": Secret("client"),
    "control.api_keys": (Secret("1:ops:admin:operator"),),
}
BASE = replaced(QUICK, KEYS)
OPS = {"Authorization": "Bearer operator"}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("scripted"))


def client(key="client"):
    return {"Authorization": f"Bearer {key}"}


async def test_limits_and_keys_change_and_go_back(checkpoint):
    async with (
        scripted(checkpoint) as worker,
        gateway(worker.url, base=BASE, sources=lambda: BASE) as front,
    ):
        worker.engine.control.hold = True

        async def send():
            return await front.post("/generate", {"text": "x"}, headers=client())

        first = asyncio.create_task(send())
        await until(lambda: worker.engine.control.requests)
        patch = {"limits": {"max_concurrent": 1, "queue_size": 0}}
        url = "/config?dry_run=true"
        dry = await front.http.patch(url, json=patch, headers=OPS)
        assert (dry.status_code, dry.json()["dry_run"]) == (200, True), dry.text
        done = await front.http.patch("/config", json=patch, headers=OPS)
        assert done.json()["changes"] == dry.json()["changes"]
        assert (await send()).status_code == 429

        keys = {"server": {"api_key": "other"}}
        changed = await front.http.patch("/config", json=keys, headers=OPS)
        assert changed.status_code == 200
        assert "other" not in changed.text
        assert (await send()).status_code == 401
        back = await front.post("/config/revert", {"to": 0}, headers=OPS)
        assert back.status_code == 200, back.text
        worker.engine.control.hold = False
        first.cancel()
        assert (await send()).status_code == 200
        told = (await front.get("/config", headers=OPS)).json()
        assert [entry["number"] for entry in told["journal"]] == [1, 2, 3]
        assert told["settings"]["control.api_keys"] == "***"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({}, "nothing to change"),
        ({"routing": {"cache_events": True}}, "routing.cache_events: cannot change while"),
        ({"routing": {"policy": "randon"}}, "randon"),
        ({"routing": {"load_factor": 0.5}}, "routing.load_factor: expected"),
        ({"limits": {"queue_size": -1}}, "limits.queue_size: expected"),
        ({"control": {"api_keys": ["x"]}}, "expected id:name:role:KEY"),
    ],
)
async def test_bad_changes_name_the_setting_and_change_nothing(body, why):
    async with gateway(base=BASE, sources=lambda: BASE) as front:
        reply = await front.http.patch("/config", json=body, headers=OPS)

        assert (reply.status_code, why in reply.text) == (400, True), reply.text
        assert (await front.get("/config", headers=OPS)).json()["journal"] == []


async def test_sources_are_read_again_by_operators_only():
    wanted = replaced(BASE, {"limits.queue_size": 7, "routing.cache_events": True})
    async with gateway(base=BASE, sources=lambda: wanted) as front:
        refused = await front.post("/config/reload", {}, headers=client())
        assert refused.status_code in (401, 403)
        reply = await front.post("/config/reload", {}, headers=OPS)

        assert reply.json()["restart"] == ["routing.cache_events"]
        assert reply.json()["changes"] == [{"path": "limits.queue_size", "old": 100, "new": 7}]


async def test_the_routing_policy_changes_for_later_requests(checkpoint):
    base = replaced(BASE, {"routing.policy": "consistent_hashing"})
    async with (
        scripted(checkpoint) as one,
        scripted(checkpoint) as two,
        gateway(one.url, two.url, base=base, sources=lambda: base) as front,
    ):

        async def spread() -> int:
            """How many workers serve requests of one routing key."""
            for worker in (one, two):
                worker.calls.clear()
            headers = client() | {"X-SMG-Routing-Key": "same"}
            for _ in range(6):
                reply = await front.post("/generate", {"text": "x"}, headers=headers)
                assert reply.status_code == 200, reply.text
            return sum(bool(worker.paths("/generate")) for worker in (one, two))

        assert await spread() == 1
        patch = {"routing": {"policy": "round-robin"}}
        for dry_run, want in (("?dry_run=true", 1), ("", 2)):
            reply = await front.http.patch(f"/config{dry_run}", json=patch, headers=OPS)
            assert reply.json()["changes"] == [
                {"path": "routing.policy", "old": "consistent_hashing", "new": "round_robin"}
            ], reply.text
            assert await spread() == want

        assert (await front.post("/config/revert", {"to": 0}, headers=OPS)).status_code == 200
        assert await spread() == 1
