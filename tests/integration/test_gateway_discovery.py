"""Workers that come and go by a list, under requests."""

from __future__ import annotations

import json

import pytest

from tests.support.cluster import gateway, scripted, until
from tests.support.scripted import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("scripted"))


def settings(file):
    return {"discovery__file": str(file), "discovery__interval_s": 0.02}


def urls(front):
    return {worker.url for worker in front.runtime.registry.workers}


def listed(file, *rows):
    new = file.with_suffix(".new")
    new.write_text(json.dumps(rows))
    new.replace(file)


async def test_workers_follow_the_file(checkpoint, tmp_path):
    file = tmp_path / "workers.json"
    async with (
        scripted(checkpoint) as a,
        scripted(checkpoint) as b,
        scripted(checkpoint) as fixed,
        gateway(fixed.url, **settings(file)) as front,
    ):
        listed(file, a.url, {"url": b.url, "priority": 50})
        await until(lambda: urls(front) == {a.url, b.url, fixed.url})
        assert front.metric("smg_discovery_workers_discovered", source="file") == 2

        file.write_text("garbage")  # a half-written file takes nobody away
        await until(
            lambda: front.metric("smg_discovery_sync_duration_seconds_count", source="file") > 5
        )
        assert urls(front) == {a.url, b.url, fixed.url}

        listed(file, {"url": b.url, "priority": 90})
        await until(lambda: urls(front) == {b.url, fixed.url})
        await until(lambda: front.runtime.registry.by_url(b.url).spec.priority == 90)
        reply = await front.post("/v1/completions", {"model": "scripted", "prompt": "x"})
        assert reply.status_code == 200
        assert len(b.engine.control.requests) == 1  # the higher priority

        listed(file)
        await until(lambda: urls(front) == {fixed.url})


async def test_what_is_on_the_list_and_was_given_is_added_once(checkpoint, tmp_path):
    file = tmp_path / "workers.json"
    async with scripted(checkpoint) as a, gateway(a.url, **settings(file)) as front:
        listed(file, a.url)
        await until(
            lambda: (
                front.metric("smg_discovery_registrations_total", source="file", result="duplicate")
                > 0
            )
        )
        listed(file)
        await until(lambda: front.metric("smg_discovery_workers_discovered", source="file") == 0)
        assert urls(front) == {a.url}


async def test_a_worker_that_has_not_come_yet_and_goes_is_not_waited_for(checkpoint, tmp_path):
    file = tmp_path / "workers.json"
    async with scripted(checkpoint) as a, gateway(a.url, **settings(file)) as front:
        listed(file, "http://127.0.0.1:9")
        await until(lambda: len(front.runtime.jobs.open) == 1)
        listed(file)
        await until(lambda: front.runtime.jobs.open == [])
        assert urls(front) == {a.url}


async def test_names_are_resolved(checkpoint):
    async with scripted(checkpoint) as a:
        port = a.url.rpartition(":")[2]
        changes = {"discovery__dns": f"localhost:{port}", "discovery__interval_s": 0.02}
        async with gateway(wait=0, **changes) as front:
            await until(lambda: f"http://127.0.0.1:{port}" in urls(front))
