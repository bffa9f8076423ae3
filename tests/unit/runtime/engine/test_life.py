from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest

from sylvan.config.tree import Config
from sylvan.protocol.messages import Heartbeat, Load
from sylvan.runtime.engine.child import Launch
from sylvan.runtime.engine.life import MAX_RESTARTS, WINDOW_S, Backoff, Life
from sylvan.transport.api import MessageError
from sylvan.transport.inproc import AsyncPipe
from sylvan.utils.clock import VirtualClock


def test_restarts_wait_longer_each_time_and_end() -> None:
    delays = [(backoff := Backoff(VirtualClock())).next_delay_s()]
    delays += [backoff.next_delay_s() for _ in range(MAX_RESTARTS)]

    assert delays[0] == 0.0
    assert delays[-1] is None
    waited = [d for d in delays if d is not None]
    assert waited == sorted(set(waited))


def test_old_restarts_are_forgiven() -> None:
    clock = VirtualClock()
    backoff = Backoff(clock)
    for _ in range(MAX_RESTARTS):
        backoff.next_delay_s()
    assert backoff.next_delay_s() is None

    clock.advance(WINDOW_S + 1)

    assert backoff.next_delay_s() == 0.0


class Garbled(AsyncPipe):
    """A channel whose messages cannot be read."""

    async def receive(self):
        await super().receive()
        raise MessageError("malformed message")


@pytest.mark.parametrize("kind", [AsyncPipe, Garbled])
async def test_a_child_whose_messages_cannot_be_handled_is_ended(kind) -> None:
    pipe = kind(asyncio.get_running_loop())
    code = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    process = subprocess.Popen(code, stdin=subprocess.PIPE)
    launch = Launch(config=Config(model="x"), workspace="", parent_pid=0, sockets={})

    def fail(message) -> None:
        raise ZeroDivisionError

    life = Life("child", process, launch, pipe, fail)
    pipe.send(Heartbeat(load=Load()))

    assert await asyncio.wait_for(life.ended, 60) == -signal.SIGKILL
    life.close()
