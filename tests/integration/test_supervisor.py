"""The supervisor knows no role by name: a new one is one entry of its table."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest

from sylvan.config import Config
from sylvan.config.env import for_compute
from sylvan.protocol.errors import ConfigError
from sylvan.protocol.messages import Heartbeat, Ready
from sylvan.runtime.engine.child_process import FromChild
from sylvan.runtime.engine.restart import RestartPolicy
from sylvan.runtime.engine.roles import ProcessRole, Replica, Topology
from sylvan.runtime.engine.supervisor import Supervisor
from sylvan.runtime.tokenizer.router import ReplicaRouter
from sylvan.runtime.tokenizer.scheduler_client import Send
from tests.support import toy_process

DEADLINE_S = 60


@dataclass
class Recorder:
    """Observes the processes of all replicas."""

    events: list[str] = field(default_factory=list)
    facts: list[dict[str, object]] = field(default_factory=list)
    heartbeats: int = 0

    def of(self, replica: Replica) -> Recorder:
        return self

    def on_ready(self, ready: Ready, send: Send) -> None:
        self.events.append("ready")
        self.facts.append(dict(ready.facts))

    def on_message(self, message: FromChild) -> None:
        assert isinstance(message, Heartbeat)
        self.heartbeats += 1

    def on_lost(self, *, injected: bool) -> None:
        self.events.append("lost")

    def on_given_up(self) -> None:
        self.events.append("given up")

    async def until(self, *events: str) -> None:
        await until(lambda: self.events == list(events))


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not reached():
            await asyncio.sleep(0.01)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def toy(recorder: Recorder) -> ProcessRole:
    """A role that the supervisor has never heard of."""
    return ProcessRole(
        name="toy",
        argv=(sys.executable, str(Path(toy_process.__file__))),
        observe=recorder.of,
        outbox="out",
        environment=lambda: {**for_compute(), "TOY_COLOUR": "green"},
    )


@asynccontextmanager
async def running(role: ProcessRole, num_replicas: int = 1) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(Config(), Topology(num_replicas=num_replicas, roles=(role,)))
    try:
        await supervisor.spawn()
        router = ReplicaRouter(num_replicas)
        await supervisor.run([Replica(client, no_facts) for client in router.clients])
        yield supervisor
    finally:
        await supervisor.close()


def no_facts(facts: object) -> None:
    raise AssertionError("a toy knows no model")


async def test_a_toy_role_is_started_watched_restarted_and_ended(
    toy: ProcessRole, recorder: Recorder
) -> None:
    async with running(toy) as supervisor:
        assert recorder.facts == [{"colour": "green"}]
        await until(lambda: recorder.heartbeats > 1)
        first = supervisor.pids["toy"]

        os.kill(first, signal.SIGKILL)
        await recorder.until("ready", "lost", "ready")

        second = psutil.Process(supervisor.pids["toy"])
        assert second.pid != first
        seen = recorder.heartbeats
        await until(lambda: recorder.heartbeats > seen)
    assert not second.is_running()
    assert not supervisor.workspace.exists()
    assert recorder.events == ["ready", "lost", "ready"]


async def test_a_role_is_restarted_as_its_policy_says(toy: ProcessRole, recorder: Recorder) -> None:
    role = replace(toy, restart=RestartPolicy(max_restarts=1))
    async with running(role) as supervisor:
        os.kill(supervisor.pids["toy"], signal.SIGKILL)
        await recorder.until("ready", "lost", "ready")

        os.kill(supervisor.pids["toy"], signal.SIGKILL)
        await recorder.until("ready", "lost", "ready", "lost", "given up")


@pytest.mark.slow
async def test_a_role_with_a_heartbeat_limit_is_replaced_when_it_hangs(
    toy: ProcessRole, recorder: Recorder
) -> None:
    role = replace(toy, heartbeat_limit_s=lambda config: 1.0)
    async with running(role) as supervisor:
        first = supervisor.pids["toy"]

        os.kill(first, signal.SIGSTOP)
        await recorder.until("ready", "lost", "ready")

        assert supervisor.pids["toy"] != first


async def test_each_replica_has_a_process_of_the_role(toy: ProcessRole, recorder: Recorder) -> None:
    async with running(toy, num_replicas=2) as supervisor:
        assert recorder.events == ["ready", "ready"]
        before = supervisor.pids
        assert list(before) == ["toy-0", "toy-1"]

        os.kill(before["toy-1"], signal.SIGKILL)
        await recorder.until("ready", "ready", "lost", "ready")

        after = supervisor.pids
        assert after["toy-0"] == before["toy-0"]
        assert after["toy-1"] != before["toy-1"]


async def test_a_process_that_cannot_start_is_an_error_that_names_its_role(
    toy: ProcessRole,
) -> None:
    role = replace(toy, environment=for_compute)  # the toy insists on a colour
    with pytest.raises(ConfigError, match="the toy process ended while it was starting"):
        async with running(role):
            pass


async def test_a_failure_of_an_observer_gives_the_process_up(
    toy: ProcessRole, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*, injected: bool) -> None:
        raise RuntimeError("a bug")

    async with running(toy) as supervisor:
        monkeypatch.setattr(recorder, "on_lost", fail)
        os.kill(supervisor.pids["toy"], signal.SIGKILL)
        await recorder.until("ready", "given up")
