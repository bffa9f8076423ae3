"""Common start of child processes: read the configuration, and exit with the parent.

The parent writes one line of JSON to the child's stdin, and keeps that pipe open as long as
it lives. When the pipe closes, the parent is gone, for whatever reason.
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
from sylvan.protocol.errors import ConfigError, RankLostError
from sylvan.protocol.messages import FromScheduler, StartFailed
from sylvan.transport.api import MessageSender
from sylvan.transport.arrays import SharedArrays
from sylvan.transport.codec import MessageDecoder, MessageEncoder
from sylvan.transport.workspace import Workspace
from sylvan.transport.zmq import PullReceiver, PushSender
from sylvan.utils import logs

logger = logging.getLogger(__name__)

EXIT_CONFIG = 2
_ORPHAN_TRIES, _ORPHAN_PAUSE_S = 25, 0.01
_PR_SET_PDEATHSIG = 1


class StepsAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank on another machine connects to the first rank.

    Attributes:
        address: Of the first rank's steps.
        token: By which it shows who it is.
    """

    address: str
    token: str


class ChildConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Start parameters of a child.

    Attributes:
        config: The configuration, without secrets.
        workspace: Directory of the sockets.
        parent_pid: Process id of the API process.
        sockets: File name of each socket of the child, by the child's name for it.
        reports_loading: Send `Loading` messages while weights are loaded, instead of logging.
        rank: Its rank among the processes that hold the model.
        steps: Where a rank on another machine connects for step plans.
    """

    config: Config
    workspace: str
    parent_pid: int
    sockets: dict[str, str]
    reports_loading: bool = False
    rank: int = 0
    steps: StepsAddress | None = None


class ChildMain:
    """A child process that has read its configuration.

    Attributes:
        config: The configuration, without secrets.
        reports_loading: See `ChildConfig`.
        rank: See `ChildConfig`.
        steps: See `ChildConfig`.
        context: ZeroMQ context for unnamed sockets.
    """

    def __init__(self, child_config: ChildConfig) -> None:
        self._child_config = child_config
        self.config = child_config.config
        self.reports_loading = child_config.reports_loading
        self.rank = child_config.rank
        self.steps = child_config.steps
        self._workspace = Workspace.join(Path(child_config.workspace))
        self._arrays = SharedArrays(self._workspace.path)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    @classmethod
    def start(cls) -> ChildMain:
        """Read the configuration from stdin; call this once, first of all."""
        line = sys.stdin.buffer.readline()
        if not line:  # the parent does not need this process after all, or is gone
            sys.exit(1)
        child = cls(msgspec.json.decode(line, type=ChildConfig))
        child._set_signals()
        threading.Thread(target=child._watch_parent, name="watch-parent", daemon=True).start()
        logs.set_up(child.config.observe.log_level, child.config.observe.log_format)
        return child

    def sender(self, socket: str) -> PushSender[msgspec.Struct]:
        """Open the sending end of a socket; `socket` is this child's name for it."""
        return PushSender(self.context, self._address(socket), MessageEncoder(self._arrays))

    def receiver(self, kind: object, *sockets: str) -> PullReceiver[msgspec.Struct]:
        """Open the receiving end of one or more sockets, for messages of type `kind`."""
        addresses = [self._address(socket) for socket in sockets]
        return PullReceiver(self.context, addresses, MessageDecoder(kind, self._arrays))

    def path(self, socket: str) -> Path:
        """Return the path of a file registered among the sockets."""
        return self._workspace.path / self._child_config.sockets[socket]

    def finish(self) -> None:
        """Close the sockets once everything was delivered, or after a second."""
        self.context.destroy(linger=1000)

    def _address(self, socket: str) -> str:
        return self._workspace.address(self._child_config.sockets[socket])

    def _watch_parent(self) -> None:
        while os.read(0, 4096):
            pass
        self._exit()

    def _exit(self) -> None:
        """Exit at once, removing the workspace, because the parent cannot."""
        if self._is_orphan():
            self._workspace.remove()
        os._exit(1)

    def _is_orphan(self) -> bool:
        # the pipes of a killed parent close a moment before its children are re-parented
        for _ in range(_ORPHAN_TRIES):
            if os.getppid() != self._child_config.parent_pid:
                return True
            time.sleep(_ORPHAN_PAUSE_S)
        return False

    def _set_signals(self) -> None:
        # Ctrl-C reaches the whole process group; the parent decides when children exit
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: self._exit())
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        if sys.platform == "linux":
            # not SIGKILL: the handler must remove the workspace
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != self._child_config.parent_pid:  # the parent died before the line above
            self._exit()


def run_start(replies: MessageSender[FromScheduler], start: Callable[[], None]) -> int:
    """Run `start`; if it fails, report the reason to the parent. Returns the exit code."""
    try:
        start()
    except ConfigError as error:
        replies.send(StartFailed(message=str(error)))
        return EXIT_CONFIG
    except RankLostError as error:
        replies.send(StartFailed(message=str(error)))
        return 1
    except MemoryError as error:
        replies.send(StartFailed(message=f"too little memory: {error}"))
        return EXIT_CONFIG
    except Exception as error:
        logger.exception("start failed")
        replies.send(StartFailed(message=f"{type(error).__name__}: {error}"))
        return 1
    return 0
