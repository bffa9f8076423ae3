"""Statistics of KV transfers between prefill and decode servers."""

from __future__ import annotations

import msgspec

SPEEDS_GB_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
TIMES_MS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 20_000.0)
SIZES_MB = (0.1, 0.5, 1.0, 5.0, 10.0, 50.0, 100.0, 500.0, 1000.0, 5000.0)


class Spread(msgspec.Struct, frozen=True):
    """Histogram: how often a value was at most each bound (last: above all), and the sum."""

    counts: tuple[int, ...] = ()
    total: float = 0.0


class DisaggLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Current queue lengths, and counts and times since the start. Names are SGLang's.

    Attributes:
        mode: The role the server was started with.
        prefill_bootstrap_queue_reqs: Requests that no decode server has asked for yet.
        prefill_inflight_queue_reqs: Requests whose KV is being sent to a decode server.
        decode_prealloc_queue_reqs: Requests that wait for memory.
        decode_transfer_queue_reqs: Requests that wait for KV.
        decode_retracted_queue_reqs: Retracted requests that get their KV again.
        bootstrap_failed: Requests for which the two servers did not connect.
        transfer_failed: Requests whose KV did not arrive.
        prefill_retries: Requests that asked a prefill server again.
        speed_gb_s: Speed of transfers.
        latency_ms: From the request for pages, or the last page computed, until all arrived.
        bootstrap_ms: From arrival until the servers were connected.
        alloc_ms: From arrival until memory was allocated.
        total_mb: Size of transfers.
        last_speed_gb_s: Speed of the last transfer.
        last_latency_ms: Latency of the last transfer.
    """

    mode: str
    prefill_bootstrap_queue_reqs: int = 0
    prefill_inflight_queue_reqs: int = 0
    decode_prealloc_queue_reqs: int = 0
    decode_transfer_queue_reqs: int = 0
    decode_retracted_queue_reqs: int = 0
    bootstrap_failed: int = 0
    transfer_failed: int = 0
    prefill_retries: int = 0
    speed_gb_s: Spread = Spread()
    latency_ms: Spread = Spread()
    bootstrap_ms: Spread = Spread()
    alloc_ms: Spread = Spread()
    total_mb: Spread = Spread()
    last_speed_gb_s: float = 0.0
    last_latency_ms: float = 0.0
