"""Bytes of KV and of recurrent states, as whoever moves them sees them. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sylvan.protocol.arrays import IntArray

Checksums = NDArray[np.uint64]
"""XXH3-64 of the bytes of each page, as exported."""


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes of one page in one piece: `num_bytes` from `address` on, in the pool's address space.

    The same piece of the next page is `stride` bytes further, so that the regions of page 0
    describe all pages.
    """

    address: int
    stride: int
    num_bytes: int


class Transfer(Protocol):
    """Pages on their way between a pool and host memory.

    Until it is done it is to be kept, and nobody may change or free the host memory, nor the pages
    of an export; nobody may read or write the pages of an import.

    An import that failed may have written some of its pages, but none if a checksum is wrong.
    `num_bytes` are on their way.
    """

    num_bytes: int

    @property
    def error(self) -> str | None:
        """Why it failed, once it is over."""
        ...

    @property
    def checksums(self) -> Checksums | None:
        """Of an export that was asked for them, one a page, once it is over."""
        ...

    def done(self) -> bool:
        """Whether it is over, well or not; never blocks."""
        ...

    def wait(self) -> None:
        """Block until it is over."""
        ...


class PageMemory(Protocol):
    """The bytes of one KV group in pages, or of recurrent states in slots (pages of one token).

    An exported page is its regions one after another: `page_bytes` bytes, whose layout depends on
    the model, the dtype, the page size and the kind of pool, and on nothing else of the machine.
    """

    num_pages: int
    page_size: int  # tokens
    page_bytes: int

    def regions(self, page: int) -> tuple[Region, ...]:
        """Where the bytes of a page lie; constant over the life of the pool.

        Raises:
            ValueError: there is no such page.
        """
        ...

    def copy_tokens(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy the first tokens of pages into other pages: (source, target, tokens).

        As if one after another, in the stream of the step; what is behind the tokens of a target
        may be overwritten.

        Raises:
            ValueError: there is no such page, or it has fewer tokens.
        """
        ...

    def host_buffer(self, num_pages: int) -> NDArray[np.uint8]:
        """New host memory for so many pages that transfers take: pinned where that is needed."""
        ...

    def export(
        self, pages: IntArray, buffer: NDArray[np.uint8], *, checksum: bool = False
    ) -> Transfer:
        """Begin to copy pages into `buffer`, one after another.

        What steps launched before have written is copied. With `checksum` each page is hashed.

        Raises:
            ValueError: there is no such page, or the buffer is too small, read-only or not pinned.
        """
        ...

    def import_(
        self, pages: IntArray, buffer: NDArray[np.uint8], *, checksums: Checksums | None = None
    ) -> Transfer:
        """Begin to fill pages from `buffer`; the reverse of `export`.

        With `checksums` nothing is written before all of them were found right.

        Raises:
            ValueError: as for `export`, or a page comes twice, or there is not one checksum a page.
        """
        ...


def copy_tokens(groups: Sequence[PageMemory], copies: Sequence[tuple[int, int, int, int]]) -> None:
    """All copies of a step, (source, target, tokens, group): one call for each group that has any.

    Raises:
        ValueError: there is no such group, page or token.
    """
    by_group: dict[int, list[tuple[int, int, int]]] = {}
    for source, target, num_tokens, group in copies:
        by_group.setdefault(group, []).append((source, target, num_tokens))
    for group, some in by_group.items():
        if not 0 <= group < len(groups):
            raise ValueError(f"copies of KV group {group}: there are {len(groups)}")
        groups[group].copy_tokens(some)
