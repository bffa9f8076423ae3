from __future__ import annotations

from sylvan.config.route import BreakerConfig, HealthConfig
from sylvan.gateway.workers.worker import Health
from sylvan.utils.clock import VirtualClock
from tests.support.gateway import make_worker


def test_load_counts_from_begin_to_close():
    worker = make_worker(0, VirtualClock())
    first, second = worker.begin(100), worker.begin(50)
    assert (worker.load, worker.queued_tokens) == (2, 150)

    first.answered()
    first.answered()
    assert (worker.load, worker.queued_tokens) == (2, 50)

    first.close()
    first.close()
    second.close()
    assert (worker.load, worker.queued_tokens) == (0, 0)


def test_the_load_of_others_and_the_cost_weigh():
    worker = make_worker(0, VirtualClock(), cost=2.0)
    worker.foreign_load = 3
    worker.begin()

    assert worker.load == 4
    assert worker.weighted_load == 8.0


def test_a_verdict_counts_once():
    worker = make_worker(0, VirtualClock())
    dispatch = worker.begin()
    dispatch.failed()
    dispatch.succeeded()
    dispatch.close()

    assert worker.breaker.failures == 1


def test_health_changes_at_thresholds():
    health = Health()
    assert health.see(True, 1.0, (2, 3))  # the first check decides at once
    assert [health.see(False, t, (2, 3)) for t in (2.0, 3.0)] == [False, False]
    assert health.healthy
    assert health.see(False, 4.0, (2, 3))
    assert not health.see(True, 5.0, (2, 3))
    assert not health.healthy
    assert health.see(True, 6.0, (2, 3))
    assert health.healthy


def test_a_worker_that_was_lost_and_is_back_is_given_requests_at_once():
    worker = make_worker(0, VirtualClock())
    config = HealthConfig()
    for _ in range(BreakerConfig().failures):
        worker.begin().failed()
    assert not worker.available

    worker.record_health(True, config)
    assert not worker.available  # it was healthy all the time: requests fail nevertheless

    for _ in range(config.failures):
        worker.record_health(False, config)
    for _ in range(config.successes):
        worker.record_health(True, config)
    assert worker.available
    assert worker.breaker.closed
