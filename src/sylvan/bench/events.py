"""Parses a server-sent event stream incrementally and cheaply: the client must not be slow."""

from __future__ import annotations

from collections.abc import Iterator

DONE = b"[DONE]"
MAX_EVENT_BYTES = 64 << 20


class Events:
    """Buffers bytes, and returns the data of complete events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add bytes; return the data of each completed event. `[DONE]` is skipped.

        Raises:
            ValueError: An event exceeds `MAX_EVENT_BYTES`.
        """
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event is larger than {MAX_EVENT_BYTES >> 20} MiB")
        for line in lines:
            if line.startswith(b"data:"):
                payload = line[5:].strip()
                if payload and payload != DONE:
                    yield payload
