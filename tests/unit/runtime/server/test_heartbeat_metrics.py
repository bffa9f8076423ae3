"""Fields of heartbeats as metrics: every name of the tables is a field, with its value."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from sylvan.protocol.disagg import DisaggLoad
from sylvan.protocol.tiers import TierLoad
from sylvan.runtime.server.disagg_metrics import DisaggMetrics
from sylvan.runtime.server.tier_metrics import TierMetrics

LABELS = {"model_name": "m"}


def registry(collector):
    made = CollectorRegistry(auto_describe=False)
    made.register(collector)
    return made


def test_roles_tell_their_queues_and_failures():
    load = DisaggLoad(mode="decode", decode_transfer_queue_reqs=3, transfer_failed=2)

    found = registry(DisaggMetrics(lambda: load, "sglang:", LABELS))

    assert found.get_sample_value("sglang:num_decode_transfer_queue_reqs", LABELS) == 3
    assert found.get_sample_value("sglang:num_transfer_failed_reqs_total", LABELS) == 2
    bound = LABELS | {"le": "+Inf"}
    assert found.get_sample_value("sglang:kv_transfer_latency_ms_bucket", bound) == 0


def test_tiers_tell_what_they_read_and_hold():
    load = TierLoad(found_tokens=64, host_used_tokens=48)

    found = registry(TierMetrics(lambda: load, "sglang:", LABELS))

    assert found.get_sample_value("sglang:storage_prefetch_hit_tokens_total", LABELS) == 64
    assert found.get_sample_value("sglang:hicache_host_used_tokens", LABELS) == 48


def test_nothing_is_reported_without_them():
    for collector in (DisaggMetrics, TierMetrics):
        assert list(collector(lambda: None, "sglang:", LABELS).collect()) == []
