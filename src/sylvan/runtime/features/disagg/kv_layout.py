"""Which KV of a prompt is transferred, by KV group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.cache.types import KVHandle
from sylvan.runtime.features.disagg.work import PageSet


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV groups of a model, in page table order; recurrent states last.

    Pages of a first group with full attention are sent in chunks. Window pages and recurrent states
    are sent once, as page sets, for the position from which the decode server continues.
    """

    groups: Sequence[KVGroup]

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.groups[0].page_size

    @property
    def streams(self) -> bool:
        """Whether the pages of the first group are sent in chunks."""
        return self.groups[0].kind in ("full", "latent")

    @property
    def has_states(self) -> bool:
        """Whether there is a recurrent state to send."""
        return self.groups[-1].kind == "state"

    def covered(self, num_tokens: int) -> int:
        """Return the number of prompt tokens whose KV is sent; the decode server computes the rest.

        All but the last, which is sampled from. States exist at page boundaries only.
        """
        limit = max(0, num_tokens - 1)
        return limit // self.page_size * self.page_size if self.has_states else limit

    def pages(self, covered: int) -> int:
        """Return the number of pages for a number of tokens."""
        return -(-covered // self.page_size)

    def windows(self, kv: KVHandle, first: int, covered: int) -> tuple[PageSet, ...]:
        """Return the window pages that tokens from `covered` on read, from entry `first` on."""
        stop, found = self.pages(covered), []
        for number, (group, table) in enumerate(zip(self.groups, kv.tables, strict=False)):
            if group.kind != "window":
                continue
            start = min(max(first, group.first_page(covered)), stop)
            found.append(PageSet(number, tuple(table.pages[start:stop].tolist())))
        return tuple(page_set for page_set in found if page_set.pages)

    def state(self, slot: int) -> PageSet:
        """Return the page set of a recurrent state."""
        return PageSet(len(self.groups) - 1, (slot,))
