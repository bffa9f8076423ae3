"""Weights of two replicas: replaced in both, and back after a scheduler was lost."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from sylvan.protocol.commands import (
    DiskTensors,
    GroupTensors,
    HashWeights,
    JoinGroup,
    LeaveGroup,
    UpdateWeights,
)
from sylvan.runtime.engine.roles import Topology
from sylvan.runtime.engine.runtime import Runtime
from sylvan.runtime.executor.update_groups import broadcast, make_group
from tests.support.random_model import write_random_model
from tests.support.tiny import tiny_config
from tests.support.updates import as_bytes, changed, weights_in, write_changed

TWO = Topology(num_replicas=2)
DEADLINE_S = 60
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest.fixture(scope="module")
def old_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("old"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(old_dir: Path) -> AsyncIterator[Runtime]:
    config = tiny_config(old_dir, processes="many", load_format="auto")
    runtime = await Runtime.start(config, topology=TWO)
    yield runtime
    await runtime.close()


@pytest_asyncio.fixture(loop_scope="module")
async def runtime(shared: Runtime, old_dir: Path) -> AsyncIterator[Runtime]:
    """One that all tests share, with its first weights again after each."""
    yield shared
    first = UpdateWeights(DiskTensors(str(old_dir)), partial=False, version="default")
    assert (await shared.manager.updates.update(first)).ok


async def checksums(runtime: Runtime) -> list[dict[str, str]]:
    replies = await runtime.manager.router.control_each(HashWeights())
    return [reply.body["checksums"] for _, reply in replies if reply.body]


async def test_an_update_reaches_both(runtime: Runtime, old_dir: Path) -> None:
    before = await checksums(runtime)
    assert before[0] == before[1]

    new = changed(weights_in(old_dir))
    reply = await runtime.manager.updates.update(UpdateWeights(as_bytes(new), version="new"))

    assert reply.ok
    after = await checksums(runtime)
    assert after[0] == after[1] != before[0]
    assert [c.weight_version for c in runtime.manager.router.clients] == ["new", "new"]


async def test_each_has_a_rank_of_its_own(runtime: Runtime, old_dir: Path) -> None:
    new = changed(weights_in(old_dir), seed=8)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]

    def train() -> None:
        group = make_group("127.0.0.1", port, 0, 3, "g")
        for value in new.values():
            broadcast(group, value)

    trainer = asyncio.create_task(asyncio.to_thread(train))
    updates = runtime.manager.updates
    joined = await updates.send(JoinGroup("g", "127.0.0.1", port, 1, 3))
    shapes = tuple(tuple(value.shape) for value in new.values())
    source = GroupTensors("g", tuple(new), ("float32",) * len(new), shapes)
    updated = await updates.update(UpdateWeights(source))
    await trainer
    assert (await updates.send(LeaveGroup("g"))).ok

    assert joined.ok, joined.message
    assert updated.ok, updated.message
    after = await checksums(runtime)
    assert after[0] == after[1]


async def test_a_lost_scheduler_reads_the_checkpoint_again(
    runtime: Runtime, old_dir: Path, tmp_path: Path
) -> None:
    new_dir = write_changed(old_dir, tmp_path)
    command = UpdateWeights(DiskTensors(str(new_dir)), partial=False, version="new")
    assert (await runtime.manager.updates.update(command)).ok
    want = await checksums(runtime)

    clients = runtime.manager.router.clients
    os.kill(runtime.pids["scheduler-0"], signal.SIGKILL)
    async with asyncio.timeout(DEADLINE_S):
        while clients[0].state == "up":
            await asyncio.sleep(0.01)
        while clients[0].state != "up":
            await asyncio.sleep(0.01)

    assert await checksums(runtime) == want
    assert [client.weight_version for client in clients] == ["new", "new"]


async def test_tensors_are_lost_with_the_scheduler_and_the_label_says_so(
    runtime: Runtime, old_dir: Path
) -> None:
    before = await checksums(runtime)
    update = UpdateWeights(as_bytes({"lm_head.weight": torch.zeros(264, 64)}), version="new")
    assert (await runtime.manager.updates.update(update)).ok

    clients = runtime.manager.router.clients
    os.kill(runtime.pids["scheduler-0"], signal.SIGKILL)
    async with asyncio.timeout(DEADLINE_S):
        while clients[0].state == "up":
            await asyncio.sleep(0.01)
        while clients[0].state != "up":
            await asyncio.sleep(0.01)

    assert (await checksums(runtime))[0] == before[0]
    assert [client.weight_version for client in clients] == ["default", "new"]
