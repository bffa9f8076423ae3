"""Requests wait for workers that were lost a moment ago, and for no others."""

from __future__ import annotations

import asyncio

import pytest

from sylvan.config.route import FailoverConfig, HealthConfig
from sylvan.gateway.workers.recovery import Recovery
from sylvan.gateway.workers.registry import Registry
from sylvan.utils.clock import VirtualClock
from tests.support.gateway import make_worker

CHECKS = HealthConfig()


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def registry():
    return Registry()


@pytest.fixture
def recovery(registry, clock):
    return Recovery(registry, FailoverConfig(wait_s=5.0, stall_s=5.0), clock)


async def test_requests_do_not_wait_without_known_workers(recovery):
    assert not await recovery.for_request(None, "regular", "http")


async def test_requests_do_not_wait_beside_a_healthy_worker(registry, recovery, clock):
    registry.add(make_worker(1, clock))

    assert await recovery.for_request(None, "regular", "http")


async def test_time_counts_from_the_loss(registry, recovery, clock):
    worker = make_worker(1, clock)
    registry.add(worker)
    clock.advance(100.0)
    worker.health.lost(clock())
    worker.changed()
    waiting = asyncio.create_task(recovery.for_request(None, "regular", "http"))
    await asyncio.sleep(0)
    assert not waiting.done()

    clock.advance(5.0)
    assert not await waiting
    assert not await recovery.for_request(None, "regular", "http")


async def test_a_worker_that_comes_back_ends_the_wait(registry, recovery, clock):
    worker = make_worker(1, clock)
    registry.add(worker)
    worker.health.lost(clock())
    worker.changed()
    waiting = asyncio.create_task(recovery.for_request(None, "regular", "http"))
    await asyncio.sleep(0)
    for _ in range(CHECKS.successes):
        worker.record_health(True, CHECKS)

    assert await waiting


async def test_failed_checks_are_a_loss_and_drained_workers_are_none(registry, recovery, clock):
    worker = make_worker(1, clock)
    registry.add(worker)
    for _ in range(CHECKS.failures):
        clock.advance(1.0)
        worker.record_health(False, CHECKS)
    assert registry.lost_s(None) == clock()

    worker.drain()
    assert registry.lost_s(None) is None
    assert not await recovery.for_request(None, "regular", "http")
