"""Several replicas whose processes are played by hand; tests/integration has real ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sylvan.protocol.errors import CapacityError
from sylvan.protocol.messages import (
    Abort,
    CachePrompts,
    CacheRequest,
    CacheTree,
    Command,
    Control,
    ControlReply,
    Finish,
    FlushCache,
    GetState,
    Heartbeat,
    Pause,
    SchedulerLoad,
    Submit,
    TextBatch,
    TextOutput,
    TokenOutput,
    ToScheduler,
)
from sylvan.protocol.requests import GenerateRequest, Request
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.tokenizer.live import SUSPECT_AFTER
from sylvan.runtime.tokenizer.manager import TokenizerManager
from sylvan.runtime.tokenizer.replica_policy import ReplicaPolicy, ReplicaRoundRobin, ReplicaView
from sylvan.runtime.tokenizer.router import ReplicaRouter
from sylvan.runtime.tokenizer.types import GenerateInput, SampleDelta, ServedModelInfo
from sylvan.text.tokenizer import Tokenizer
from sylvan.utils.clock import VirtualClock
from tests.support.scripted import write_checkpoint

LENGTH = Finish(type="length", length=1)
TWO_SAMPLES = SamplingParams(n=2, max_new_tokens=5)


class LeastLoad:
    """The replica that serves the fewest samples."""

    def choose(self, request: Request, replicas: Sequence[ReplicaView]) -> int:
        return min(range(len(replicas)), key=lambda i: replicas[i].num_samples)


class PrefixAffinity:
    """Prompts that begin alike go to the same replica."""

    def choose(self, request: Request, replicas: Sequence[ReplicaView]) -> int:
        return int(request.input_ids[0]) % len(replicas)


class Fixture:
    def __init__(
        self, tokenizer: Tokenizer, count: int = 3, policy: ReplicaPolicy | None = None
    ) -> None:
        self.clock = VirtualClock(100.0)
        self.router = ReplicaRouter(count, policy, self.clock)
        self.manager = TokenizerManager(tokenizer, clock=self.clock, router=self.router)
        self.facts = ServedModelInfo(
            model_path="m",
            served_name="m",
            context_len=512,
            vocab_size=tokenizer.vocab_size,
            eos_ids=tokenizer.eos_ids,
        )
        self.sent: list[list[ToScheduler]] = [[] for _ in range(count)]
        for replica in range(count):
            self.connect(replica)
        self.tasks: list[asyncio.Task[list[SampleDelta]]] = []

    def connect(self, replica: int, facts: ServedModelInfo | None = None) -> None:
        self.router.clients[replica].connect(self.sent[replica].append, facts or self.facts)

    def submitted(self, replica: int) -> list[GenerateRequest]:
        found = [m.request for m in self.sent[replica] if isinstance(m, Submit)]
        return [r for r in found if isinstance(r, GenerateRequest)]

    def rids(self, replica: int) -> list[str]:
        return [request.rid.partition(".")[0] for request in self.submitted(replica)]

    def aborted(self, replica: int) -> list[str]:
        return [m.rid.partition(".")[0] for m in self.sent[replica] if isinstance(m, Abort)]

    async def start(self, rid: str, **fields: Any) -> asyncio.Task[list[SampleDelta]]:
        inp = GenerateInput(**({"input_ids": (1, 2), "rid": rid} | fields))
        before = self.manager.num_live
        task = asyncio.create_task(self._read(inp))
        while self.manager.num_live == before and not task.done():
            await asyncio.sleep(0)
        return task

    async def _read(self, inp: GenerateInput) -> list[SampleDelta]:
        async with aclosing(self.manager.generate(inp)) as deltas:
            return [delta async for delta in deltas]

    def say(self, replica: int, text: str, finish: Finish | None = None, at: int = -1) -> None:
        rid = self.submitted(replica)[at].rid
        output = TokenOutput(rid=rid, token_ids=tuple(text.encode()), finish=finish)
        batch = TextBatch(outputs=(TextOutput(rid=rid, text=text, output=output),))
        self.router.clients[replica].on_texts(batch)

    async def command(self, command: Command, *answers: Any) -> ControlReply:
        """Its merged reply, when each replica answers with a body, or False."""
        task = asyncio.create_task(self.manager.control(command))
        for replica, answer in enumerate(answers):
            control = await self._control(replica)
            bad = answer is False
            body = None if bad else answer
            reply = ControlReply(id=control.id, ok=not bad, message="no" * bad, body=body)
            self.router.clients[replica].on_message(reply)
        return await task

    async def _control(self, replica: int) -> Control:
        while not isinstance(self.sent[replica][-1:] and self.sent[replica][-1], Control):
            await asyncio.sleep(0)
        control = self.sent[replica].pop()
        assert isinstance(control, Control)
        return control


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_checkpoint(Path(tmp_path_factory.mktemp("tokenizer"))))


@pytest.fixture
async def fix(tokenizer: Tokenizer) -> AsyncIterator[Fixture]:
    fixture = Fixture(tokenizer)
    yield fixture
    fixture.manager.close()


# Choice of a replica ----------------------------------------------------------------------------


async def test_requests_go_round_and_the_samples_of_one_stay_together(fix: Fixture) -> None:
    for rid in "abcd":
        await fix.start(rid, sampling=TWO_SAMPLES)

    assert [fix.rids(i) for i in range(3)] == [["a", "a", "d", "d"], ["b"] * 2, ["c"] * 2]
    assert [client.num_samples for client in fix.router.clients] == [4, 2, 2]


async def test_a_replica_that_restarts_gets_nothing_while_another_is_up(fix: Fixture) -> None:
    fix.router.clients[1].disconnect()
    for rid in "abcd":
        await fix.start(rid)

    assert [fix.rids(replica) for replica in range(3)] == [["a", "c"], [], ["b", "d"]]
    assert fix.manager.state == "up"


async def test_while_all_restart_requests_wait_for_one(fix: Fixture) -> None:
    for client in fix.router.clients:
        client.disconnect()
    task = await fix.start("a")
    assert fix.manager.state == "recovering"
    assert not fix.manager.ready()

    for replica in range(3):
        fix.connect(replica)
    [replica] = [i for i in range(3) if fix.rids(i) == ["a"]]
    fix.say(replica, "x", LENGTH)

    assert "".join(delta.text for delta in await task) == "x"


async def test_a_policy_is_an_object(tokenizer: Tokenizer) -> None:
    fix = Fixture(tokenizer, 2, LeastLoad())
    await fix.start("big", sampling=SamplingParams(n=5, max_new_tokens=5))
    for rid in "abc":
        await fix.start(rid)
    assert [fix.rids(replica) for replica in range(2)] == [["big"] * 5, ["a", "b", "c"]]
    fix.manager.close()

    fix = Fixture(tokenizer, 2, PrefixAffinity())
    for rid, first in (("a", 4), ("b", 5), ("c", 4)):
        await fix.start(rid, input_ids=(first, 9))
    assert [fix.rids(replica) for replica in range(2)] == [["a", "c"], ["b"]]
    fix.manager.close()


def test_round_robin_continues_after_the_replica_chosen_before() -> None:
    class View:
        load, num_samples = SchedulerLoad(), 0

        def __init__(self, replica: int) -> None:
            self.replica = replica

    policy, views = ReplicaRoundRobin(), [View(i) for i in range(3)]
    request: Any = None

    assert [policy.choose(request, views) for _ in range(4)] == [0, 1, 2, 0]
    assert [policy.choose(request, [views[0], views[2]]) for _ in range(3)] == [1, 0, 1]


# Loss of a replica ------------------------------------------------------------------------------


async def test_outputs_and_aborts_stay_with_the_replica_of_the_request(fix: Fixture) -> None:
    tasks = [await fix.start(rid) for rid in "abc"]

    fix.manager.abort("b")
    assert [fix.aborted(replica) for replica in range(3)] == [[], ["b"], []]
    for replica in range(3):
        fix.say(replica, f"of {replica}", LENGTH)

    answers = [await task for task in tasks]
    assert ["".join(d.text for d in deltas) for deltas in answers] == ["of 0", "of 1", "of 2"]


async def test_a_replica_that_was_lost_replays_its_own_requests_only(fix: Fixture) -> None:
    tasks = [await fix.start(rid) for rid in "abc"]
    fix.say(1, "x")

    fix.router.clients[1].disconnect()
    assert fix.manager.ready()
    fix.connect(1)

    assert [fix.rids(replica) for replica in range(3)] == [["a"], ["b", "b"], ["c"]]
    assert fix.submitted(1)[-1].output_ids.tolist() == [ord("x")]
    for replica in range(3):
        fix.say(replica, "y", LENGTH)
    assert "".join(d.text for d in await tasks[1]) == "xy"
    await asyncio.gather(*tasks)


async def test_requests_of_a_replica_that_is_given_up_move(fix: Fixture) -> None:
    tasks = [await fix.start(rid) for rid in "abc"]
    fix.say(0, "x")

    fix.router.clients[0].disconnect()
    fix.router.clients[0].give_up()

    assert fix.manager.state == "up"
    assert fix.rids(1) == ["b", "a"]  # after "c", it is the turn of 1 again
    assert fix.submitted(1)[-1].output_ids.tolist() == [ord("x")]
    fix.say(1, "y", LENGTH)
    assert "".join(d.text for d in await tasks[0]) == "xy"
    assert fix.manager.abort("c")
    assert fix.aborted(2) == ["c"]
    fix.say(1, "b", LENGTH, at=0)
    fix.say(2, "c", LENGTH)
    await asyncio.gather(*tasks)
    assert (fix.manager.num_live, fix.router.clients[1].num_samples) == (0, 0)


async def test_a_suspect_that_moves_is_still_replayed_alone(tokenizer: Tokenizer) -> None:
    fix = Fixture(tokenizer, 2)
    tasks = [await fix.start(rid) for rid in ("bad", "other", "also")]
    first = fix.router.clients[0]  # has "bad" and "also"
    for _ in range(SUSPECT_AFTER - 1):
        first.disconnect()
        fix.connect(0)
    first.disconnect()
    first.give_up()

    assert fix.rids(1) == ["other", "bad"]  # "also" waits until "bad" has shown what it does
    fix.say(1, "y", LENGTH)
    assert fix.rids(1) == ["other", "bad", "also"]
    fix.manager.close()
    await asyncio.gather(*tasks)


async def test_when_all_are_given_up_all_requests_end(fix: Fixture) -> None:
    tasks = [await fix.start(rid) for rid in "abc"]

    for client in fix.router.clients:
        client.give_up()

    for task in tasks:
        [delta] = await task
        assert delta.finish == Finish(type="abort", message="the engine is lost", status=503)
    assert not fix.manager.alive()
    with pytest.raises(CapacityError, match="lost"):
        await (await fix.start("d"))
    with pytest.raises(CapacityError, match="lost"):
        await fix.manager.control(FlushCache())


async def test_close_ends_requests_without_moving_them(fix: Fixture) -> None:
    tasks = [await fix.start(rid) for rid in "ab"]

    fix.manager.close()

    for task in tasks:
        [delta] = await task
        assert delta.finish == Finish(type="abort", message="the engine is stopped", status=503)
    assert fix.manager.state == "stopped"
    assert [fix.rids(replica) for replica in range(3)] == [["a"], ["b"], []]


# Commands, loads, facts -------------------------------------------------------------------------


async def test_a_command_goes_to_all_and_fails_with_the_first_that_fails(fix: Fixture) -> None:
    assert (await fix.command(FlushCache(), None, None, None)).ok
    reply = await fix.command(FlushCache(), None, False, None)
    assert (reply.ok, reply.message) == (False, "no")


async def test_a_command_needs_all_that_were_not_given_up(fix: Fixture) -> None:
    fix.router.clients[2].disconnect()
    with pytest.raises(CapacityError, match="restarted"):
        await fix.manager.control(FlushCache())
    assert fix.sent == [[], [], []]  # none or all

    fix.router.clients[2].give_up()
    assert (await fix.command(FlushCache(), None, None)).ok


async def test_bodies_are_merged_by_what_they_mean(fix: Fixture) -> None:
    paused = await fix.command(Pause(), *({"num_paused_requests": n} for n in (1, 2, 3)))
    assert paused.body == {"num_paused_requests": 6}
    prompts = await fix.command(CachePrompts(), *({"prompts": [[n]]} for n in range(3)))
    assert prompts.body == {"prompts": [[0], [1], [2]]}
    states = [{"load": n} for n in range(3)]
    assert (await fix.command(GetState(), *states)).body == {"replicas": states}
    told = await fix.command(CacheRequest(rid="x"), False, {"rid": "x"}, False)
    assert told.body == {"rid": "x"}
    assert not (await fix.command(CacheRequest(rid="x"), False, False, False)).ok


async def test_trees_are_joined_and_bounded_together(tokenizer: Tokenizer) -> None:
    fix = Fixture(tokenizer, 2)
    trees = [
        {
            "page_size": 16,
            "shown_nodes": 2,
            "num_nodes": 5,
            "nodes": [{"id": 0, "parent": -1}, {"id": 1, "parent": 0}],
        }
        for _ in range(2)
    ]
    task = asyncio.create_task(fix.manager.control(CacheTree(max_nodes=9)))
    for replica in range(2):
        control = await fix._control(replica)
        assert control.command == CacheTree(max_nodes=4)
        reply = ControlReply(id=control.id, ok=True, body=trees[replica])
        fix.router.clients[replica].on_message(reply)
    reply = await task

    assert reply.body == {
        "page_size": 16,
        "shown_nodes": 4,
        "num_nodes": 10,
        "nodes": [
            {"id": 0, "parent": -1, "dp_rank": 0},
            {"id": 1, "parent": 0, "dp_rank": 0},
            {"id": 2, "parent": -1, "dp_rank": 1},
            {"id": 3, "parent": 2, "dp_rank": 1},
        ],
    }
    fix.manager.close()


async def test_loads_are_added(fix: Fixture) -> None:
    for replica, client in enumerate(fix.router.clients):
        load = SchedulerLoad(num_running_reqs=replica, gen_throughput=0.5, max_total_num_tokens=100)
        client.on_message(Heartbeat(load=load))

    total = fix.manager.load()
    assert (total.num_running_reqs, total.gen_throughput) == (3, 1.5)
    assert total.max_total_num_tokens == 300


async def test_one_replica_that_shows_life_makes_the_server_ready(fix: Fixture) -> None:
    fix.clock.advance(2.0)
    assert not fix.manager.ready()
    fix.router.clients[1].on_message(Heartbeat(load=SchedulerLoad()))
    assert fix.manager.ready()

    fix.router.clients[1].disconnect()  # its heartbeat is new, but it is gone
    assert not fix.manager.ready()


async def test_a_request_must_fit_into_every_replica(tokenizer: Tokenizer) -> None:
    fix = Fixture(tokenizer, 2)
    fix.connect(1, replace(fix.facts, max_total_tokens=64))

    assert fix.manager.facts.max_request_tokens == 64
    fix.manager.close()
