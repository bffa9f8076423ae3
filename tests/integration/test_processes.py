"""Real processes: they survive each other's death, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import psutil
import pytest
import pytest_asyncio

from sylvan.protocol.errors import CapacityError, ConfigError, RequestError
from sylvan.protocol.messages import FlushCache, GetState
from sylvan.protocol.requests import LogprobOptions, RequestOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.engine.engine import Engine
from sylvan.runtime.engine.restart import RestartPolicy
from sylvan.runtime.engine.roles import ROLES, Topology
from sylvan.runtime.engine.runtime import Runtime
from sylvan.runtime.tokenizer.router import HEARTBEAT_MAX_AGE_S
from sylvan.runtime.tokenizer.types import GenerateInput, SampleDelta
from tests.support.audits import assert_nothing_lost
from tests.support.tiny import ENDLESS, tiny_config, write_model

DEADLINE_S = 60
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(model: Path) -> AsyncIterator[Runtime]:
    runtime = await Runtime.start(tiny_config(model))
    yield runtime
    await runtime.close()


@pytest_asyncio.fixture(loop_scope="module")
async def runtime(shared: Runtime) -> AsyncIterator[Runtime]:
    """One that all tests share, and leave as they found it."""
    yield shared
    await until_idle(shared)  # and audits then
    assert_nothing_lost(await until_idle(shared))


@pytest_asyncio.fixture(loop_scope="module")
async def own(model: Path) -> AsyncIterator[Runtime]:
    """One that a test may end; how real processes drain: `test_processes_signals.py`."""
    runtime = await Runtime.start(tiny_config(model, processes="one"))
    yield runtime
    await runtime.close()


@dataclass(eq=False)
class Said:
    """The text of one sample, joined from all pieces."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    last: SampleDelta | None = None

    def add(self, delta: SampleDelta) -> None:
        self.text += delta.text
        self.ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs += delta.logprobs.logprobs.tolist()
        self.last = delta

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Said)
        # near, not equal: a replay computes them in other chunks, and sums may differ by a bit
        near = other.logprobs == pytest.approx(self.logprobs, abs=1e-5)
        return near and self.exact() == other.exact()

    def exact(self) -> tuple[object, ...]:
        assert self.last is not None
        assert self.last.finish is not None
        usage = (self.last.usage.prompt_tokens, self.last.usage.completion_tokens)
        return self.text, self.ids, self.last.finish, usage


def inputs(stream: bool = True) -> list[GenerateInput]:
    """Greedy and sampled, with and without stops, several samples, penalties, log probabilities."""
    long = {"max_new_tokens": 200, "ignore_eos": True, "sampling_seed": 7}
    params = [
        SamplingParams(temperature=0.0, **long),
        SamplingParams(n=3, **long),
        SamplingParams(stop=("\u00e9\u00e9\u00e9", "z"), frequency_penalty=0.5, **long),
        SamplingParams(stop_regex=(r"[a-f][0-9A-F]",), top_k=20, no_stop_trim=True, **long),
    ]
    return [
        GenerateInput(
            text=f"prompt number {i} " * (1 + 3 * i),
            sampling=sampling,
            stream=stream,
            logprobs=LogprobOptions(top=2) if i < 2 else None,
        )
        for i, sampling in enumerate(params)
    ]


async def listen(runtime: Runtime, inp: GenerateInput, heard: asyncio.Semaphore) -> list[Said]:
    said = [Said() for _ in range(inp.sampling.n)]
    async with aclosing(runtime.manager.generate(inp)) as deltas:
        async for delta in deltas:
            said[delta.index].add(delta)
            for _ in delta.token_ids:  # deltas may come merged
                heard.release()
    return said


async def ask(runtime: Runtime, kill: str | None = None, stream: bool = True) -> list[Said]:
    """The texts of all samples; `kill` is a child that dies once all streams have started.

    The streams are long enough that most of each is still to be computed then.
    """
    heard = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(listen(runtime, inp, heard)) for inp in inputs(stream)]
    async with asyncio.timeout(DEADLINE_S):
        if kill is not None:
            for _ in range(30):
                await heard.acquire()
            os.kill(runtime.pids[kill], signal.SIGKILL)
        return [said for samples in await asyncio.gather(*tasks) for said in samples]


async def until_restarted(runtime: Runtime, child: str, pid: int) -> None:
    """Wait until a process has a successor, even where its streams were all said before it died."""
    async with asyncio.timeout(DEADLINE_S):
        while runtime.pids[child] == pid or not runtime.manager.ready():
            await asyncio.sleep(0.01)


async def until_idle(runtime: Runtime) -> dict[str, int]:
    """The load once nothing runs."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            reply = await runtime.manager.control(GetState())
            assert reply.body is not None
            load = reply.body["load"]
            if not load["num_running_reqs"] + load["num_waiting_reqs"]:
                return load


@pytest.mark.parametrize("child", ["scheduler", "detokenizer"])
async def test_streams_continue_byte_for_byte_after_a_child_is_killed(
    runtime: Runtime, child: str
) -> None:
    undisturbed = await ask(runtime)
    before = dict(runtime.pids)

    disturbed = await ask(runtime, kill=child)

    assert disturbed == undisturbed
    other = "detokenizer" if child == "scheduler" else "scheduler"
    await until_restarted(runtime, child, before[child])
    assert runtime.pids[other] == before[other]
    assert (await until_idle(runtime))["num_used_tokens"] == 0
    assert runtime.manager.ready()


@pytest.mark.slow
async def test_requests_that_arrive_while_a_child_is_missing_are_served(runtime: Runtime) -> None:
    undisturbed = await ask(runtime)
    os.kill(runtime.pids["scheduler"], signal.SIGKILL)
    os.kill(runtime.pids["detokenizer"], signal.SIGKILL)

    assert await ask(runtime) == undisturbed


async def test_one_process_gives_the_same_answers_as_many(runtime: Runtime, model: Path) -> None:
    many = await ask(runtime)
    one = await Runtime.start(tiny_config(model, processes="one"))
    try:
        assert await ask(one) == many
        assert one.pids == {}
    finally:
        await one.close()


async def test_a_stream_says_what_the_whole_answer_says(runtime: Runtime) -> None:
    assert await ask(runtime, stream=True) == await ask(runtime, stream=False)


async def test_random_disconnects_leave_nothing_running_and_others_right(runtime: Runtime) -> None:
    draw = random.Random(3)
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True, sampling_seed=11)
    prompts = [f"client {i % 20} says {'x' * (i % 7)}" for i in range(200)]
    leave_after = [draw.choice([None, None, 0, 1, 5, 15]) for _ in prompts]

    async def client(prompt: str, patience: int | None) -> str | None:
        text, count = "", 0
        inp = GenerateInput(text=prompt, sampling=sampling)
        async with aclosing(runtime.manager.generate(inp)) as deltas:
            if patience == 0:
                task = asyncio.create_task(anext(deltas))
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task})
                return None
            async for delta in deltas:
                text, count = text + delta.text, count + 1
                if count == patience:
                    return None
        return None if patience else text  # deltas may have come merged, fewer than its patience

    async with asyncio.timeout(DEADLINE_S):
        texts = await asyncio.gather(*map(client, prompts, leave_after))
        alone = {p: await client(p, None) for p in sorted(set(prompts))}

    assert [t for t in texts if t is not None] == [
        alone[p] for p, patience in zip(prompts, leave_after, strict=True) if patience is None
    ]
    assert (await until_idle(runtime))["num_used_tokens"] == 0
    assert runtime.manager.num_live == 0
    assert (await runtime.manager.control(FlushCache())).ok
    assert (await until_idle(runtime))["num_cached_tokens"] == 0


async def test_abort_ends_all_samples_of_a_request_only(runtime: Runtime) -> None:
    sampling = SamplingParams(n=2, max_new_tokens=ENDLESS, ignore_eos=True)
    finishes = []
    inp = GenerateInput(text="a", sampling=sampling, rid="mine")
    async with asyncio.timeout(DEADLINE_S), aclosing(runtime.manager.generate(inp)) as deltas:
        async for delta in deltas:
            assert runtime.manager.abort("mine")
            if delta.finish is not None:
                finishes.append((delta.index, delta.finish.type, delta.finish.status))

    assert sorted(finishes) == [(0, "abort", None), (1, "abort", None)]
    assert not runtime.manager.abort("mine")


async def test_a_live_rid_cannot_be_taken_twice(runtime: Runtime) -> None:
    inp = GenerateInput(text="a", sampling=SamplingParams(max_new_tokens=ENDLESS), rid="twin")
    async with aclosing(runtime.manager.generate(inp)) as first:
        await anext(first)
        with pytest.raises(RequestError, match="twin"):
            await anext(runtime.manager.generate(inp))


async def test_draining_lets_live_requests_end_and_refuses_new_ones(own: Runtime) -> None:
    task = asyncio.create_task(ask(own))
    while own.manager.num_live < len(inputs()):
        await asyncio.sleep(0)

    drained = asyncio.create_task(own.drain(DEADLINE_S))
    await asyncio.sleep(0)
    assert not own.manager.ready()
    with pytest.raises(CapacityError, match="draining"):
        await anext(own.manager.generate(GenerateInput(text="late")))

    assert await drained
    assert len(await task) == 6


async def test_draining_aborts_what_is_left_at_the_deadline(own: Runtime) -> None:
    sampling = SamplingParams(max_new_tokens=ENDLESS, ignore_eos=True)
    inp = GenerateInput(text="a", sampling=sampling)
    heard = asyncio.Semaphore(0)
    task = asyncio.create_task(listen(own, inp, heard))
    await heard.acquire()

    assert not await own.drain(0.0)

    [said] = await task
    assert said.last is not None
    assert said.last.finish is not None
    assert (said.last.finish.type, said.last.finish.status) == ("abort", 503)


@pytest.mark.slow
async def test_close_leaves_no_process_and_no_file(model: Path) -> None:
    runtime = await Runtime.start(tiny_config(model))
    processes = [psutil.Process(pid) for pid in runtime.pids.values()]
    [backend] = runtime._backends
    assert backend.workspace.is_dir()

    await runtime.close()
    await runtime.close()

    assert not any(process.is_running() for process in processes)
    assert not backend.workspace.exists()


@pytest.mark.slow
async def test_a_child_that_cannot_start_is_reported_in_a_sentence(model: Path) -> None:
    config = tiny_config(model, load_format="safetensors")  # there are no weights
    before = set(psutil.Process().children())

    with pytest.raises(ConfigError) as caught:
        await Runtime.start(config)

    assert "Traceback" not in str(caught.value)
    assert set(psutil.Process().children()) == before


@pytest.mark.slow
@pytest.mark.parametrize("child", ["scheduler", "detokenizer"])
async def test_a_child_that_keeps_dying_is_given_up(model: Path, child: str) -> None:
    roles = tuple(replace(role, restart=RestartPolicy(max_restarts=0)) for role in ROLES)
    runtime = await Runtime.start(tiny_config(model), topology=Topology(roles=roles))
    try:
        heard = asyncio.Semaphore(0)
        sampling = SamplingParams(max_new_tokens=ENDLESS, ignore_eos=True)
        inp = GenerateInput(text="a", sampling=sampling)
        task = asyncio.create_task(listen(runtime, inp, heard))
        await heard.acquire()

        os.kill(runtime.pids[child], signal.SIGKILL)

        async with asyncio.timeout(DEADLINE_S):
            [said] = await task
        assert said.last is not None
        assert said.last.finish is not None
        assert (said.last.finish.type, said.last.finish.status) == ("abort", 503)
        assert not runtime.manager.alive()
        with pytest.raises(CapacityError, match="lost"):
            await anext(runtime.manager.generate(inp))
        with pytest.raises(CapacityError, match="lost"):
            await runtime.manager.control(FlushCache())
    finally:
        await runtime.close()


async def test_an_embedded_engine_may_have_processes_of_its_own(model: Path) -> None:
    flags = {"load_format": "dummy", "device": "cpu", "threads": 1, "max_total_tokens": 4096}
    params = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}

    def generate(processes: str) -> list[list[int]]:
        with Engine(model_path=str(model), processes=processes, **flags) as engine:
            replies = engine.generate(["hello", "other"], params)
            assert engine.flush_cache()
            return [r["output_ids"] for r in replies]

    one, many = [await asyncio.to_thread(generate, processes) for processes in ("one", "many")]
    assert one == many


FORGETFUL = """
import sys
from sylvan import Engine
if __name__ == "__main__":
    engine = Engine(model_path=sys.argv[1], processes=sys.argv[2], load_format="dummy",
                    device="cpu", threads=1, max_total_tokens=4096)
    print(engine.generate("hello", {"max_new_tokens": 2, "ignore_eos": True})["meta_info"])
"""


@pytest.mark.parametrize("processes", ["one", pytest.param("many", marks=pytest.mark.slow)])
async def test_a_script_that_never_shuts_its_engine_down_ends_cleanly(
    model: Path, tmp_path: Path, processes: str
) -> None:
    (script := tmp_path / "script.py").write_text(FORGETFUL)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, str(script), str(model), processes), stdout=PIPE, stderr=PIPE
    )
    said, complaints = await asyncio.wait_for(child.communicate(), 3 * DEADLINE_S)
    assert child.returncode == 0
    assert b"completion_tokens" in said
    assert b"Traceback" not in complaints
    assert b"was destroyed" not in complaints


@pytest.mark.slow
async def test_processes_that_hang_are_replaced(model: Path) -> None:
    await asyncio.gather(*(hang(model, role) for role in ("scheduler", "detokenizer")))


async def hang(model: Path, role: str) -> None:
    """Stop one process of an engine while it serves."""
    config = tiny_config(model)
    scheduler = msgspec.structs.replace(config.scheduler, hang_timeout_s=4.0)
    runtime = await Runtime.start(msgspec.structs.replace(config, scheduler=scheduler))
    try:
        heard = asyncio.Semaphore(0)
        params = SamplingParams(max_new_tokens=4000, ignore_eos=True, sampling_seed=3)
        inp = GenerateInput(text="a", sampling=params)
        task = asyncio.create_task(listen(runtime, inp, heard))
        await heard.acquire()
        before = runtime.pids[role]

        os.kill(before, signal.SIGSTOP)

        async with asyncio.timeout(DEADLINE_S):
            [said] = await task
        assert runtime.pids[role] != before
        assert len(said.ids) == 4000
    finally:
        await runtime.close()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_a_deadline_is_kept_while_the_scheduler_is_stopped(runtime: Runtime) -> None:
    sampling = SamplingParams(max_new_tokens=ENDLESS, ignore_eos=True)
    inp = GenerateInput(
        text="a", sampling=sampling, options=RequestOptions(deadline_s=0.2), stream=False
    )

    with stopped(runtime.pids["scheduler"]):
        async with asyncio.timeout(DEADLINE_S):
            [said] = await listen(runtime, inp, asyncio.Semaphore(0))

    assert said.last is not None
    assert said.last.finish is not None
    assert (said.last.finish.type, said.last.finish.status) == ("abort", 503)
    assert runtime.manager.num_live == 0
    assert (await until_idle(runtime))["num_used_tokens"] == 0  # it learned of the end


@pytest.mark.slow
async def test_the_server_is_not_ready_while_the_scheduler_shows_no_life(runtime: Runtime) -> None:
    async def until(ready: bool) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while runtime.manager.ready() != ready:
                await asyncio.sleep(0.01)

    with stopped(runtime.pids["scheduler"]):
        await until(False)
        assert runtime.manager.heartbeat_age_s() >= HEARTBEAT_MAX_AGE_S
        assert runtime.manager.alive()
    await until(True)

    before = runtime.pids["scheduler"]
    os.kill(before, signal.SIGKILL)
    await until(False)
    await until_restarted(runtime, "scheduler", before)
    assert runtime.manager.ready()
