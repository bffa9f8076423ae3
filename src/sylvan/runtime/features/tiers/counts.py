"""Counters of the tiers, for metrics and answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from sylvan.runtime.storage.record import Fault


@dataclass(slots=True)
class TierCounts:
    """Totals since the start.

    Attributes:
        offered_tokens: Tokens of nodes to be written, whether or not the store had them.
        refused_tokens: Not written, because too much was in flight.
        stored_pages, stored_bytes, store_seconds: Written to the store, all groups together.
        lost_pages: Pages that could not be written.
        fetches: Lookups for requests.
        found_tokens: Tokens that the store had.
        fetched_tokens, fetched_bytes, fetch_seconds: Read into host memory.
        unfulfilled_tokens: Found, but not fetched when the request started.
        loaded_tokens, loaded_bytes, load_seconds: Loaded to the device instead of computed.
        failed_loads: Failed loads; their requests recomputed.
        skipped_fetches: Not started, because recomputing was expected to be faster.
        saved_seconds: Time saved by loading, as far as speeds were measured.
        host_offered_tokens: Tokens of nodes to be copied to the host tier.
        host_refused_tokens: Not copied, because too much was in flight.
        host_saved_bytes, host_save_seconds: Copied there; encoded bytes.
        host_loaded_tokens, host_loaded_bytes, host_load_seconds: Loaded to the device from there,
            and the read time.
        faults: Records that were rejected, by reason.
        errors: Failed calls of the store.
    """

    offered_tokens: int = 0
    refused_tokens: int = 0
    stored_pages: int = 0
    stored_bytes: int = 0
    store_seconds: float = 0.0
    lost_pages: int = 0
    fetches: int = 0
    found_tokens: int = 0
    fetched_tokens: int = 0
    fetched_bytes: int = 0
    fetch_seconds: float = 0.0
    unfulfilled_tokens: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    failed_loads: int = 0
    skipped_fetches: int = 0
    saved_seconds: float = 0.0
    errors: int = 0
    host_offered_tokens: int = 0
    host_refused_tokens: int = 0
    host_saved_bytes: int = 0
    host_save_seconds: float = 0.0
    host_loaded_tokens: int = 0
    host_loaded_bytes: int = 0
    host_load_seconds: float = 0.0
    faults: dict[Fault, int] = field(default_factory=dict[Fault, int])

    def on_faults(self, faults: dict[Fault, int]) -> None:
        """Count rejected records."""
        for fault, count in faults.items():
            self.faults[fault] = self.faults.get(fault, 0) + count
