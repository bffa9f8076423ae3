"""Runs a detokenizer on messages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from sylvan.protocol.messages import StopFound, TextBatch, ToDetokenizer
from sylvan.runtime.tokenizer.detokenizer import DetokenizerManager
from sylvan.transport.api import MessageError, MessageReceiver, MessageSender
from sylvan.utils.clock import Clock, monotonic

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TextPorts:
    """The channels of a detokenizer process."""

    inbox: MessageReceiver[ToDetokenizer]
    texts: MessageSender[TextBatch]
    stops: MessageSender[StopFound]

    def close(self) -> None:
        """Close all channels."""
        self.inbox.close()
        self.texts.close()
        self.stops.close()


class DetokenizerLoop:
    """The main loop of the detokenizer process."""

    def __init__(self, detokenizer: DetokenizerManager, ports: TextPorts) -> None:
        self._detokenizer = detokenizer
        self._ports = ports

    def run(
        self, on_alive: Callable[[], None], heartbeat_s: float, clock: Clock = monotonic
    ) -> None:
        """Serve until the process exits; call `on_alive` every `heartbeat_s` seconds."""
        due_s = clock()
        while True:
            if (now := clock()) >= due_s:
                on_alive()
                due_s = now + heartbeat_s
            self.pump(max(0.0, due_s - now))

    def pump(self, timeout_s: float = 0.0) -> bool:
        """Handle the next message, if one arrives in time; return whether one did."""
        try:
            message = self._ports.inbox.receive(timeout_s)
        except MessageError:
            logger.exception("message dropped")
            return True
        if message is None:
            return False
        answer = self._detokenizer.handle(message)
        # stops first: when the client reads the end, the scheduler is about to know it too
        for stop in answer.stops:
            self._ports.stops.send(stop)
        if answer.texts is not None:
            self._ports.texts.send(answer.texts)
        return True
