"""Which KV of a prompt is handed over, by KV group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.cache.types import KVHandle
from sylvan.runtime.features.disagg.data import Lot


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV groups of a model, in the order of page tables; states last.

    Pages of a first group that attends to everything are handed over chunk by chunk. Window pages
    and recurrent states are handed over once, as lots, for the position from which the decode
    server computes.
    """

    groups: Sequence[KVGroup]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.groups[0].page_size

    @property
    def streams(self) -> bool:
        """Whether the pages of the first group go chunk by chunk."""
        return self.groups[0].kind in ("full", "latent")

    @property
    def has_states(self) -> bool:
        """Whether a recurrent state goes along."""
        return self.groups[-1].kind == "state"

    def covered(self, num_tokens: int) -> int:
        """Tokens of a prompt whose KV is handed over; the decode server computes the others.

        All but the last, which samples. States are kept at page boundaries only.
        """
        most = max(0, num_tokens - 1)
        return most // self.page_size * self.page_size if self.has_states else most

    def pages(self, covered: int) -> int:
        """Pages that hold so many tokens."""
        return -(-covered // self.page_size)

    def windows(self, kv: KVHandle, first: int, covered: int) -> tuple[Lot, ...]:
        """Pages of window groups that tokens from `covered` on read, from entry `first` on."""
        stop, found = self.pages(covered), []
        for number, (group, table) in enumerate(zip(self.groups, kv.tables, strict=False)):
            if group.kind != "window":
                continue
            start = min(max(first, group.first_page(covered)), stop)
            found.append(Lot(number, tuple(table.pages[start:stop].tolist())))
        return tuple(lot for lot in found if lot.pages)

    def state(self, slot: int) -> Lot:
        """The lot of a recurrent state."""
        return Lot(len(self.groups) - 1, (slot,))
