"""KV pages and recurrent states as bytes, for code that moves them. No tensors."""

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
    """A contiguous part of one page: `num_bytes` bytes at `address`, in the pool's address space.

    The same part of the next page is `stride` bytes further, so the regions of page 0 describe all
    pages.
    """

    address: int
    stride: int
    num_bytes: int


class Transfer(Protocol):
    """A running copy of pages between a pool and host memory.

    Keep it until it is done. Until then, do not change or free the host memory or exported pages,
    and do not read or write imported pages.

    A failed import may have written some of its pages, but none if a checksum is wrong. `num_bytes`
    is the size of the copy.
    """

    num_bytes: int

    @property
    def error(self) -> str | None:
        """Why the transfer failed; None: it succeeded, or is still running."""
        ...

    @property
    def checksums(self) -> Checksums | None:
        """Checksums of a finished export, one per page, if requested."""
        ...

    def done(self) -> bool:
        """Whether the transfer has succeeded or failed; never blocks."""
        ...

    def wait(self) -> None:
        """Block until the transfer has succeeded or failed."""
        ...


class PageMemory(Protocol):
    """The bytes of one KV group in pages, or of recurrent states in slots (pages of one token).

    An exported page is its regions one after another: `page_bytes` bytes, whose layout depends only
    on the model, the dtype, the page size and the kind of pool.
    """

    num_pages: int
    page_size: int  # tokens
    page_bytes: int

    def regions(self, page: int) -> tuple[Region, ...]:
        """Memory regions of a page; constant for the life of the pool.

        Raises:
            ValueError: no such page.
        """
        ...

    def copy_tokens(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy the first tokens of pages into other pages: (source, target, tokens).

        Runs in the stream of the step, with the effect of one copy after another; may overwrite
        target tokens beyond those copied.

        Raises:
            ValueError: no such page, or it has fewer tokens.
        """
        ...

    def host_buffer(self, num_pages: int) -> NDArray[np.uint8]:
        """Allocate host memory for transfers of that many pages: pinned where needed."""
        ...

    def export(
        self, pages: IntArray, buffer: NDArray[np.uint8], *, checksum: bool = False
    ) -> Transfer:
        """Start copying pages into `buffer`, in order.

        Includes the writes of all steps launched before. With `checksum`, each page is hashed.

        Raises:
            ValueError: no such page, or the buffer is too small, read-only or not pinned.
        """
        ...

    def import_(
        self, pages: IntArray, buffer: NDArray[np.uint8], *, checksums: Checksums | None = None
    ) -> Transfer:
        """Start filling pages from `buffer`; the reverse of `export`.

        With `checksums`, all pages are verified before the first write.

        Raises:
            ValueError: as for `export`, a page is repeated, or the number of checksums differs.
        """
        ...


def copy_tokens(groups: Sequence[PageMemory], copies: Sequence[tuple[int, int, int, int]]) -> None:
    """Run all copies (source, target, tokens, group) of a step: one call per group.

    Raises:
        ValueError: no such group, page or token.
    """
    by_group: dict[int, list[tuple[int, int, int]]] = {}
    for source, target, num_tokens, group in copies:
        by_group.setdefault(group, []).append((source, target, num_tokens))
    for group, some in by_group.items():
        if not 0 <= group < len(groups):
            raise ValueError(f"copies of KV group {group}: there are {len(groups)}")
        groups[group].copy_tokens(some)
