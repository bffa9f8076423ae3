from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from sylvan.protocol.errors import CapacityError, RequestError
from sylvan.protocol.messages import (
    Abort,
    Command,
    Control,
    ControlReply,
    Finish,
    FlushCache,
    Heartbeat,
    Pause,
    Resume,
    SchedulerLoad,
    Submit,
    TextBatch,
    TextOutput,
    TokenLogprobs,
    TokenOutput,
    ToScheduler,
    Usage,
)
from sylvan.protocol.requests import GenerateRequest, LogprobOptions, RequestOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.engine.scheduler_loop import HEARTBEAT_S
from sylvan.runtime.tokenizer import router
from sylvan.runtime.tokenizer.live import MAX_LOSSES
from sylvan.runtime.tokenizer.manager import TokenizerManager
from sylvan.runtime.tokenizer.types import (
    EdgeLimits,
    GenerateInput,
    SampleDelta,
    ServedModelInfo,
    error_of,
)
from sylvan.text.tokenizer import Tokenizer
from sylvan.transport.api import ChannelFullError
from sylvan.utils.clock import VirtualClock
from tests.support.scripted import write_checkpoint

LENGTH = Finish(type="length", length=3)


class Fixture:
    """A manager of one replica, whose processes are played by hand."""

    def __init__(self, tokenizer: Tokenizer, limits: EdgeLimits | None = None) -> None:
        self.clock = VirtualClock(100.0)
        self.manager = TokenizerManager(tokenizer, limits, self.clock)
        self.facts = ServedModelInfo(
            model_path="m",
            served_name="m",
            context_len=512,
            vocab_size=tokenizer.vocab_size,
            eos_ids=tokenizer.eos_ids,
        )
        self.sent: list[ToScheduler] = []
        [self.client] = self.manager.router.clients
        self.client.connect(self.sent.append, self.facts)

    def submitted(self) -> list[GenerateRequest]:
        found = [m.request for m in self.sent if isinstance(m, Submit)]
        return [r for r in found if isinstance(r, GenerateRequest)]

    def aborted(self) -> list[str]:
        return [m.rid for m in self.sent if isinstance(m, Abort)]

    def say(self, rid: str, text: str, finish: Finish | None = None, **fields: Any) -> None:
        ids = tuple(text.encode())
        usage = Usage(prompt_tokens=2, completion_tokens=len(ids), cached_tokens=1)
        output = TokenOutput(rid=rid, token_ids=ids, finish=finish, **({"usage": usage} | fields))
        self.client.on_texts(TextBatch(outputs=(TextOutput(rid=rid, text=text, output=output),)))

    async def controls(self, count: int) -> list[Control]:
        while len(found := [m for m in self.sent if isinstance(m, Control)]) < count:
            await asyncio.sleep(0)
        return found

    async def start(self, **fields: Any) -> Reader:
        reader = Reader(self.manager, GenerateInput(**({"input_ids": (1, 2)} | fields)))
        before = len(self.submitted())
        while len(self.submitted()) == before and not reader.task.done():
            await asyncio.sleep(0)
        return reader


class Reader:
    """A client that reads everything at once."""

    def __init__(self, manager: TokenizerManager, inp: GenerateInput) -> None:
        self.deltas: list[SampleDelta] = []
        self.task = asyncio.create_task(self._read(manager, inp))

    async def _read(self, manager: TokenizerManager, inp: GenerateInput) -> list[SampleDelta]:
        async with aclosing(manager.generate(inp)) as deltas:
            async for delta in deltas:
                self.deltas.append(delta)
        return self.deltas

    async def until(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.deltas) < count:
                await asyncio.sleep(0)

    def text(self, index: int = 0) -> str:
        return "".join(d.text for d in self.deltas if d.index == index)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_checkpoint(Path(tmp_path_factory.mktemp("tokenizer"))))


@pytest.fixture
async def fix(tokenizer: Tokenizer) -> AsyncIterator[Fixture]:
    fixture = Fixture(tokenizer)
    yield fixture
    fixture.manager.close()


async def test_samples_differ_in_name_and_number_only(fix: Fixture) -> None:
    reader = await fix.start(sampling=SamplingParams(n=3, max_new_tokens=5), rid="abc")

    requests = fix.submitted()
    assert [r.rid for r in requests] == ["abc.0#1.1", "abc.1#1.1", "abc.2#1.1"]
    assert [r.sample for r in requests] == [0, 1, 2]
    assert len({r.sampling.sampling_seed for r in requests}) == 1
    for index in (2, 0, 1):
        fix.say(requests[index].rid, f"s{index}", LENGTH)
    await reader.task
    assert [reader.text(i) for i in range(3)] == ["s0", "s1", "s2"]
    assert {d.rid for d in reader.deltas} == {"abc"}
    assert fix.manager.num_live == 0
    assert not fix.aborted()


async def test_seeds_are_drawn_again_for_each_request(fix: Fixture) -> None:
    await fix.start()
    await fix.start()

    first, second = fix.submitted()
    assert first.sampling.sampling_seed != second.sampling.sampling_seed


async def test_text_is_tokenised_and_long_text_too(fix: Fixture) -> None:
    await fix.start(text="hi", input_ids=None)
    await fix.start(text="ab" * 200, input_ids=None, sampling=SamplingParams(max_new_tokens=1))

    short, long = fix.submitted()
    assert fix.manager.tokenizer.decode(short.input_ids.tolist()) == "hi"
    assert len(long.input_ids) == 400


async def test_unread_deltas_are_merged(fix: Fixture) -> None:
    deltas = fix.manager.generate(GenerateInput(input_ids=(1,)))
    first = asyncio.create_task(anext(deltas))
    while not fix.submitted():
        await asyncio.sleep(0)
    rid = fix.submitted()[0].rid
    for char in "abc":
        part = np.array([ord(char)], np.int32)
        logprobs = TokenLogprobs(token_ids=part, logprobs=part.astype(np.float32))
        fix.say(rid, char, logprobs=logprobs)
    assert (await first).text == "abc"

    for char in "def":
        fix.say(rid, char, LENGTH if char == "f" else None)
    [last] = [d async for d in deltas]

    assert (last.text, last.token_ids, last.finish) == ("def", tuple(b"def"), LENGTH)


async def test_merged_logprobs_are_joined(fix: Fixture) -> None:
    reader = await fix.start(stream=False, logprobs=LogprobOptions(top=2, token_ids=(7,)))
    rid = fix.submitted()[0].rid
    for i in range(3):
        fix.say(
            rid,
            "x",
            LENGTH if i == 2 else None,
            logprobs=TokenLogprobs(
                token_ids=np.array([i], np.int32),
                logprobs=np.array([-i], np.float32),
                top_ids=np.array([[i, i]], np.int32),
                top_logprobs=np.array([[-i, -i]], np.float32),
                chosen_logprobs=np.array([[-i]], np.float32),
            ),
        )
    [delta] = await reader.task

    assert delta.logprobs is not None
    assert delta.logprobs.token_ids.tolist() == [0, 1, 2]
    assert delta.logprobs.top_ids is not None
    assert delta.logprobs.top_ids.shape == (3, 2)
    assert delta.logprobs.chosen_logprobs is not None
    assert delta.logprobs.chosen_logprobs.tolist() == [[0], [-1], [-2]]


async def test_the_interval_holds_tokens_back_but_not_the_first_and_last(fix: Fixture) -> None:
    reader = await fix.start(sampling=SamplingParams(stream_interval=3, max_new_tokens=9))
    rid = fix.submitted()[0].rid

    async def settle() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    for at, char in enumerate("abcdefgh"):
        fix.say(rid, char, LENGTH if at == 7 else None)
        await settle()
    await reader.task

    assert [d.text for d in reader.deltas] == ["a", "bcd", "efg", "h"]
    assert fix.submitted()[0].interval == 3


async def test_without_streaming_each_sample_is_one_delta(fix: Fixture) -> None:
    reader = await fix.start(stream=False, sampling=SamplingParams(n=2, max_new_tokens=9))
    for char in "ab":
        for request in fix.submitted():
            fix.say(request.rid, char, LENGTH if char == "b" else None)
            await asyncio.sleep(0)
    await reader.task

    assert sorted((d.index, d.text) for d in reader.deltas) == [(0, "ab"), (1, "ab")]
    assert [request.interval for request in fix.submitted()] == [None, None]


async def test_leaving_aborts_what_has_not_ended(fix: Fixture) -> None:
    reader = await fix.start(sampling=SamplingParams(n=2, max_new_tokens=9), rid="x")
    fix.say("x.0#1.1", "a", LENGTH)
    await reader.until(1)

    reader.task.cancel()
    await asyncio.wait({reader.task})

    assert fix.aborted() == ["x.1#1.1"]
    assert fix.manager.num_live == 0
    fix.say("x.1#1.1", "late")  # is ignored


async def test_cancelling_before_anything_came_aborts(fix: Fixture) -> None:
    reader = await fix.start(rid="x")

    reader.task.cancel()
    await asyncio.wait({reader.task})

    assert fix.aborted() == ["x.0#1.1"]


async def test_abort_goes_through_the_scheduler(fix: Fixture) -> None:
    reader = await fix.start(rid="x")

    assert fix.manager.abort("x")
    assert not fix.manager.abort("y")
    assert fix.manager.abort_all() == 1
    fix.say("x.0#1.1", "", Finish(type="abort"))
    await reader.task

    assert reader.deltas[-1].finish == Finish(type="abort")
    assert set(fix.aborted()) == {"x.0#1.1"}


async def test_refusals_by_the_scheduler_reach_the_reader(fix: Fixture) -> None:
    reader = await fix.start(rid="x")
    fix.say("x.0#1.1", "", Finish(type="abort", status=400, message="no", param="input_ids"))
    await reader.task

    error = error_of(reader.deltas[0].finish)
    assert isinstance(error, RequestError)
    assert (str(error), error.param, error.status) == ("no", "input_ids", 400)
    assert isinstance(error_of(Finish(type="abort", status=503)), CapacityError)
    assert error_of(Finish(type="abort")) is None
    assert error_of(LENGTH) is None
    assert error_of(None) is None


async def test_a_live_rid_is_refused_and_free_again_afterwards(fix: Fixture) -> None:
    first = await fix.start(rid="x")
    second = await fix.start(rid="x")
    with pytest.raises(RequestError, match="'x' is being served"):
        await second.task

    fix.say("x.0#1.1", "a", LENGTH)
    await first.task
    third = await fix.start(rid="x")
    assert not third.task.done()


async def test_tenants_do_not_see_each_others_rids(fix: Fixture) -> None:
    acme = await fix.start(rid="x", tenant="acme")
    other = await fix.start(rid="x", tenant="other")
    nobody = await fix.start(rid="x")

    requests = fix.submitted()
    assert [r.tenant for r in requests] == ["acme", "other", ""]
    assert len({r.rid for r in requests}) == 3
    assert not fix.manager.abort("x", "third")
    assert fix.manager.abort("x", "other")
    assert fix.aborted() == [requests[1].rid]
    for request, word in zip(requests, ("one", "two", "three"), strict=True):
        fix.say(request.rid, word, LENGTH)
    await asyncio.gather(acme.task, other.task, nobody.task)

    assert (acme.text(), other.text(), nobody.text()) == ("one", "two", "three")
    assert {d.rid for reader in (acme, other, nobody) for d in reader.deltas} == {"x"}
    assert fix.manager.num_live == 0


async def test_the_operator_aborts_a_rid_of_all_tenants(fix: Fixture) -> None:
    await fix.start(rid="x", tenant="acme")
    await fix.start(rid="x", tenant="other")
    await fix.start(rid="y", tenant="other")

    assert fix.manager.abort("x")
    assert len(fix.aborted()) == 2


async def test_outputs_of_a_request_that_was_left_do_not_reach_the_next_of_its_rid(
    fix: Fixture,
) -> None:
    left = await fix.start(rid="x")
    left.task.cancel()
    await asyncio.wait({left.task})
    reader = await fix.start(rid="x")
    first, second = fix.submitted()

    fix.say(first.rid, "stale", LENGTH)  # was under way when its client left
    fix.say(second.rid, "fresh", LENGTH)
    await reader.task

    assert reader.text() == "fresh"


async def test_a_deadline_is_kept_without_the_scheduler(
    fix: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "DEADLINE_GRACE_S", 0.0)
    reader = await fix.start(
        rid="x", options=RequestOptions(deadline_s=0.01), sampling=SamplingParams(n=2)
    )
    fix.say("x.0#1.1", "ab")

    await reader.task  # the scheduler says no more

    ends = [delta for delta in reader.deltas if delta.finish is not None]
    assert [delta.index for delta in ends] == [0, 1]
    assert isinstance(error_of(ends[0].finish), CapacityError)
    assert ends[0].usage.completion_tokens == 2
    assert sorted(fix.aborted()) == ["x.0#1.1", "x.1#1.1"]
    assert fix.manager.num_live == 0
    fix.say("x.0#1.1", "late", LENGTH)  # is ignored


async def test_a_deadline_is_kept_while_there_is_no_scheduler(
    fix: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "DEADLINE_GRACE_S", 0.0)
    fix.client.disconnect()
    reader = Reader(
        fix.manager, GenerateInput(input_ids=(1,), options=RequestOptions(deadline_s=0.01))
    )

    await reader.task
    fix.client.connect(fix.sent.append, fix.facts)

    assert isinstance(error_of(reader.deltas[-1].finish), CapacityError)
    assert not fix.submitted()


async def test_the_table_of_live_samples_is_bounded(tokenizer: Tokenizer) -> None:
    fix = Fixture(tokenizer, EdgeLimits(max_live_samples=3))
    await fix.start(sampling=SamplingParams(n=2))

    with pytest.raises(CapacityError, match="at most 3"):
        await (await fix.start(sampling=SamplingParams(n=2))).task
    await fix.start()

    assert len(fix.submitted()) == 3
    fix.manager.close()


async def test_control_matches_replies_to_commands(fix: Fixture) -> None:
    tasks = [asyncio.create_task(fix.manager.control(FlushCache())) for _ in range(2)]
    first, second = await fix.controls(2)
    fix.client.on_message(ControlReply(id=second.id, ok=False, message="busy"))
    fix.client.on_message(ControlReply(id=first.id, ok=True))
    fix.client.on_message(ControlReply(id=999, ok=True))

    assert [(await t).ok for t in tasks] == [True, False]


async def test_a_pause_outlives_the_scheduler(fix: Fixture) -> None:
    async def carry_out(command: Command) -> None:
        task = asyncio.create_task(fix.manager.control(command))
        control = (await fix.controls(1))[-1]
        fix.sent.remove(control)
        fix.client.on_message(ControlReply(id=control.id, ok=True))
        await task

    def restart() -> list[Command]:
        fix.client.disconnect()
        fix.client.connect(fix.sent.append, fix.facts)
        return [m.command for m in fix.sent if isinstance(m, Control)]

    assert restart() == []
    await carry_out(Pause(mode="retract"))
    assert restart() == [Pause(mode="in_place")]
    fix.sent.clear()
    await carry_out(Resume())
    assert restart() == []


async def test_control_does_not_wait_for_ever(fix: Fixture) -> None:
    with pytest.raises(CapacityError, match="within"):
        await fix.manager.control(FlushCache(), timeout_s=0.001)

    waiting = asyncio.create_task(fix.manager.control(FlushCache()))
    await fix.controls(2)  # the one above and this one
    fix.client.disconnect()
    with pytest.raises(CapacityError, match="lost"):
        await waiting
    with pytest.raises(CapacityError, match="restarted"):
        await fix.manager.control(FlushCache())


async def test_readiness_follows_the_heartbeat(fix: Fixture) -> None:
    assert fix.manager.ready()
    fix.clock.advance(1.9)
    fix.client.on_message(Heartbeat(load=SchedulerLoad(num_running_reqs=4)))
    fix.clock.advance(1.9)
    assert fix.manager.ready()
    assert fix.manager.load().num_running_reqs == 4

    fix.clock.advance(0.101)  # two seconds after the last sign of life, whatever a process does
    assert not fix.manager.ready()
    assert fix.manager.alive()
    assert 4 * HEARTBEAT_S < router.HEARTBEAT_MAX_AGE_S <= 2.0


async def test_a_lost_scheduler_is_a_pause_for_the_client(fix: Fixture) -> None:
    reader = await fix.start(
        rid="x", sampling=SamplingParams(max_new_tokens=9), logprobs=LogprobOptions(start=0)
    )
    prompt = TokenLogprobs(token_ids=np.ones(2, np.int32), logprobs=np.zeros(2, np.float32))
    fix.say("x.0#1.1", "ab", prompt_logprobs=prompt)
    await reader.until(1)

    fix.client.disconnect()
    assert (fix.manager.state, fix.manager.alive()) == ("recovering", True)
    assert not fix.manager.ready()
    fix.say("x.0#1.1", "??")
    fix.client.connect(fix.sent.append, fix.facts)

    replay = fix.submitted()[-1]
    assert replay.rid == "x.0#1.2"
    assert replay.output_ids.tolist() == list(b"ab")
    assert replay.logprobs == LogprobOptions(start=None)
    original = fix.submitted()[0]
    fields = ("input_ids", "output_ids", "rid", "logprobs")
    for name in set(original.__struct_fields__) - set(fields):
        assert getattr(replay, name) == getattr(original, name)
    fix.say("x.0#1.1", "old")
    fix.say(
        "x.0#1.2",
        "c",
        LENGTH,
        usage=Usage(prompt_tokens=2, cached_tokens=2),
        prompt_logprobs=prompt,
    )
    await reader.task
    assert reader.text() == "abc"
    assert reader.deltas[-1].prompt_logprobs is None
    assert reader.deltas[-1].usage.cached_tokens == 1


async def test_a_lost_detokenizer_restarts_what_the_scheduler_runs(fix: Fixture) -> None:
    reader = await fix.start(rid="x", sampling=SamplingParams(n=2, max_new_tokens=9))
    fix.say("x.0#1.1", "ab", LENGTH)

    fix.client.detokenizer_lost()
    assert fix.manager.state == "recovering"
    fix.client.detokenizer_ready()

    assert fix.manager.state == "up"
    assert fix.aborted() == ["x.1#1.1"]
    assert [r.rid for r in fix.submitted()] == ["x.0#1.1", "x.1#1.1", "x.1#1.2"]
    fix.say("x.1#1.2", "c", LENGTH)
    await reader.task
    assert (reader.text(0), reader.text(1)) == ("ab", "c")


async def test_requests_wait_while_the_detokenizer_is_gone(fix: Fixture) -> None:
    fix.client.detokenizer_lost()
    reader = Reader(fix.manager, GenerateInput(input_ids=(1,), rid="x"))
    while not fix.manager.num_live:
        await asyncio.sleep(0)
    assert not fix.submitted()

    fix.client.disconnect()  # the scheduler is lost meanwhile, and back first
    fix.client.connect(fix.sent.append, fix.facts)
    assert fix.manager.state == "recovering"
    assert not fix.submitted()
    fix.client.detokenizer_ready()

    assert fix.manager.state == "up"
    [request] = fix.submitted()
    fix.say(request.rid, "a", LENGTH)
    await reader.task


async def test_a_replay_that_the_scheduler_does_not_take_is_an_error(fix: Fixture) -> None:
    reader = await fix.start(rid="x")
    fix.client.disconnect()

    def full(message: ToScheduler) -> None:
        raise ChannelFullError("full")

    fix.client.connect(full, fix.facts)
    await reader.task

    error = error_of(reader.deltas[-1].finish)
    assert isinstance(error, CapacityError)
    assert fix.manager.num_live == 0


async def test_a_request_that_the_scheduler_does_not_take_leaves_nothing(fix: Fixture) -> None:
    room = 1

    def send(message: ToScheduler) -> None:
        nonlocal room
        if isinstance(message, Submit):
            room -= 1
            if room < 0:
                raise ChannelFullError("full")
        fix.sent.append(message)

    fix.client.connect(send, fix.facts)
    reader = Reader(fix.manager, GenerateInput(input_ids=(1,), sampling=SamplingParams(n=3)))
    with pytest.raises(CapacityError, match="full"):
        await reader.task

    assert fix.aborted() == [request.rid for request in fix.submitted()]
    assert len(fix.aborted()) == 1
    assert (fix.manager.num_live, fix.client.num_samples) == (0, 0)


async def test_requests_wait_while_the_scheduler_is_gone(fix: Fixture) -> None:
    fix.client.disconnect()
    reader = Reader(
        fix.manager, GenerateInput(input_ids=(1,), rid="x", options=RequestOptions(deadline_s=10.0))
    )
    gone = Reader(fix.manager, GenerateInput(input_ids=(1,), rid="y"))
    while fix.manager.num_live < 2:
        await asyncio.sleep(0)
    fix.manager.abort("y")
    await gone.task
    assert not fix.submitted()

    fix.clock.advance(4.0)
    fix.client.connect(fix.sent.append, fix.facts)

    [request] = fix.submitted()
    assert (request.rid, request.deadline_s) == ("x.0#1.2", 6.0)
    assert gone.deltas[0].finish == Finish(type="abort", message="aborted by the client")
    fix.say(request.rid, "a", LENGTH)
    await reader.task


async def test_an_abort_that_was_lost_with_the_scheduler_still_counts(fix: Fixture) -> None:
    reader = await fix.start(rid="x")
    fix.manager.abort("x")
    fix.client.disconnect()
    fix.client.connect(fix.sent.append, fix.facts)
    await reader.task

    assert reader.deltas[-1].finish is not None
    assert reader.deltas[-1].finish.type == "abort"
    assert len(fix.submitted()) == 1


async def test_what_keeps_killing_the_scheduler_ends_alone(fix: Fixture) -> None:
    good = await fix.start(rid="good")
    bad = await fix.start(rid="bad")
    late = await fix.start(rid="late")
    replayed: list[list[str]] = []
    for _ in range(MAX_LOSSES):
        before = len(fix.submitted())
        fix.client.disconnect()
        fix.client.connect(fix.sent.append, fix.facts)
        names = [r.rid.partition(".")[0] for r in fix.submitted()[before:]]
        replayed.append(names)
        if names == ["good"]:  # alone, it does no harm
            fix.say(fix.submitted()[-1].rid, "ok", LENGTH)
            await good.task
            assert fix.submitted()[-1].rid.startswith("bad.")

    await bad.task
    assert replayed[0] == ["good", "bad", "late"]
    assert replayed[1] == ["good"]
    assert replayed[2] == ["late"]
    assert bad.deltas[-1].finish is not None
    assert bad.deltas[-1].finish.status == 500
    fix.say(fix.submitted()[-1].rid, "ok", LENGTH)
    await late.task
    assert (good.text(), late.text()) == ("ok", "ok")


async def test_when_restarts_are_given_up_all_requests_end(fix: Fixture) -> None:
    reader = await fix.start()

    fix.client.give_up()
    await reader.task

    assert isinstance(error_of(reader.deltas[-1].finish), CapacityError)
    assert not fix.manager.alive()
    with pytest.raises(CapacityError, match="lost"):
        await anext(fix.manager.generate(GenerateInput(input_ids=(1,))))


async def test_draining_survives_a_lost_scheduler(fix: Fixture) -> None:
    reader = await fix.start(rid="x")
    fix.manager.router.drain()
    fix.client.disconnect()
    fix.client.connect(fix.sent.append, fix.facts)

    assert fix.manager.state == "draining"
    drained = asyncio.create_task(fix.manager.router.drained())
    fix.say("x.0#1.2", "a", LENGTH)
    await reader.task
    await drained


async def test_tokenize_and_detokenize_are_inverse(fix: Fixture) -> None:
    for text in ("gr\u00fcn \u4f60", "\u00e9x" * 5000):
        ids = await fix.manager.tokenize(text)
        assert await fix.manager.detokenize(ids) == text
    with pytest.raises(RequestError, match="tokens"):
        await fix.manager.detokenize([10**6])


async def test_messages_of_the_manager_survive_the_codec(fix: Fixture) -> None:
    from sylvan.transport.codec import MessageDecoder, MessageEncoder

    await fix.start(sampling=SamplingParams(logit_bias={"1": 2.0}, stop=("a",)))
    decoder: MessageDecoder[ToScheduler] = MessageDecoder(ToScheduler)

    got = decoder.decode(MessageEncoder().encode(fix.sent[0]))

    assert isinstance(got, Submit)
    sent = fix.submitted()[0]
    empty = np.empty(0, np.int32)
    strip = {"input_ids": empty, "output_ids": empty}
    assert got.request.input_ids.tolist() == sent.input_ids.tolist()
    assert repr(msgspec.structs.replace(got.request, **strip)) == repr(
        msgspec.structs.replace(sent, **strip)
    )


async def test_what_the_scheduler_would_refuse_does_not_reach_it(fix: Fixture) -> None:
    """Unless it is more urgent than something that the scheduler has."""
    fix.manager.limits = replace(fix.manager.limits, max_unfinished=2)
    for _ in range(2):
        await fix.start()

    with pytest.raises(CapacityError, match="run or wait already") as refused:
        async with aclosing(fix.manager.generate(GenerateInput(input_ids=(1, 2)))) as deltas:
            await anext(deltas)
    assert refused.value.setting == "scheduler.max_waiting_reqs"
    assert len(fix.submitted()) == 2

    await fix.start(options=RequestOptions(priority=1))
    assert len(fix.submitted()) == 3


@pytest.mark.parametrize(
    ("options", "blamed"),
    [
        (LogprobOptions(top=9), "top_logprobs_num"),
        (LogprobOptions(start=0, token_ids=(1,) * 9), "token_ids_logprob"),
    ],
)
async def test_log_probabilities_of_a_request_are_bounded(
    fix: Fixture, options: LogprobOptions, blamed: str
) -> None:
    """Before any work: 10 at each of 50 positions, and of those of the prompt, of two samples."""
    fix.manager.limits = replace(fix.manager.limits, max_logprobs=2 * 50 * 10 - 1)
    sampling = SamplingParams(n=2, max_new_tokens=50)
    inp = GenerateInput(input_ids=(1, 2), sampling=sampling, logprobs=options)

    with pytest.raises(RequestError, match=r"limits\.logprobs") as refused:
        async with aclosing(fix.manager.generate(inp)) as deltas:
            await anext(deltas)
    assert refused.value.param == blamed
    assert refused.value.setting == "limits.logprobs"
    assert fix.sent == []
