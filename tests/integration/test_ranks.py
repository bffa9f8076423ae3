"""A model held by several processes: served, lost, found, and replayed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from sylvan import Engine
from sylvan.config.tree import ParallelConfig
from sylvan.kernels import describe
from sylvan.protocol.errors import ConfigError
from sylvan.protocol.messages import FlushCache, GetState
from sylvan.runtime.engine.roles import Topology, roles_of
from sylvan.runtime.engine.runtime import Runtime
from tests.parity.checkpoints import write
from tests.parity.families import FAMILIES
from tests.parity.rare import RARE
from tests.parity.serving import Serving
from tests.support.draft_heads import write_head
from tests.support.random_model import write_random_model
from tests.support.streams import Streams, until
from tests.support.tiny import tiny_config, write_model

TP2 = ParallelConfig(tp=2, join_timeout_s=60.0)
RANKS = ["scheduler", "rank-1"]
STREAMS = 32, 120
NATIVE = {**FAMILIES, **RARE}
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime(model: Path) -> AsyncIterator[Runtime]:
    runtime = await Runtime.start(tiny_config(model, parallel=TP2))
    yield runtime
    await runtime.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(runtime: Runtime) -> list[list[int]]:
    return await Streams(runtime, *STREAMS).ended()


async def test_two_processes_answer_as_one(
    model: Path, runtime: Runtime, undisturbed: list[list[int]]
) -> None:
    alone = await Runtime.start(tiny_config(model))
    expected = await Streams(alone, *STREAMS).ended()
    await alone.close()

    assert undisturbed == expected
    assert set(runtime.pids) == {"scheduler", "rank-1", "detokenizer"}
    [reply] = [reply for _, reply in await runtime.manager.router.control_each(GetState())]
    assert reply.body["config"]["parallel"]["tp"] == 2
    # steps of ranks are native programs, too, where there are any
    assert reply.body["config"]["deterministic"] == (describe().variant is not None)


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
async def test_a_rank_that_is_killed_is_replaced_and_streams_continue(
    runtime: Runtime, undisturbed: list[list[int]], name: str
) -> None:
    before = runtime.pids
    streams = Streams(runtime, *STREAMS)
    await streams.under_way()

    os.kill(before[name], signal.SIGKILL)

    assert await streams.ended() == undisturbed
    await until(lambda: all(runtime.pids[other] != before[other] for other in RANKS))
    assert runtime.pids["detokenizer"] == before["detokenizer"]
    assert not any(psutil.pid_exists(before[other]) for other in RANKS)


@pytest.mark.slow
async def test_a_rank_that_hangs_is_replaced_and_streams_continue(
    runtime: Runtime, undisturbed: list[list[int]]
) -> None:
    before = runtime.pids
    streams = Streams(runtime, *STREAMS)
    await streams.under_way()

    os.kill(before["rank-1"], signal.SIGSTOP)

    assert await streams.ended() == undisturbed
    await until(lambda: all(runtime.pids[other] != before[other] for other in RANKS))
    control = await runtime.manager.control(FlushCache())
    assert control.ok


@pytest.mark.slow
async def test_the_end_leaves_nothing_behind(model: Path) -> None:
    runtime = await Runtime.start(tiny_config(model, parallel=TP2))
    processes = [psutil.Process(pid) for pid in runtime.pids.values()]
    [backend] = runtime._backends

    await runtime.close()

    assert not any(process.is_running() for process in processes)
    assert not backend.workspace.exists()


@pytest.mark.slow
async def test_a_model_that_does_not_divide_is_refused_in_a_sentence(model: Path) -> None:
    """The first rank waits for no other before."""
    config = tiny_config(model, parallel=ParallelConfig(tp=3, join_timeout_s=3600.0))
    topology = Topology(roles=tuple(r for r in roles_of(config) if r.name != "rank-1"))

    with pytest.raises(ConfigError, match=r"^parallel\.tp=3: .*; this model divides by 1, 2, 4$"):
        await Runtime.start(config, topology=topology)


@pytest.mark.slow
async def test_a_rank_that_never_joins_is_named(model: Path) -> None:
    config = tiny_config(model, parallel=ParallelConfig(tp=2, join_timeout_s=1.0))
    topology = Topology(roles=tuple(r for r in roles_of(config) if r.name != "rank-1"))

    with pytest.raises(ConfigError, match="rank 1 of 2 did not join within 1 s"):
        await Runtime.start(config, topology=topology)


@pytest.mark.slow
async def test_a_family_is_served_by_processes(tmp_path: Path) -> None:
    """Experts and recurrent states, in programs or beside them; all families: `tests/parity`."""
    write(NATIVE["jamba"](), len("jamba"), tmp_path)
    expected = Serving(tmp_path).generate(PROMPTS, max_new_tokens=12)
    params = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}

    replies = await asyncio.to_thread(two_ranks, tmp_path, params)

    assert [reply["output_ids"] for reply in replies] == expected


PROMPTS = [[5, 9, 20, 31], [7] * 29]


def two_ranks(model: Path, params: dict[str, Any], **more: object) -> list[dict[str, Any]]:
    """The answers of two ranks."""
    flags = {"device": "cpu", "threads": 1, "max_total_tokens": 4096, "tp_size": 2}
    with Engine(model_path=str(model), dtype="float32", **flags, **more) as engine:
        return engine.generate(input_ids=PROMPTS, sampling_params=params)


SAMPLED = {"temperature": 0.8, "max_new_tokens": 24, "ignore_eos": True, "sampling_seed": 3}


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A model, and what it answers without draft tokens."""
    model = write_random_model(tmp_path_factory.mktemp("drafted"), context_len=256)
    return model, [reply["output_ids"] for reply in two_ranks(model, SAMPLED)]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["EAGLE3", "NGRAM"])
async def test_drafts_go_with_ranks(
    algorithm: str, drafted: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    """The first rank has all of a draft head, and the others verify its drafts."""
    model, plain = drafted
    options = {"speculative_algorithm": algorithm, "speculative.adaptive": False}
    if algorithm == "EAGLE3":
        options["speculative_draft_model_path"] = str(write_head(tmp_path / "head", "eagle3"))

    found = await asyncio.to_thread(two_ranks, model, SAMPLED, **options)

    assert [r["output_ids"] for r in found] == plain
    assert sum(r["meta_info"].get("spec_verify_ct", 0) for r in found) > 0


@pytest.mark.slow
async def test_an_embedded_engine_may_have_ranks(model: Path) -> None:
    flags = {"load_format": "dummy", "device": "cpu", "threads": 1, "max_total_tokens": 4096}
    params = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}

    def generate(**more: object) -> list[list[int]]:
        with Engine(model_path=str(model), dtype="float32", **flags, **more) as engine:
            found = [r["output_ids"] for r in engine.generate(["hello", "other"], params)]
            session = engine.open_session(1000)
            for turn in ({"id": session}, {"id": session, "rid": "turn-1"}):
                rid = f"turn-{len(turn)}"
                reply = engine.generate("and then", params, rid=rid, session_params=turn)
                found.append(reply["output_ids"])
        return found

    one = await asyncio.to_thread(generate, runner="eager")
    assert await asyncio.to_thread(generate, tp_size=2, parallel={"backend": "gloo"}) == one
