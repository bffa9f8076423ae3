from __future__ import annotations

import numpy as np
import pytest

from sylvan.protocol.errors import ExecutorError
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.cache.types import CacheKey, KVHandle, Node, WindowTable
from sylvan.runtime.core.req import Batch, Growth, Req, Slice
from sylvan.runtime.sched.plan_builder import PlanBuilder


def handle(*pages: int) -> KVHandle:
    ids = np.array([*pages, -1, -1], np.int32)
    empty = np.empty(0, np.int32)
    return KVHandle(Node(empty, empty, None), CacheKey(empty), ids, len(pages), 0, 0)


def req(rid: str, *ids: int, pages=(5,), outputs=(), logprobs=None) -> Req:
    made = Req(
        GenerateRequest(
            rid=rid,
            input_ids=np.array(ids, np.int32),
            output_ids=np.array(outputs, np.int32),
            sampling=SamplingParams(sampling_seed=1),
            logprobs=logprobs,
        )
    )
    made.kv = handle(*pages)
    return made


def piece(req: Req, start: int, stop: int, samples: bool = True) -> Slice:
    return Slice(req, start, stop, samples)


def growth(*reqs: Req) -> Growth:
    return Growth(reqs, np.array([req.kv.view()[-1] for req in reqs], np.int32))


def updates(plan) -> list[tuple[int, int, list[int]]]:
    """(slot, first entry, pages) of each request whose pages changed."""
    found: dict[int, tuple[int, int, list[int]]] = {}
    for group, slot, entry, page in plan.pages.T.tolist():
        assert group == 0
        _, start, pages = found.setdefault(slot, (slot, entry, []))
        assert entry == start + len(pages)
        pages.append(page)
    return list(found.values())


def test_new_requests_get_slots_and_tell_all():
    builder = PlanBuilder(4)
    a, b = req("a", 1, 2, 3, pages=(5, 6)), req("b", 8, 9, pages=(7,), outputs=(4,))

    plan = builder.build(Batch((piece(a, 0, 2, False), piece(b, 0, 3))))

    assert plan.slots.tolist() == [0, 1]
    assert plan.input_ids.tolist() == [1, 2, 8, 9, 4]
    assert plan.samples.tolist() == [1]
    assert updates(plan) == [(0, 0, [5, 6]), (1, 0, [7])]
    assert [(j.slot, j.outputs.tolist()) for j in plan.joins] == [(0, []), (1, [4])]


def test_later_plans_have_changes_only():
    builder, a = PlanBuilder(4), req("a", 1, 2, 3, pages=(5,))
    builder.build(Batch((piece(a, 0, 3),)))
    a.pending = 1
    a.kv.pages[1], a.kv.num_pages = 6, 2

    plan = builder.build(Batch((piece(a, 3, 4),)))

    assert updates(plan) == [(0, 1, [6])]
    assert not plan.joins
    assert plan.in_flight.tolist() == [0]
    assert plan.in_flight_slots.tolist() == [0]


@pytest.mark.parametrize("change", ["other handle", "other version"])
def test_changed_pages_are_sent_from_the_start(change):
    builder, a = PlanBuilder(4), req("a", 1, 2, pages=(5, 6))
    builder.build(Batch((piece(a, 0, 2),)))
    if change == "other handle":
        a.kv = handle(8, 6)
    else:
        a.kv.pages[0] = 8
        a.kv.version += 1

    plan = builder.build(Batch((piece(a, 0, 2),)))

    assert updates(plan) == [(0, 0, [8, 6])]
    assert not plan.joins


def test_ended_requests_free_their_slot_at_once():
    builder, a = PlanBuilder(1), req("a", 1)
    builder.build(Batch((piece(a, 0, 1),)))

    plan = builder.build(Batch((piece(req("b", 2), 0, 1),), ended=("a", "unknown")))

    assert plan.leaves == [0]
    assert [j.request.rid for j in plan.joins] == ["b"]


def test_a_rid_may_come_back_as_another_request():
    builder = PlanBuilder(2)
    builder.build(Batch((piece(req("a", 1), 0, 1),)))

    plan = builder.build(Batch((piece(req("a", 9), 0, 1),)))

    assert plan.leaves == [0]
    assert [j.request.input_ids.tolist() for j in plan.joins] == [[9]]


def test_waiting_requests_without_memory_yield_their_slot():
    builder, a = PlanBuilder(1), req("a", 1)
    builder.build(Batch((piece(a, 0, 1),)))
    a.kv = None
    builder.build(Batch((piece(req("b", 2), 0, 1),)))
    a.kv = handle(3)
    a.tokens.append(77)

    plan = builder.build(Batch((piece(a, 0, 2),), ended=("b",)))

    assert [j.outputs.tolist() for j in plan.joins] == [[77]]


def test_more_requests_than_slots_is_an_error():
    work = tuple(piece(req(rid, 1), 0, 1) for rid in "ab")

    with pytest.raises(ExecutorError, match="slots"):
        PlanBuilder(1).build(Batch(work))


def test_a_plan_does_not_see_later_changes():
    builder, a = PlanBuilder(1), req("a", 1, 2, 3, pages=(5, 6))
    plan = builder.build(Batch((piece(a, 0, 3),)))

    a.tokens.truncate(1)
    a.tokens.append(50)
    a.kv.pages[:] = 9

    assert plan.input_ids.tolist() == [1, 2, 3]
    assert updates(plan) == [(0, 0, [5, 6])]


def test_steps_of_the_same_decodes_follow_from_the_step_before():
    """Told or not that a step only decodes, a builder tells the executor the same."""
    told, asked = PlanBuilder(4), PlanBuilder(4)
    a, b = req("a", 1, 2, 3, pages=(5,)), req("b", 8, 9, pages=(7,))
    for builder in (told, asked):
        builder.build(Batch((piece(a, 0, 3), piece(b, 0, 2))))
    for step in range(5):
        for one in (a, b):
            one.tokens.append(40 + step)
        if step == 2:
            a.kv.pages[1], a.kv.num_pages = 6, 2
        if step == 3:
            b.kv = handle(4, 6)
        slices = (piece(a, 3 + step, 4 + step), piece(b, 2 + step, 3 + step))
        fast, slow = told.build(Batch(slices, num_decodes=len(slices))), asked.build(Batch(slices))
        for name in ("slots", "starts", "stops", "samples"):
            assert getattr(fast, name).tolist() == getattr(slow, name).tolist()
        assert updates(fast) == updates(slow)
        if step:  # the executor has the newest token of each slot
            assert fast.in_flight_slots.tolist() == fast.slots.tolist()
            assert fast.in_flight.tolist() == [0, 1]
        else:
            assert fast.input_ids.tolist() == slow.input_ids.tolist() == [40, 40]


def test_slices_that_moved_on_are_planned_from_who_got_memory():
    """Asked to look at those alone or at all, a builder tells the executor the same."""
    told, asked = PlanBuilder(4), PlanBuilder(4)
    a, b = req("a", 1, 2, 3, pages=(5,)), req("b", 8, 9, pages=(7,))
    slices = (piece(a, 3, 4), piece(b, 2, 3))
    for step in range(5):
        grown = None
        for one, work in zip((a, b), slices, strict=True):
            one.tokens.append(40 + step)
            if step:
                work.start, work.stop, grown = work.start + 1, work.stop + 1, Growth()
        if step == 3:
            b.kv.pages[1], b.kv.num_pages = 6, 2
            grown = growth(b)
        copied = tuple(piece(work.req, work.start, work.stop) for work in slices)
        fast = told.build(Batch(slices, num_decodes=2, growth=grown))
        slow = asked.build(Batch(copied))
        for name in ("slots", "starts", "stops", "samples"):
            assert getattr(fast, name).tolist() == getattr(slow, name).tolist()
        assert updates(fast) == updates(slow)


@pytest.mark.parametrize(("tells", "in_flight"), [(False, False), (False, True), (True, False)])
def test_decodes_before_a_prompt_are_laid_out_together(tells, in_flight):
    """Told or not how many slices are plain decodes, a builder tells the executor the same."""
    told, asked = PlanBuilder(4), PlanBuilder(4)
    a, b, c = req("a", 1, 2, pages=(5,)), req("b", 8, pages=(7,)), req("c", 3, 4, 5, pages=(9,))
    for builder in (told, asked):
        builder.build(Batch((piece(a, 0, 2), piece(b, 0, 1))))
    for one in (a, b):
        one.pending = 1
        if not in_flight or one is b:
            one.tokens.append(40)
        else:
            one.pending = 2
    b.kv.pages[1], b.kv.num_pages = 6, 2
    slices = (piece(a, 2, 3), piece(b, 1, 2), piece(c, 0, 3))

    fast = told.build(Batch(slices, num_decodes=2, growth=growth(b) if tells else None))
    slow = asked.build(Batch(slices))

    for name in ("slots", "starts", "stops", "samples", "in_flight", "in_flight_slots"):
        assert getattr(fast, name).tolist() == getattr(slow, name).tolist()
    known = [row for row in range(5) if row not in fast.in_flight]
    assert fast.input_ids[known].tolist() == slow.input_ids[known].tolist()
    assert fast.in_flight.tolist() == [0] * in_flight
    assert updates(fast) == updates(slow)
    assert len(fast.joins) == 1


def test_each_group_has_pages_of_its_own():
    builder = PlanBuilder(4)
    a = req("a", 1, 2, 3, pages=(5, 6))
    a.kv.windows = (WindowTable(np.array([0, 8, 0, 0], np.int32), first=1),)

    first = builder.build(Batch((piece(a, 0, 3),)))
    a.tokens.append(40)
    a.kv.pages = np.array([5, 6, 7, 0], np.int32)
    a.kv.windows[0].pages[2], a.kv.num_pages = 9, 3
    second = builder.build(Batch((piece(a, 3, 4),), num_decodes=1, growth=growth(a)))
    a.kv.has_full, a.kv.version = False, a.kv.version + 1
    third = builder.build(Batch((piece(a, 4, 5),)))

    assert first.pages.T.tolist() == [[0, 0, 0, 5], [0, 0, 1, 6], [1, 0, 0, 0], [1, 0, 1, 8]]
    assert second.pages.T.tolist() == [[0, 0, 2, 7], [1, 0, 2, 9]]
    assert third.pages.T.tolist() == [[0, 0, 0, 0], [0, 0, 1, 8], [0, 0, 2, 9]]


def test_slices_that_another_step_came_between_are_looked_at():
    builder = PlanBuilder(4)
    a, b = req("a", 1, 2, pages=(5,)), req("b", 8, 9, pages=(7,))
    slices = (piece(a, 2, 3),)
    a.tokens.append(40)
    builder.build(Batch(slices, num_decodes=len(slices)))
    builder.build(Batch((piece(b, 0, 2),)))
    a.tokens.append(41)
    a.kv.pages[1], a.kv.num_pages = 6, 2
    slices[0].start, slices[0].stop = 3, 4

    plan = builder.build(Batch(slices, num_decodes=1, growth=growth(a)))

    assert plan.starts.tolist() == [3]
    assert plan.input_ids.tolist() == [41]
    assert updates(plan) == [(0, 1, [6])]


def test_other_decodes_are_looked_at_again():
    builder = PlanBuilder(4)
    a, b = req("a", 1, 2, pages=(5,)), req("b", 8, 9, pages=(7,))
    builder.build(Batch((piece(a, 0, 2), piece(b, 0, 2))))
    for one in (a, b):
        one.tokens.append(40)
    builder.build(Batch((piece(a, 2, 3), piece(b, 2, 3)), num_decodes=2))
    b.tokens.append(41)

    plan = builder.build(Batch((piece(b, 3, 4),), ended=("a",), num_decodes=1))

    assert plan.leaves == [0]
    assert plan.slots.tolist() == [1]
    assert plan.starts.tolist() == [3]
    assert plan.input_ids.tolist() == [41]
