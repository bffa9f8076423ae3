"""Memory for the bodies of all calls under way."""

from __future__ import annotations

from sylvan.protocol.errors import CapacityError


class Room:
    """Room that calls take and give back.

    Args:
        most: Bytes that all of them hold together.
        setting: The setting that says so.
    """

    def __init__(self, most: int, setting: str) -> None:
        self._most = most
        self._setting = setting
        self.held = 0

    def take(self, size: int) -> None:
        """Have so many bytes more.

        Raises:
            CapacityError: There is no room for them now.
        """
        if self.held + size > self._most:
            raise CapacityError(
                f"The bodies of the calls under way hold {self.held} bytes; this server takes "
                f"{self._most} ({self._setting}).",
                setting=self._setting,
            )
        self.held += size

    def give_back(self, size: int) -> None:
        """Hold so many bytes less."""
        self.held -= size
