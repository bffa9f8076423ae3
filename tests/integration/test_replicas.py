"""Two real replicas behind one router: spread, abort, steer, lose, and give up."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from sylvan.protocol.messages import CachePrompts, CacheRequest, CacheTree, FlushCache, GetState
from sylvan.runtime.engine.restart import RestartPolicy
from sylvan.runtime.engine.roles import ROLES, Topology
from sylvan.runtime.engine.runtime import Runtime
from sylvan.runtime.server.app import create_app
from sylvan.runtime.server.settings import ServerSettings
from tests.support.streams import Streams, until
from tests.support.tiny import ENDLESS, tiny_config, write_model

DEADLINE_S = 60
pytestmark = pytest.mark.asyncio(loop_scope="module")
TWO = Topology(num_replicas=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["one", "many"])
async def runtime(model: Path, request: pytest.FixtureRequest) -> AsyncIterator[Runtime]:
    """Two schedulers, in threads of this process or in processes of their own."""
    runtime = await Runtime.start(tiny_config(model, processes=request.param), topology=TWO)
    yield runtime
    await runtime.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def processes(model: Path) -> AsyncIterator[Runtime]:
    runtime = await Runtime.start(tiny_config(model), topology=TWO)
    yield runtime
    await runtime.close()


async def prompts_of_replicas(runtime: Runtime) -> list[int]:
    """How many prompts each replica has started."""
    replies = await runtime.manager.router.control_each(CachePrompts())
    return [len((reply.body or {})["prompts"]) for _, reply in replies]


async def loads(runtime: Runtime) -> list[dict[str, int]]:
    replies = await runtime.manager.router.control_each(GetState())
    return [(reply.body or {})["load"] for _, reply in replies]


async def test_requests_are_spread_and_commands_reach_all(runtime: Runtime) -> None:
    before = await prompts_of_replicas(runtime)
    ids = await Streams(runtime, 6, 12).ended()

    assert [len(stream) for stream in ids] == [12] * 6
    after = await prompts_of_replicas(runtime)
    assert [new - old for new, old in zip(after, before, strict=True)] == [3, 3]
    prompts = await runtime.manager.control(CachePrompts())
    assert prompts.body is not None
    assert len(prompts.body["prompts"]) == sum(after)
    tree = await runtime.manager.control(CacheTree())
    assert tree.body is not None
    assert {node["dp_rank"] for node in tree.body["nodes"]} == {0, 1}
    assert [node["id"] for node in tree.body["nodes"]] == list(range(tree.body["shown_nodes"]))
    for rid in ("r0", "r1"):  # one of each replica
        told = await runtime.manager.control(CacheRequest(rid=rid))
        assert told.body is not None
        assert told.body["rid"] == rid
    assert not (await runtime.manager.control(CacheRequest(rid="r9"))).ok
    assert (await runtime.manager.control(FlushCache())).ok
    assert [load["num_cached_tokens"] for load in await loads(runtime)] == [0, 0]


@pytest.mark.slow
async def test_an_abort_reaches_the_replica_that_serves_the_request(runtime: Runtime) -> None:
    streams = Streams(runtime, 4, ENDLESS)
    await streams.under_way()
    assert [load["num_running_reqs"] for load in await loads(runtime)] == [2, 2]

    assert runtime.manager.abort("r1")
    await until(lambda: streams.finishes[1] == "abort")
    assert not (await runtime.manager.control(FlushCache())).ok  # both are busy
    assert runtime.manager.abort_all() == 3
    await streams.ended()

    assert streams.finishes == ["abort"] * 4
    for load in await loads(runtime):
        assert (load["num_running_reqs"], load["num_used_tokens"]) == (0, 0)


async def test_the_server_shows_each_replica(runtime: Runtime) -> None:
    app = create_app(runtime.manager, ServerSettings(served_model_name="tiny"))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        before = [load["generated_tokens"] for load in await loads(runtime)]
        await Streams(runtime, 4, 8).ended()
        wanted = [tokens + 16 for tokens in before]
        info = (await client.get("/server_info")).json()
        await until(
            lambda: [c.load.generated_tokens for c in runtime.manager.router.clients] == wanted
        )
        rows = (await client.get("/v1/loads")).json()["loads"]
        second = (await client.get("/v1/loads?dp_rank=1")).json()["loads"]
        gauges = (await client.get("/v1/loads?format=prometheus")).text
        merged = (await client.get("/metrics")).text

    assert info["dp_size"] == 2
    assert [state["load"]["generated_tokens"] for state in info["internal_states"]] == wanted
    assert [row["dp_rank"] for row in rows] == [0, 1]
    assert [row["dp_rank"] for row in second] == [1]
    assert [row["generated_tokens"] for row in rows + second] == [*wanted, wanted[1]]
    for replica, tokens in enumerate(wanted):
        assert f'sylvan_load_generated_tokens{{dp_rank="{replica}"}} {tokens}.0' in gauges
        assert re.search(
            rf'^sglang:generated_tokens{{dp_rank="{replica}"[^}}]*}} {tokens}\.0$',
            merged,
            re.MULTILINE,
        )


@pytest.mark.slow
@pytest.mark.parametrize("child", ["scheduler-0", "detokenizer-1"])
async def test_streams_of_a_replica_that_was_lost_continue_and_others_do_not_notice(
    processes: Runtime, child: str
) -> None:
    clients = processes.manager.router.clients
    await until(lambda: all(client.state == "up" for client in clients))
    undisturbed = await Streams(processes, 4, 300).ended()
    before = processes.pids
    streams = Streams(processes, 4, 300)
    await streams.under_way()

    os.kill(before[child], signal.SIGKILL)

    assert await streams.ended() == undisturbed
    await until(lambda: processes.pids[child] != before[child])
    others = [name for name in before if name != child]
    assert [processes.pids[name] for name in others] == [before[name] for name in others]
    lost = int(child[-1])
    assert clients[1 - lost].state == "up"


@pytest.mark.slow
async def test_requests_of_a_replica_that_is_given_up_continue_on_the_other(model: Path) -> None:
    roles = tuple(replace(role, restart=RestartPolicy(max_restarts=0)) for role in ROLES)
    topology = Topology(num_replicas=2, roles=roles)
    runtime = await Runtime.start(tiny_config(model), topology=topology)
    try:
        undisturbed = await Streams(runtime, 4, 300).ended()
        streams = Streams(runtime, 4, 300)
        await streams.under_way()

        os.kill(runtime.pids["scheduler-1"], signal.SIGKILL)

        assert await streams.ended() == undisturbed
        clients = runtime.manager.router.clients
        async with asyncio.timeout(30):  # short streams may end before the loss is noticed
            while [client.state for client in clients] != ["up", "lost"]:
                await asyncio.sleep(0.01)
        assert runtime.manager.alive()
        assert runtime.manager.ready()
        again = await Streams(runtime, 4, 300).ended()
        assert again == undisturbed

        streams = Streams(runtime, 2, ENDLESS)
        await streams.under_way()
        os.kill(runtime.pids["scheduler-0"], signal.SIGKILL)
        await streams.ended()
        assert streams.finishes == ["abort", "abort"]
        assert not runtime.manager.alive()
    finally:
        await runtime.close()
