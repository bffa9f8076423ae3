"""Commands for the KV store below the prefix cache. Each scheduler answers separately."""

from __future__ import annotations

from typing import Literal

import msgspec

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
PrefetchWait = Literal["best_effort", "wait_complete", "timeout"]


class AttachStore(msgspec.Struct, frozen=True, kw_only=True, tag="attach_store"):
    """Attach a store; rejected if there is one. None keeps the setting of the server's start.

    Attributes:
        url: URL of the store.
        write_policy: When KV is written to the store.
        prefetch: How long requests wait for KV from the store.
        prefetch_min_tokens: Shorter prefixes are computed instead.
        prefetch_timeout_s: Base timeout if `prefetch` is `timeout`.
        prefetch_timeout_per_ki_token_s: Additional timeout per 1024 tokens.
        max_bytes: Maximum size of the store.
        namespace_bytes: Maximum size of each namespace in it.
        ttl_s: Unused pages are removed after this time.
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
    """Detach the store; its contents stay."""


class ClearStore(msgspec.Struct, frozen=True, kw_only=True, tag="clear_store"):
    """Remove all pages of the store."""


class DescribeTiers(msgspec.Struct, frozen=True, kw_only=True, tag="describe_tiers"):
    """Describe the attached store, its settings and its statistics."""


class TierLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of KV tiers since the start.

    Attributes:
        found_tokens: Tokens found in the store for requests.
        fetched_tokens, fetched_bytes, fetch_seconds: Read into host memory.
        unfulfilled_tokens: Found, but not fetched when the request started.
        skipped_fetches: Not started, because computing was expected to be faster.
        loaded_tokens, loaded_bytes, load_seconds: Loaded onto the device.
        failed_loads: Failed loads; the requests computed instead.
        saved_seconds: Estimated time saved by loading instead of computing.
        stored_tokens, stored_bytes, store_seconds: Written to the store.
        refused_tokens: Not written, because too many writes were pending.
        lost_pages: Pages whose write failed.
        wrong_pages: Torn, foreign or stale pages, which were not used.
        errors: Failed calls of the store.
        known_pages: Pages of the store that the prefix tree knows now.
        pending_bytes: Bytes being written now.
        fetch_bytes_per_s, host_bytes_per_s: Measured speeds of the store and of the host tier.
        stores: Schedulers with a store now.
        host_used_tokens, host_total_tokens: Use and capacity of the host tier now.
        host_refused_tokens: Not copied to the host, because too many copies were pending.
        host_saved_bytes, host_save_seconds: Copied to the host tier.
        host_loaded_tokens, host_loaded_bytes, host_load_seconds: Loaded from the host tier.
    """

    found_tokens: int = 0
    fetched_tokens: int = 0
    fetched_bytes: int = 0
    fetch_seconds: float = 0.0
    unfulfilled_tokens: int = 0
    skipped_fetches: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    failed_loads: int = 0
    saved_seconds: float = 0.0
    stored_tokens: int = 0
    stored_bytes: int = 0
    store_seconds: float = 0.0
    refused_tokens: int = 0
    lost_pages: int = 0
    wrong_pages: int = 0
    errors: int = 0
    known_pages: int = 0
    pending_bytes: int = 0
    fetch_bytes_per_s: float = 0.0
    host_bytes_per_s: float = 0.0
    stores: int = 0
    host_used_tokens: int = 0
    host_total_tokens: int = 0
    host_refused_tokens: int = 0
    host_saved_bytes: int = 0
    host_save_seconds: float = 0.0
    host_loaded_tokens: int = 0
    host_loaded_bytes: int = 0
    host_load_seconds: float = 0.0


TierCommand = AttachStore | DetachStore | ClearStore | DescribeTiers
