"""Several processes of one gateway: what one of them learns the others know."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import psutil
import pytest

from sylvan.gateway.build import Clocks, PeerIdentity
from sylvan.gateway.peers.sharing import SILENT_S
from sylvan.utils.clock import VirtualClock
from tests.support.cluster import Elsewhere, gateway, scripted, until
from tests.support.scripted import write_checkpoint

SYSTEM = "You are a helpful assistant who answers at length. " * 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="module")
def all_workers(checkpoint):
    elsewhere = Elsewhere()
    yield [elsewhere.enter(scripted(checkpoint)) for _ in range(3)]
    elsewhere.close()


@pytest.fixture
def workers(all_workers):
    for worker in all_workers:
        worker.reset()
    return all_workers


@asynccontextmanager
async def two(folder, *urls, **changes):
    """Two processes of a gateway, in one."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                gateway(*urls, peers=PeerIdentity(folder, number, 2), **changes)
            )
            for number in range(2)
        ]


def worker(front, url):
    return front.runtime.registry.by_url(url)


async def test_prompts_go_where_another_process_sent_their_start(workers, tmp_path):
    async with two(tmp_path, *(w.url for w in workers)) as (a, b):
        for turn in range(6):
            front = (a, b)[turn % 2]
            await front.post("/generate", {"text": f"{SYSTEM}{turn}"})
            await until(lambda: trees(a) == trees(b) and idle(a) and idle(b))

    assert sorted(len(w.engine.control.requests) for w in workers) == [0, 0, 6]


def trees(front):
    policies = front.runtime._placing.policies
    return [policy.tree.num_nodes for policy in policies]


def idle(front):
    return not any(w.load or w.waiting_tokens for w in front.runtime.registry.workers)


async def test_loads_of_all_processes_count(workers, tmp_path):
    busy, *free = (w.url for w in workers)
    workers[0].engine.control.hold = True
    async with two(tmp_path, *(w.url for w in workers)) as (a, b):
        held = [
            asyncio.create_task(
                a.post("/generate", {"text": "x"}, headers={"x-smg-target-worker": busy})
            )
            for _ in range(3)
        ]
        await until(lambda: worker(b, busy).load == 3)
        assert worker(b, busy).num_running == 0
        for _ in range(4):
            await b.post("/generate", {"text": "x"})
        rows = {r["worker"]: r["own_load"] for r in (await b.get("/get_loads")).json()["workers"]}
        assert rows == {busy: 3, **dict.fromkeys(free, 0)}
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        await until(lambda: worker(b, busy).load == 0)

    assert len(workers[0].engine.control.requests) == 3


async def test_a_process_that_is_gone_has_no_load(workers, tmp_path):
    url = workers[0].url
    workers[0].engine.control.hold = True
    clock = VirtualClock()
    async with gateway(
        url, peers=PeerIdentity(tmp_path, 1, 2), clocks=Clocks(monotonic=clock)
    ) as b:
        async with gateway(url, peers=PeerIdentity(tmp_path, 0, 2)) as a:
            held = asyncio.create_task(a.post("/generate", {"text": "x"}))
            await until(lambda: worker(b, url).load == 1)
            a.runtime._stack.push_async_callback(ended, held)
            worker(a, url).on_load.clear()  # it is killed: no listener is called
        assert worker(b, url).load == 1
        clock.advance(SILENT_S + 1)
        await until(lambda: worker(b, url).load == 0)


async def ended(task):
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_workers_are_added_changed_and_removed_in_all_processes(workers, tmp_path):
    first, second, _ = (w.url for w in workers)
    async with two(tmp_path, first) as (a, b):
        added = (await a.post("/workers", {"url": second})).json()["worker_id"]
        await until(lambda: worker(b, second) is not None)
        assert worker(b, second).id == added  # any process knows it by that name

        assert (await b.http.put(f"/workers/{added}", json={"priority": 90})).status_code == 202
        await until(lambda: worker(a, second).spec.priority == 90)

        assert (await b.http.delete(f"/workers/{worker(b, first).id}")).status_code == 202
        await until(lambda: worker(a, first) is None and worker(b, first) is None)
        assert (await a.post("/generate", {"text": "x"})).status_code == 200
        assert (await b.post("/workers", {"url": first})).status_code == 202
        await until(lambda: worker(a, first) is not None)


async def test_a_process_that_starts_later_knows_the_workers(workers, tmp_path):
    first, second, _ = (w.url for w in workers)
    async with gateway(first, peers=PeerIdentity(tmp_path, 0, 2)) as a:
        await a.post("/workers", {"url": second})
        await a.settled(2)
        async with gateway(wait=0, peers=PeerIdentity(tmp_path, 1, 2)) as b:
            await until(lambda: worker(b, second) is not None)
            assert worker(b, first) is None  # that was given at the start, to each


async def test_keys_stick_to_one_worker_in_all_processes(workers, tmp_path):
    changes = {"routing__policy": "manual"}
    async with two(tmp_path, *(w.url for w in workers), **changes) as (a, b):
        for number in range(4):
            headers = {"x-smg-routing-key": f"user-{number}"}
            await a.post("/generate", {"text": "x"}, headers=headers)
            await until(lambda number=number: keys(b) == number + 1)
            await b.post("/generate", {"text": "x"}, headers=headers)
        hits = [b.metric("smg_manual_policy_branch_total", branch=name) for name in BRANCHES]
    assert hits == [4, 0]


BRANCHES = ("sticky", "new")


def keys(front):
    return front.metric("smg_manual_policy_cache_entries")


async def test_budgets_are_for_all_processes_together(workers, tmp_path):
    entry = {
        "sha256": hashlib.sha256(b"k").hexdigest(),
        "tenant": "acme",
        "requests_per_minute": 3,
    }
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [entry]}))
    headers = {"authorization": "Bearer k"}
    changes = {"server__api_key_file": str(file)}
    folder = tmp_path / "peers"
    folder.mkdir()
    async with two(folder, workers[0].url, **changes) as (a, b):
        for _ in range(3):
            reply = await a.post("/generate", {"text": "x"}, headers=headers)
            assert reply.status_code == 200
        async with asyncio.timeout(20):
            while (await b.post("/generate", {"text": "x"}, headers=headers)).status_code == 200:
                await asyncio.sleep(0.01)
        reply = await b.post("/generate", {"text": "x"}, headers=headers)
    assert reply.status_code == 429
    assert len(workers[0].engine.control.requests) <= 4


async def test_streams_are_not_kept_for_clients_that_come_back(workers, tmp_path):
    async with two(tmp_path, workers[0].url) as (a, _):
        body = {"text": "x", "stream": True}
        reply = await a.post("/generate", body, headers={"x-sylvan-event-ids": "1"})
    assert reply.status_code == 200
    assert "\nid:" not in reply.text


CODE = "import sys; from sylvan.cli import main; sys.exit(main())"


@pytest.mark.slow
def test_processes_share_a_port_and_outlive_each_other(workers):
    words = [sys.executable, "-c", CODE, "route", "--processes", "2", "--port", "0", "--until-eof"]
    words += ["--observe.metrics-port", "none", "--worker-urls", workers[0].url]
    words += ["--api-key", "sesame"]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        url = process.stdout.readline().split(" at ")[1].split()[0]
        children = psutil.Process(process.pid).children()
        assert len(children) == 2
        assert statuses(url) == {200}

        children[0].send_signal(signal.SIGKILL)
        children[0].wait(20)
        assert statuses(url) == {200}
        restarted = wait_for_children(process.pid, 2)
        assert children[0].pid not in {child.pid for child in restarted}
        assert statuses(url) == {200}

        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert all(not child.is_running() for child in restarted)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()


def statuses(url):
    """Of requests on connections of their own, which are spread over the processes.

    A process that has just started asks its workers first, and a connection that had lined up at
    one that was killed is lost: both are tried again.
    """
    found = set()
    for _ in range(12):
        for _ in range(200):
            try:
                with httpx.Client() as http:
                    headers = {"authorization": "Bearer sesame"}
                    reply = http.post(f"{url}/generate", json={"text": "x"}, headers=headers)
            except httpx.TransportError:
                continue
            if reply.status_code != 503:
                break
            time.sleep(0.02)
        found.add(reply.status_code)
    return found


def wait_for_children(pid, count):
    for _ in range(600):
        found = [c for c in psutil.Process(pid).children() if c.status() != psutil.STATUS_ZOMBIE]
        if len(found) == count:
            return found
        time.sleep(0.05)
    raise AssertionError("no process was started again")
