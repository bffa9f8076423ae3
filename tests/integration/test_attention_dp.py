"""Processes that have the KV of different requests: served, killed, and replayed."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from sylvan import Engine
from sylvan.config.tree import ParallelConfig
from sylvan.protocol.messages import GetState
from sylvan.runtime.engine.runtime import Runtime
from tests.integration.test_ranks import NATIVE, PROMPTS, RANKS
from tests.parity.checkpoints import write
from tests.parity.serving import Serving
from tests.support.streams import Streams, until
from tests.support.tiny import tiny_config, write_model

STREAMS = 32, 80
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
DP2 = ParallelConfig(tp=2, attention_dp=2, join_timeout_s=60.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("deepseek-v3", {"enable_dp_attention": True}),
        pytest.param(
            "mixtral", {"attn_dp_size": 2, "ep_size": 2, "threads": 1}, marks=pytest.mark.slow
        ),
    ],
)
def test_processes_with_different_requests_answer_as_one(
    family: str, flags: dict[str, object], tmp_path: Path
) -> None:
    write(NATIVE[family](), len(family), tmp_path)
    expected = Serving(tmp_path).generate(PROMPTS, max_new_tokens=12)
    given = {"device": "cpu", "threads": 1, "max_total_tokens": 4096, "tp_size": 2} | flags

    with Engine(model_path=str(tmp_path), dtype="float32", **given) as engine:
        replies = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)

    assert [reply["output_ids"] for reply in replies] == expected


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def expected(model: Path) -> list[list[int]]:
    alone = await Runtime.start(tiny_config(model, runner="eager"))
    found = await Streams(alone, *STREAMS).ended()
    await alone.close()
    return found


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def runtime(model: Path) -> AsyncIterator[Runtime]:
    runtime = await Runtime.start(tiny_config(model, parallel=DP2))
    yield runtime
    await runtime.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_rank_that_is_killed_is_replaced_and_streams_continue(
    runtime: Runtime, expected: list[list[int]], name: str
) -> None:
    before = runtime.pids
    streams = Streams(runtime, *STREAMS)
    await streams.under_way()

    os.kill(before[name], signal.SIGKILL)

    assert await streams.ended() == expected
    await until(lambda: all(runtime.pids[other] != before[other] for other in RANKS))
    [reply] = [reply for _, reply in await runtime.manager.router.control_each(GetState())]
    assert reply.body["config"]["deterministic"] is False
    assert reply.body["load"]["max_total_num_tokens"] == 65536
