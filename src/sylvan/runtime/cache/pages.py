"""Allocator of KV pages."""

from __future__ import annotations

import numpy as np

from sylvan.protocol.arrays import IntArray


class PageAllocator:
    """Stack of free pages 1..num_pages-1; page 0 absorbs the writes of padding rows.

    A page is either free or allocated. Freeing a free page is a bug, which an assertion catches.
    """

    def __init__(self, num_pages: int, page_size: int, first: int = 0) -> None:
        """`first` is added to the page numbers, where other allocators have those before."""
        self.page_size = page_size
        self.num_pages = num_pages - 1
        self._stack: IntArray = np.arange(first + num_pages - 1, first, -1, dtype=np.int32)
        self._top = num_pages - 1
        self._is_free = np.ones(first + num_pages, np.bool_)
        # a memoryview: three times as fast for single numbers as indexing the array
        self._numbers, self._flags = self._stack.data, self._is_free.data

    @property
    def free_pages(self) -> int:
        """Pages that can be taken now."""
        return self._top

    def alloc(self, count: int) -> IntArray:
        """Take `count` pages.

        Raises:
            MemoryError: fewer pages are free; callers check `free_pages` first.
        """
        if count > self._top:
            raise MemoryError(f"{count} pages wanted, {self._top} free")
        self._top -= count
        pages = self._stack[self._top : self._top + count].copy()
        self._is_free[pages] = False
        return pages

    def alloc_one(self) -> int:
        """Take one page without building an array; 0 if none is free."""
        top = self._top
        if not top:
            return 0
        self._top = top = top - 1
        page = self._numbers[top]
        self._flags[page] = False
        return page

    def free(self, pages: IntArray) -> None:
        """Free pages."""
        count = len(pages)
        if count == 0:
            return
        assert not self._is_free[pages].any(), "a page is freed twice"
        self._is_free[pages] = True
        self._stack[self._top : self._top + count] = pages
        self._top += count

    def free_mask(self) -> np.ndarray:
        """Which page numbers are free, as booleans; page 0 and those of others count as free."""
        return self._is_free.copy()
