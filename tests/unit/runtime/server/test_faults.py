"""Faults that a server inflicts on itself."""

from __future__ import annotations

import asyncio
import json

import pytest

from sylvan.config.chaos import Faults
from sylvan.runtime.server.faults import JUMP_PERIOD_S, JumpingClock
from sylvan.utils.clock import VirtualClock
from tests.support.http import Client

DEADLINE_S = 120
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def upload(client, content=b"x" * 100_000):
    files = {"file": ("a.jsonl", content), "purpose": (None, "batch")}
    return client.http.post("/v1/files", files=files)


@pytest.mark.parametrize("durable", [True, False])
async def test_a_full_disk_refuses_what_grows_and_tears_nothing(engine, tmp_path, durable):
    """It is SQLite that finds no room: the same error as on a disk that is full."""
    folder = str(tmp_path) if durable else None
    client = Client(engine, data_dir=folder, faults=Faults(disk_full=0.5, seed=1))

    answers = [await upload(client) for _ in range(40)]

    assert {answer.status_code for answer in answers} == {200, 507}
    kept = {a.json()["id"] for a in answers if a.status_code == 200}
    listed = (await client.get("/v1/files?limit=100")).json()["data"]
    assert {file["id"] for file in listed} == kept
    for name in kept:
        content = await client.get(f"/v1/files/{name}/content")
        assert content.content == b"x" * 100_000


async def test_batches_end_on_a_disk_that_is_often_full(engine, tmp_path):
    client = Client(engine, data_dir=str(tmp_path), faults=Faults(disk_full=0.3, seed=3))
    content = "\n".join(json.dumps({**LINE, "custom_id": str(i)}) for i in range(5)).encode()
    file = await upload(client, content)
    while file.status_code == 507:
        file = await upload(client, content)
    body = {
        "input_file_id": file.json()["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    batch = await client.post("/v1/batches", body)
    while batch.status_code == 507:
        batch = await client.post("/v1/batches", body)
    assert batch.status_code == 200, batch.text

    async with asyncio.timeout(DEADLINE_S):
        while (state := batch.json())["status"] in ("in_progress", "finalizing"):
            await asyncio.sleep(0.05)
            batch = await client.get(f"/v1/batches/{state['id']}")
    assert state["status"] == "completed"
    assert state["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
    output = await client.get(f"/v1/files/{state['output_file_id']}/content")
    assert len(output.text.splitlines()) == 5


def test_the_time_of_day_jumps_within_its_bounds():
    clock = VirtualClock()
    wall = JumpingClock(Faults(clock_jump_s=3600), lambda: 1_000_000.0, clock)
    seen = set()
    for _ in range(50):
        seen.add(wall())
        clock.advance(JUMP_PERIOD_S)

    assert len(seen) == 50
    assert all(abs(time - 1_000_000.0) <= 3600 for time in seen)
    assert min(seen) < 1_000_000.0 < max(seen)
