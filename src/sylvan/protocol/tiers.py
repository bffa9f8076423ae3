"""Commands about the store of KV below the prefix cache. Each scheduler answers for itself."""

from __future__ import annotations

from typing import Literal

import msgspec

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
PrefetchWait = Literal["best_effort", "wait_complete", "timeout"]


class AttachStore(msgspec.Struct, frozen=True, kw_only=True, tag="attach_store"):
    """Use a store; refused while there is one. What is None stays as the server was started with.

    Attributes:
        url: Of the store.
        write_policy: When KV goes there.
        prefetch: How long requests wait for what it has.
        prefetch_min_tokens: Fewer are computed.
        prefetch_timeout_s: For any number of tokens, where `prefetch` is `timeout`.
        prefetch_timeout_per_ki_token_s: And for each 1024 of them.
        max_bytes: In the store.
        namespace_bytes: In each namespace of it.
        ttl_s: A page that was not used for so long is forgotten.
    """

    url: str
    write_policy: WritePolicy | None = None
    prefetch: PrefetchWait | None = None
    prefetch_min_tokens: int | None = None
    prefetch_timeout_s: float | None = None
    prefetch_timeout_per_ki_token_s: float | None = None
    max_bytes: int | None = None
    namespace_bytes: int | None = None
    ttl_s: float | None = None


class DetachStore(msgspec.Struct, frozen=True, kw_only=True, tag="detach_store"):
    """Use no store any more; what it holds stays there."""


class ClearStore(msgspec.Struct, frozen=True, kw_only=True, tag="clear_store"):
    """Remove all pages of the store."""


class DescribeTiers(msgspec.Struct, frozen=True, kw_only=True, tag="describe_tiers"):
    """Which store there is, how it is used, and what was counted."""


TierCommand = AttachStore | DetachStore | ClearStore | DescribeTiers
