from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest

from sylvan.protocol.messages import Heartbeat, SchedulerLoad
from sylvan.runtime.engine.child_process import ChildProcess
from sylvan.transport.api import MessageError
from sylvan.transport.inproc import AsyncPipe


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

    def fail(message) -> None:
        raise ZeroDivisionError

    child = ChildProcess("child", process, receiver=pipe, sender=None, on_message=fail)
    pipe.send(Heartbeat(load=SchedulerLoad()))

    assert await asyncio.wait_for(child.ended, 60) == -signal.SIGKILL
    child.close()
