"""Memory for the bodies of all calls under way."""

from __future__ import annotations

from sylvan.protocol.errors import CapacityError


class Room:
    """Room that calls take and give back.

    Args:
        most: Bytes that all of them hold together; may be changed.
        setting: The setting that says so.
    """

    def __init__(self, most: int, setting: str) -> None:
        self.most = most
        self._setting = setting
        self.held = 0

    def take(self, size: int) -> None:
        """Reserve that many bytes.

        Raises:
            CapacityError: not enough room now.
        """
        if self.held + size > self.most:
            raise CapacityError(
                f"The bodies of the calls under way hold {self.held} bytes; this server takes "
                f"{self.most} ({self._setting}).",
                setting=self._setting,
            )
        self.held += size

    def give_back(self, size: int) -> None:
        """Release that many bytes."""
        self.held -= size
