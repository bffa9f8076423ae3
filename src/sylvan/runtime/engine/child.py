"""What every child process does first: read its orders, and see to it that it dies with its parent.

The parent writes one line of JSON to the child's standard input and keeps that pipe open as long as
it lives. Its end means that the parent is gone, however that happened.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from sylvan.config import Config
from sylvan.protocol.errors import ConfigError
from sylvan.protocol.messages import Failed, FromScheduler
from sylvan.transport.api import Sender
from sylvan.transport.arrays import SharedArrays
from sylvan.transport.codec import Decoder, Encoder
from sylvan.transport.workspace import Workspace
from sylvan.transport.zmq import PullReceiver, PushSender
from sylvan.utils import logs

logger = logging.getLogger(__name__)

EXIT_CONFIG = 2
_ORPHAN_TRIES, _ORPHAN_PAUSE_S = 25, 0.01
_PR_SET_PDEATHSIG = 1


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Orders of a child: its part of the work, and the names of its sockets in the workspace."""

    config: Config
    workspace: str
    parent_pid: int
    sockets: dict[str, str]
    tells_loading: bool = False  # the parent shows how far it is; otherwise lines of the log do


class Child:
    """A child process that has read its orders.

    Attributes:
        config: The whole configuration, without secrets.
        tells_loading: See `Launch`.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self.config = launch.config
        self.tells_loading = launch.tells_loading
        self._workspace = Workspace.join(Path(launch.workspace))
        self._arrays = SharedArrays(self._workspace.path)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    @classmethod
    def start(cls) -> Child:
        """Read the orders from standard input; to be called once, first of all."""
        orders = sys.stdin.buffer.readline()
        if not orders:  # the parent found that it needs none, or is gone
            sys.exit(1)
        launch = msgspec.json.decode(orders, type=Launch)
        child = cls(launch)
        child._set_signals()
        threading.Thread(target=child._watch_parent, name="watch-parent", daemon=True).start()
        logs.set_up(child.config.observe.log_level, child.config.observe.log_format)
        return child

    def sender(self, role: str) -> PushSender[msgspec.Struct]:
        """Sending end of the socket with that role."""
        return PushSender(self._context, self._address(role), Encoder(self._arrays))

    def receiver(self, kind: object, *roles: str) -> PullReceiver[msgspec.Struct]:
        """Receiving end of the sockets with those roles, for messages of a type."""
        addresses = [self._address(role) for role in roles]
        return PullReceiver(self._context, addresses, Decoder(kind, self._arrays))

    def finish(self) -> None:
        """Let go of what is left, delivering what was sent."""
        self._context.destroy(linger=1000)

    def _address(self, role: str) -> str:
        return self._workspace.address(self._launch.sockets[role])

    def _watch_parent(self) -> None:
        while os.read(0, 4096):
            pass
        self._exit()

    def _exit(self) -> None:
        """End at once; without a parent there is nobody else to remove the workspace."""
        if self._is_orphan():
            self._workspace.remove()
        os._exit(1)

    def _is_orphan(self) -> bool:
        # a parent that is killed closes its pipes a moment before its children are given away
        for _ in range(_ORPHAN_TRIES):
            if os.getppid() != self._launch.parent_pid:
                return True
            time.sleep(_ORPHAN_PAUSE_S)
        return False

    def _set_signals(self) -> None:
        # Ctrl-C reaches the whole terminal group; the parent decides what becomes of its children
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: self._exit())
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        if sys.platform == "linux":
            # not SIGKILL: the handler is to have its turn to remove the workspace
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != self._launch.parent_pid:  # it died before the line above
            self._exit()


def report(replies: Sender[FromScheduler], start: Callable[[], None]) -> int:
    """Run `start`; if it refuses or fails, tell the parent why. Returns the exit code."""
    try:
        start()
    except ConfigError as error:
        replies.send(Failed(message=str(error)))
        return EXIT_CONFIG
    except MemoryError as error:
        replies.send(Failed(message=f"too little memory: {error}"))
        return EXIT_CONFIG
    except Exception as error:
        logger.exception("start failed")
        replies.send(Failed(message=f"{type(error).__name__}: {error}"))
        return 1
    return 0
