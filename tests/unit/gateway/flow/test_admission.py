from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from sylvan.config.route import RouteLimitsConfig
from sylvan.gateway.errors import QueueFullError, QueueTimeoutError
from sylvan.gateway.flow.admission import GatewayAdmission
from sylvan.utils.clock import VirtualClock


def admission(**limits):
    return GatewayAdmission(RouteLimitsConfig(**limits), VirtualClock())


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_without_limits_everybody_comes_in():
    gate = admission()

    permits = [await gate.enter() for _ in range(1000)]

    assert gate.num_inside == 1000
    for permit in permits:
        permit.close()
        permit.close()
    assert gate.num_inside == 0


async def test_the_next_comes_in_when_one_leaves():
    gate = admission(max_concurrent=1)
    first = await gate.enter()
    second = asyncio.create_task(gate.enter())
    await settle()
    assert not second.done()

    first.close()

    assert await second
    assert (gate.num_inside, gate.num_waiting) == (1, 0)


async def test_order_of_one_tenant_is_kept():
    gate = admission(max_concurrent=1)
    permit, order = await gate.enter(), []

    async def ask(number):
        mine = await gate.enter()
        order.append(number)
        mine.close()

    tasks = [asyncio.create_task(ask(i)) for i in range(10)]
    await settle()
    permit.close()
    await asyncio.gather(*tasks)

    assert order == list(range(10))


async def test_tenants_take_turns():
    gate = admission(max_concurrent=1)
    permit, order = await gate.enter("other"), []

    async def ask(tenant):
        mine = await gate.enter(tenant)
        order.append(tenant)
        mine.close()

    tasks = [asyncio.create_task(ask("loud")) for _ in range(20)]
    await settle()
    tasks += [asyncio.create_task(ask("calm")) for _ in range(3)]
    await settle()
    permit.close()
    await asyncio.gather(*tasks)

    assert Counter(order[:6]) == {"loud": 3, "calm": 3}


async def test_a_full_queue_refuses_who_fills_it():
    gate = admission(max_concurrent=1, queue_size=2)
    await gate.enter("a")
    tasks = [asyncio.create_task(gate.enter("a")) for _ in range(2)]
    await settle()

    with pytest.raises(QueueFullError, match="1 requests are running and 2 are queued") as caught:
        await gate.enter("a")

    assert caught.value.status == 429
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert gate.num_waiting == 0


async def test_one_tenant_cannot_fill_the_queue():
    gate = admission(max_concurrent=1, queue_size=4)
    await gate.enter()
    loud = [asyncio.create_task(gate.enter("loud")) for _ in range(4)]
    await settle()
    calm = asyncio.create_task(gate.enter("calm"))
    await settle()

    assert not calm.done()
    with pytest.raises(QueueFullError):
        await loud[-1]
    for task in (*loud, calm):
        task.cancel()
    await asyncio.gather(*loud, calm, return_exceptions=True)


async def test_a_queue_of_no_size_refuses_at_once():
    gate = admission(max_concurrent=1, queue_size=0)
    await gate.enter()

    with pytest.raises(QueueFullError):
        await gate.enter()


async def test_waiting_has_an_end():
    gate = admission(max_concurrent=1, queue_timeout_s=0.001)
    await gate.enter()

    with pytest.raises(QueueTimeoutError, match="waited") as caught:
        await gate.enter()

    assert caught.value.status == 408
    assert gate.num_waiting == 0


async def test_who_leaves_the_queue_takes_no_place():
    gate = admission(max_concurrent=1)
    permit = await gate.enter()
    gone, stays = asyncio.create_task(gate.enter()), asyncio.create_task(gate.enter())
    await settle()
    gone.cancel()
    await settle()
    permit.close()

    assert await stays
    assert gate.num_inside == 1


async def test_who_leaves_as_its_turn_comes_gives_it_back():
    gate = admission(max_concurrent=1)
    permit = await gate.enter()
    gone = asyncio.create_task(gate.enter())
    await settle()
    permit.close()  # its turn
    gone.cancel()  # before it could notice
    await asyncio.gather(gone, return_exceptions=True)

    assert gate.num_inside == 0


async def test_the_rate_is_bounded_with_bursts():
    clock = VirtualClock()
    gate = GatewayAdmission(RouteLimitsConfig(rate_per_s=1000.0, max_concurrent=3), clock)
    for _ in range(3):
        (await gate.enter()).close()
    waiting = asyncio.create_task(gate.enter())
    await settle()
    assert not waiting.done()

    clock.advance(0.001)

    assert await waiting


async def test_wider_bounds_let_those_in_who_wait():
    gate = admission(max_concurrent=1)
    await gate.enter()
    waiting = [asyncio.create_task(gate.enter()) for _ in range(3)]
    await settle()

    gate.change(RouteLimitsConfig(max_concurrent=3, queue_size=0))
    await settle()

    assert [task.done() for task in waiting] == [True, True, False]
    with pytest.raises(QueueFullError):
        await gate.enter()
    gate.change(RouteLimitsConfig())
    assert await waiting[2]
    assert gate.num_inside == 4
