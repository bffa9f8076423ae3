"""KV groups: sets of layers that keep KV of the same tokens and share page tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

GroupKind = Literal["full", "latent", "window", "state"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KVGroup:
    """Memory shared by a set of layers.

    Attributes:
        name: Name for logs and statistics.
        kind: "full" and "latent" layers read the KV of all earlier tokens, "window" layers only of
          the last `window` tokens, "state" layers one recurrent state of fixed size.
        num_pages: Pages of the group, including the padding page 0; for a "state" group its slots,
          including the empty slot 0.
        page_size: Tokens per page; equal in all paged groups of a model.
        window: Number of tokens that a token of a "window" layer attends to, including itself.
        first: Added to the page numbers, where other memory of the same group has those before.
    """

    name: str
    kind: GroupKind
    num_pages: int
    page_size: int = 1
    window: int = 0
    first: int = 0

    def first_page(self, computed: int) -> int:
        """First page that tokens from position `computed` on read; 0 without a window."""
        return max(0, computed - self.window + 1) // self.page_size if self.window else 0

    def min_pages(self, step_tokens: int) -> int:
        """Pages that one request needs to compute `step_tokens` tokens at any position.

        Includes the padding page.
        """
        return -(-(self.window - 1 + step_tokens) // self.page_size) + 2

    @property
    def max_step_tokens(self) -> int:
        """Most tokens that one request can compute in a step at any position; see `min_pages`.

        0 if a window and one more token do not fit; requests must then fit into all pages.
        """
        return max(0, (self.num_pages - 2) * self.page_size - (self.window - 1))


def check_groups(groups: Sequence[KVGroup]) -> None:
    """Validate the groups of a model.

    Raises:
        ValueError: names the group and the problem.
    """
    paged = [group for group in groups if group.kind != "state"]
    if not paged:
        raise ValueError("a KV cache needs a full, latent or window group")
    if any(group.kind != "window" for group in paged[1:]):
        raise ValueError("only the first KV group may be full or latent: such layers share pages")
    if sum(group.kind == "state" for group in groups) > 1 or groups[0].kind == "state":
        raise ValueError("at most one KV group may hold states, and not the first")
    for group in groups:
        if group.page_size != paged[0].page_size and group.kind != "state":
            raise ValueError(
                f"group {group.name}: page_size is {group.page_size}, it must be "
                f"{paged[0].page_size} as in group {paged[0].name}"
            )
        if group.num_pages < 2 or group.page_size < 1:
            raise ValueError(f"group {group.name}: it has no memory")
        if (group.window > 0) != (group.kind == "window"):
            raise ValueError(f"group {group.name}: window {group.window} of a {group.kind} group")
