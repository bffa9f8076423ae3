"""A consistent hash ring: keys keep their worker while others come and go."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator

POINTS = 128
"""Points per worker; the shares of workers differ by about 1 / sqrt(POINTS)."""


class HashRing:
    """Points of all members on a circle of 64-bit numbers."""

    def __init__(self) -> None:
        self._points: list[tuple[int, str]] = []
        self._members: set[str] = set()
        self._in_order = True

    def __len__(self) -> int:
        return len(self._members)

    def add(self, member: str) -> None:
        """Add a member."""
        if member in self._members:
            return
        self._members.add(member)
        self._points += [(point, member) for point in _points(member)]
        self._in_order = False  # many members are often added in a row

    def remove(self, member: str) -> None:
        """Remove a member."""
        if member in self._members:
            self._members.discard(member)
            self._points = [item for item in self._points if item[1] != member]

    def walk(self, key: bytes) -> Iterator[str]:
        """Yield the members in the order in which they take over the key, each once."""
        if not self._in_order:
            self._points.sort()
            self._in_order = True
        seen: set[str] = set()
        points = self._points
        start = bisect_left(points, (hash64(key), ""))
        for i in range(len(points)):
            member = points[(start + i) % len(points)][1]
            if member not in seen:
                seen.add(member)
                yield member
                if len(seen) == len(self._members):
                    return


def hash64(data: bytes) -> int:
    """Hash bytes to the same number in every process."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())


def _points(member: str) -> list[int]:
    digest = b"".join(
        hashlib.blake2b(f"{member}#{i}".encode(), digest_size=64).digest()
        for i in range(POINTS // 8)
    )
    return [int.from_bytes(digest[8 * i : 8 * i + 8]) for i in range(POINTS)]
