"""Publishes batches of KV events over ZeroMQ, and replays them for subscribers that missed some."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec
import zmq

from sylvan.config.tree import KVEventsConfig
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.features.kv_events.blocks import KVEvent

logger = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

Make = Callable[[], list[KVEvent]]
"""Builds the events of a batch; called on the publisher's thread, so that steps need not wait."""


class KVEventPublisher:
    """Owns the sockets and the thread that serves them.

    A PUB socket sends frames (topic, sequence number as 8 bytes big-endian, msgpack array of
    Unix time, events, data-parallel rank). `publish` numbers the batches, so a gap
    shows a subscriber that it missed something. A ROUTER socket answers (empty, first number) with
    the stored batches from there on, as (empty, topic, number, payload), and a last number of -1.
    """

    def __init__(self, settings: KVEventsConfig, rank: int = 0) -> None:
        """Bind the sockets.

        Raises:
            ConfigError: an address cannot be bound.
        """
        self._settings, self._rank = settings, rank
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._events = self._bind(zmq.PUB, "endpoint", settings.endpoint)
        self._replay = None
        if settings.replay_endpoint:
            self._replay = self._bind(zmq.ROUTER, "replay_endpoint", settings.replay_endpoint)
        self._queue: queue.Queue[tuple[int, float, Make] | None] = queue.Queue(
            settings.max_queue_size
        )
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=settings.buffer_steps)
        self._next = 0
        self._lost = 0
        self._wake = self._context.socket(zmq.PAIR)
        self._wake.bind("inproc://wake")
        self._woken = self._context.socket(zmq.PAIR)
        self._woken.connect("inproc://wake")
        self._encoder = msgspec.msgpack.Encoder()
        self._thread = threading.Thread(target=self._serve, name="kv-events", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Address of the PUB socket, with its actual port."""
        return self._events.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def replay_endpoint(self) -> str | None:
        """Address of the replay socket, with its actual port."""
        return self._replay and self._replay.getsockopt_string(zmq.LAST_ENDPOINT)

    def publish(self, make: Make) -> None:
        """Queue a batch; if the queue is full it is lost, which shows as a gap in numbers."""
        number, self._next = self._next, self._next + 1
        try:
            self._queue.put_nowait((number, datetime.now(UTC).timestamp(), make))
        except queue.Full:
            self._lost += 1
            if self._lost.bit_count() == 1:
                logger.warning("%d batches of KV events lost: the queue is full", self._lost)
            return
        with contextlib.suppress(zmq.Again):  # already awake
            self._wake.send(b"", zmq.DONTWAIT)

    def close(self) -> None:
        """Send what is queued, then close the sockets."""
        self._queue.put(None)
        self._wake.send(b"")
        self._thread.join()
        for socket in (self._events, self._replay, self._wake, self._woken):
            if socket is not None:
                socket.close(linger=200)
        self._context.term()

    def _bind(self, kind: int, field: str, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, self._settings.hwm)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            reason = f"cannot listen there ({error.strerror or error})"
            raise ConfigError(f"kv_events.{field}={address}: {reason}") from error
        return socket

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._woken in ready:
                self._woken.recv()
                if not self._send_queued():
                    return
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)

    def _send_queued(self) -> bool:
        """Send everything queued; False at the final item."""
        with contextlib.suppress(queue.Empty):
            while (item := self._queue.get_nowait()) is not None:
                number, stamp, make = item
                name = number.to_bytes(8, "big")
                payload = self._encoder.encode([stamp, make(), self._rank])
                self._kept.append((name, payload))
                self._events.send_multipart((self._settings.topic.encode(), name, payload))
            return False
        return True

    def _answer(self, socket: zmq.Socket[bytes]) -> None:
        frames = socket.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("malformed replay request for KV events")
            return
        client, first = frames[0], int.from_bytes(frames[2], "big")
        topic = self._settings.topic.encode()
        for name, payload in tuple(self._kept):
            if int.from_bytes(name, "big") >= first:
                socket.send_multipart((client, b"", topic, name, payload))
        socket.send_multipart((client, b"", topic, END_OF_REPLAY, b""))
