"""Loads grammars into separate processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref

import msgspec

from sylvan.config.env import without_settings
from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.api import CompiledGrammar
from sylvan.runtime.features.grammar.isolation.grammar import IsolatedGrammar
from sylvan.runtime.features.grammar.isolation.messages import (
    GrammarLoaded,
    receive,
    send,
    send_socket,
)
from sylvan.runtime.features.grammar.wire import Prepare

MAX_GRAMMARS = 256
"""Grammars in use or cached at once; each takes two processes."""
_PROGRAM = "sylvan.runtime.features.grammar.isolation"
_WALL = 8.0  # multiple of the compile CPU time


class IsolatedLoader:
    """See `GrammarLoader`.

    Args:
        prepare: First message to the fork server.
    """

    isolated = True

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._grammars: weakref.WeakSet[IsolatedGrammar] = weakref.WeakSet()

    def load(self, data: bytes) -> CompiledGrammar:
        """Load a grammar; blocks until its process is ready."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                self._send_socket(theirs, data)
            self._await(ours)
        except BaseException:
            ours.close()
            raise
        grammar = IsolatedGrammar(ours, self._prepare.backend, data)
        with self._lock:
            self._grammars.add(grammar)
        return grammar

    def close(self) -> None:
        """Stop all processes."""
        with self._lock:
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._forget()

    def _send_socket(self, theirs: socket.socket, data: bytes) -> None:
        if len(self._grammars) >= MAX_GRAMMARS:
            message = f"{MAX_GRAMMARS} grammars are in use, no more can be; try again"
            raise RequestError(message, status=503)
        for _ in range(2):
            control = self._control or self._start()
            try:
                send_socket(control, theirs, data)
            except OSError:  # the fork server is gone; existing grammars live on
                self._forget()
            else:
                return
        raise _process_ended()

    def _await(self, ours: socket.socket) -> None:
        """Wait until the grammar's process reports that it is ready."""
        ours.settimeout(_WALL * self._prepare.limits.timeout_s)
        try:
            with ours.makefile("rb", buffering=0) as stream:
                found = receive(stream, msgspec.msgpack.Decoder(GrammarLoaded))
        except OSError:
            found = None
        ours.settimeout(None)
        if found is None:
            raise _process_ended()
        if found.reason:
            raise RequestError(found.reason)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _PROGRAM],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=without_settings(),
                process_group=0,
            )
        send(ours, self._prepare)
        self._control = ours
        return ours

    def _forget(self) -> None:
        """Close the connection, on which the fork server exits."""
        if self._control is not None:
            self._control.close()
            self._control = None
        process, self._process = self._process, None
        if process is not None:
            process.wait()


def _process_ended() -> RequestError:
    return RequestError("the process of this grammar ended; try again", status=503)
