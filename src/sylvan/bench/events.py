"""Takes a server-sent stream apart as it arrives, at little cost: the client must not be slow."""

from __future__ import annotations

from collections.abc import Iterator

DONE = b"[DONE]"
MAX_EVENT_BYTES = 64 << 20


class Events:
    """Collects bytes and gives the data of events that are whole."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add bytes; the data of each event that they end. `[DONE]` is none.

        Raises:
            ValueError: An event grows beyond `MAX_EVENT_BYTES`.
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
