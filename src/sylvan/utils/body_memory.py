"""Limits the memory of the request bodies that a server holds at once."""

from __future__ import annotations

from sylvan.protocol.errors import CapacityError


class BodyMemory:
    """Counts the bytes that calls reserve for their bodies.

    Args:
        limit: Maximum sum of all bodies in bytes; may be changed.
        setting: Name of the setting with this limit.
    """

    def __init__(self, limit: int, setting: str) -> None:
        self.limit = limit
        self._setting = setting
        self.held = 0

    def take(self, size: int) -> None:
        """Reserve that many bytes.

        Raises:
            CapacityError: The limit would be exceeded.
        """
        if self.held + size > self.limit:
            raise CapacityError(
                f"The bodies of the calls under way hold {self.held} bytes; this server takes "
                f"{self.limit} ({self._setting}).",
                setting=self._setting,
            )
        self.held += size

    def give_back(self, size: int) -> None:
        """Release that many bytes."""
        self.held -= size
