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


class TierLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How much went to the store and came from it since the start.

    Attributes:
        found_tokens: That the store had for requests.
        fetched_tokens, fetched_bytes, fetch_seconds: Read into host memory.
        unfulfilled_tokens: Found, but not there when the request began.
        skipped_fetches: Not begun, because computing was expected to be faster.
        loaded_tokens, loaded_bytes, load_seconds: Filled on the device.
        failed_loads: Of requests, which computed instead.
        saved_seconds: By loading instead of computing, as far as speeds were measured.
        stored_tokens, stored_bytes, store_seconds: Written.
        refused_tokens: Not written, because too much was on its way.
        lost_pages: That could not be written.
        wrong_pages: Torn, foreign or stale: not used.
        errors: Calls of the store that failed.
        known_pages: That the prefix tree knows to be there, now.
        pending_bytes: On their way there, now.
        fetch_bytes_per_s, host_bytes_per_s: Measured speeds of the store and of the host tier.
        stores: Schedulers that have a store, now.
        host_used_tokens, host_total_tokens: Of the tier in host memory, now.
        host_refused_tokens: Not copied there, because too much was on its way.
        host_saved_bytes, host_save_seconds: Copied there.
        host_loaded_tokens, host_loaded_bytes, host_load_seconds: Filled on the device from there.
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
