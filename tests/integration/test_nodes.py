"""A model held by ranks on several machines: two groups of processes on loopback."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

import sylvan
from sylvan.config import Config
from sylvan.protocol.commands import HashWeights, SharedTensors, UpdateWeights
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.engine import node_agent
from sylvan.runtime.engine.node_agent import NodeAgent
from sylvan.runtime.engine.runtime import Runtime
from sylvan.utils.clock import monotonic
from tests.support.nodes import Cluster, agent_of, free_port, two_nodes
from tests.support.streams import Streams, until
from tests.support.tiny import tiny_config, write_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
RANKS = ["scheduler", "rank-1"]
STREAMS = 4, 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: Path) -> AsyncIterator[Cluster]:
    made = await Cluster.start(two_nodes(model, free_port()))
    yield made
    await made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(model: Path) -> list[list[int]]:
    alone = await Runtime.start(tiny_config(model, runner="eager"))
    found = await Streams(alone, *STREAMS).ended()
    await alone.close()
    return found


@pytest.mark.slow
async def test_two_machines_answer_as_one(cluster: Cluster, expected: list[list[int]]) -> None:
    assert await Streams(cluster.runtime, *STREAMS).ended() == expected
    assert set(cluster.runtime.pids) == {"scheduler", "detokenizer"}
    assert set(cluster.agent.pids) == {"rank-1"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("scheduler", marks=pytest.mark.slow), "rank-1"])
async def test_a_rank_that_is_killed_on_either_is_replaced_and_streams_continue(
    cluster: Cluster, expected: list[list[int]], name: str
) -> None:
    before = cluster.pids
    streams = Streams(cluster.runtime, *STREAMS)
    await streams.under_way()

    os.kill(before[name], signal.SIGKILL)

    assert await streams.ended() == expected
    await until(lambda: all(cluster.pids.get(each) != before[each] for each in RANKS))
    assert not any(psutil.pid_exists(before[each]) for each in RANKS)


@pytest.mark.slow
async def test_requests_wait_for_a_machine_that_is_lost(
    cluster: Cluster, expected: list[list[int]]
) -> None:
    streams = Streams(cluster.runtime, *STREAMS)
    await streams.under_way()
    await cluster.lose()
    during = Streams(cluster.runtime, *STREAMS, name="during")
    await until(lambda: cluster.runtime.manager.state == "recovering")
    late = Streams(cluster.runtime, *STREAMS, name="late")
    live = cluster.runtime.manager.router.live
    await until(lambda: all(live.get(f"late{i}", "") for i in range(STREAMS[0])))

    cluster.come_back()

    for each in (streams, during, late):
        assert await each.ended() == expected


async def test_commands_reach_the_ranks_of_all_machines(cluster: Cluster) -> None:
    manager = cluster.runtime.manager
    sums = (await manager.control(HashWeights())).body["checksums"]
    assert sums
    reply = await manager.updates.update(UpdateWeights(SharedTensors("nowhere", 8)))
    assert "ranks on other machines cannot read" in reply.message
    assert (await manager.control(HashWeights())).body["checksums"] == sums


@pytest.mark.slow
async def test_the_end_of_the_first_is_the_end_of_all(model: Path) -> None:
    made = await Cluster.start(two_nodes(model, free_port()))
    processes = [psutil.Process(pid) for pid in made.pids.values()]

    await made.close()

    assert not any(process.is_running() for process in processes)


async def test_a_machine_that_never_joins_is_named(model: Path) -> None:
    port = free_port()
    why = (
        rf"^node 1 of 2 did not join within 1 s; start it with --nnodes 2 --node-rank 1 "
        rf"--dist-init-addr 127\.0\.0\.1:{port}$"
    )
    with pytest.raises(ConfigError, match=why):
        await Runtime.start(two_nodes(model, port, join_timeout_s=1.0))


async def test_a_first_machine_that_is_not_there_is_named(model: Path) -> None:
    agent = agent_of(two_nodes(model, free_port(), join_timeout_s=1.0))
    with pytest.raises(ConfigError, match=r"^node 0 at 127\.0\.0\.1:\d+ did not answer within 1 s"):
        await agent.run()


def of_version(version: str, config: Config) -> NodeAgent:
    """Node 1 of another version."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sylvan, "__version__", version)
        return agent_of(config)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("settings", r"^node 1 has dtype=bfloat16, node 0 dtype=float32; start all machines"),
        (
            "version",
            r"^node 1 has Sylvan 0\.0\.1, node 0 \d.*; install the same version on all machines$",
        ),
        pytest.param(
            "checkpoint",
            r"^node 1 has another checkpoint than node 0 at ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "number", r"^node 1 is configured for 2 machines, node 0 for 3", marks=pytest.mark.slow
        ),
    ],
)
async def test_machines_that_differ_are_refused_by_name(model: Path, what: str, why: str) -> None:
    config = two_nodes(model, free_port())
    agent = {
        "settings": lambda: agent_of(config, {"dtype": "bfloat16", "observe.log_level": "debug"}),
        "checkpoint": lambda: agent_of(config, digest="another"),
        "number": lambda: agent_of(config),
        "version": lambda: of_version("0.0.1", config),
    }[what]()
    head = config
    if what == "number":
        head = two_nodes(model, 0, tp=3, nodes=3, address=config.parallel.address)
    starting = asyncio.create_task(Runtime.start(head))
    try:
        with pytest.raises(ConfigError, match=why):
            await agent.run()
    finally:
        with pytest.raises(ConfigError):
            await starting


async def test_an_unknown_name_of_the_first_machine_is_refused(model: Path) -> None:
    config = two_nodes(model, 0, address="nowhere.invalid:29500")
    with pytest.raises(
        ConfigError, match=r"^parallel\.address: 'nowhere\.invalid' is unknown .*; g"
    ):
        await Runtime.start(config)


async def test_a_port_in_use_is_refused(model: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^parallel\.address=127\.0\.0\.1:{port}: cannot"):
            await Runtime.start(two_nodes(model, port))


@pytest.mark.slow
async def test_rubbish_at_the_port_hurts_no_other(
    cluster: Cluster, expected: list[list[int]]
) -> None:
    address = cluster.agent._config.parallel.address
    assert address is not None
    host, _, port = address.partition(":")
    for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64):
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            sock.sendall(data)
    assert await Streams(cluster.runtime, *STREAMS).ended() == expected


@pytest.mark.slow
async def test_clocks_of_machines_may_differ(
    model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each machine counts from a start of its own, and one of them goes faster."""
    monkeypatch.setattr(node_agent, "monotonic", lambda: 1.2 * monotonic() - 1e6)
    made = await Cluster.start(two_nodes(model, free_port()))

    assert await Streams(made.runtime, *STREAMS).ended() == expected
    await made.close()
