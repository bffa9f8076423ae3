"""Capabilities that refuse a request, and executors that bring more tokens than they computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from sylvan.protocol.errors import RequestError
from sylvan.protocol.messages import Finish
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.core.req import Req
from sylvan.runtime.core.step import SliceOutput
from sylvan.runtime.sched.capability import Capability, Verdict
from sylvan.runtime.sched.scheduler import Scheduler
from tests.support.kv import CheckingExecutor, Piece, World, digest, kv_groups, next_token, request

JUMP = 5


def following(token: int) -> list[int]:
    """Tokens that are certain after `token` has been sampled."""
    return [40 + i for i in range(token % 4)] if token % JUMP == 0 else []


def expected(req) -> list[int]:
    """Outputs of `req` alone, with the certain tokens put in where the model is not asked."""
    history, out = 0, []
    for token in req.input_ids.tolist():
        history = digest(history, token, "")
    while len(out) < req.sampling.max_new_tokens:
        token = next_token(history, req.sampling.sampling_seed)
        for new in [token, *following(token)]:
            out.append(new)
            history = digest(history, new, "")
            if new in req.eos_ids or len(out) == req.sampling.max_new_tokens:
                return out
    return out


class JumpingExecutor(CheckingExecutor):
    """Adds the certain tokens, and is void where the scheduler asks for what they replace."""

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        super().__init__(groups)
        self.next_position: dict[str, int] = {}

    def _output(self, piece: Piece) -> SliceOutput:
        rid = piece.rid
        if piece.samples and piece.stop < self.next_position.get(rid, 0):
            piece.occupant.newest = self.sampled[rid, piece.stop] = -1
            return SliceOutput()
        out = super()._output(piece)
        if not piece.samples:
            return out
        tokens = [out.token_ids[0], *following(out.token_ids[0])]
        self.next_position[rid] = piece.stop + len(tokens)
        return SliceOutput(tokens)


@pytest.mark.parametrize("inflight", [1, 2])
@pytest.mark.parametrize("pages", [12, 400])
def test_certain_tokens_are_appended_and_computed_together(inflight, pages) -> None:
    jumping = JumpingExecutor(kv_groups(pages + 1, 4))
    world = _with_executor(World(pages=pages, page_size=4, inflight=inflight), jumping)
    reqs = [
        request(str(i), [i + 1] * (i + 2), new=17, seed=i, eos_ids=(40,) if i == 3 else ())
        for i in range(6)
    ]
    for req in reqs:
        world.scheduler.add(req)
    world.run()

    for req in reqs:
        assert world.tokens[req.rid] == expected(req)
    world.check_empty()
    assert jumping.steps < 6 * 17


def _with_executor(world: World, executor: CheckingExecutor) -> World:
    world.executor = executor
    parts = replace(world.scheduler._deps, executor=executor)
    world.scheduler = Scheduler(parts, world.scheduler._limits)
    return world


def test_certain_tokens_save_steps() -> None:
    plain, world = World(pages=100), World(pages=100)
    world = _with_executor(world, JumpingExecutor(kv_groups(101, 4)))
    for one in (plain, world):
        one.scheduler.add(request("a", [3, 4], new=40))
        one.run()

    sampled = len(world.tokens["a"]) - sum(1 for t in world.tokens["a"] if 40 <= t < 44)
    assert plain.executor.steps == 40
    assert sampled <= world.executor.steps < 40


class EndingExecutor(CheckingExecutor):
    def _output(self, piece: Piece) -> SliceOutput:
        out = super()._output(piece)
        return SliceOutput(out.token_ids, ended=piece.stop >= 5)


@pytest.mark.parametrize("inflight", [1, 2])
def test_an_executor_can_end_a_request(inflight) -> None:
    world = _with_executor(World(pages=100, inflight=inflight), EndingExecutor(kv_groups(101, 4)))
    world.scheduler.add(request("a", [3, 4], new=40))
    world.run()

    assert len(world.tokens["a"]) == 4
    assert world.finish["a"] == Finish(type="stop")
    world.check_empty()


class Refusing(Capability):
    """Refuses requests by name, the running ones once they have some outputs."""

    gates_running = True

    def __init__(self) -> None:
        self.finished: list[str] = []

    def gate(self, req: Req) -> Verdict:
        if req.rid == "bad" or (req.rid == "later" and req.num_outputs >= 2):
            raise RequestError("no such grammar", param="regex", status=422)
        return Verdict.READY

    def on_finish(self, req: Req) -> None:
        self.finished.append(req.rid)


@pytest.mark.parametrize("inflight", [1, 2])
def test_a_gate_that_raises_ends_its_request_alone(inflight) -> None:
    feature = Refusing()
    world = World(pages=100, capabilities=(feature,), inflight=inflight)
    for rid in ("bad", "good", "later"):
        world.scheduler.add(request(rid, [1, 2, 3], new=5))
    world.scheduler.add(request("bad too", [1], new=1, priority=50))
    world.run()

    refused = Finish(type="abort", message="no such grammar", status=422, param="regex")
    assert world.finish["bad"] == world.finish["later"] == refused
    assert world.finish["good"].type == world.finish["bad too"].type == "length"
    assert len(world.tokens["good"]) == 5
    assert len(world.tokens.get("later", [])) in (2, 3)
    assert sorted(feature.finished) == sorted(["bad", "good", "later", "bad too"])
    world.check_empty()
