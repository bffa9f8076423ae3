"""A model whose layers are divided among processes: served, lost, and replayed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from sylvan import Engine
from sylvan.config.tree import ParallelConfig
from sylvan.runtime.engine.runtime import Runtime
from tests.support.nodes import Cluster, free_port, two_nodes
from tests.support.random_model import write_random_model
from tests.support.streams import Streams, until
from tests.support.tiny import tiny_config, write_model

PP2 = ParallelConfig(pp=2, join_timeout_s=60.0)
RANKS = ["scheduler", "rank-1"]
STREAMS = 32, 120
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(model: Path) -> list[list[int]]:
    alone = await Runtime.start(tiny_config(model))
    found = await Streams(alone, *STREAMS).ended()
    await alone.close()
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime(model: Path) -> AsyncIterator[Runtime]:
    runtime = await Runtime.start(tiny_config(model, parallel=PP2))
    yield runtime
    await runtime.close()


@pytest.mark.slow
async def test_two_stages_answer_as_one_process(
    runtime: Runtime, expected: list[list[int]]
) -> None:
    assert await Streams(runtime, *STREAMS).ended() == expected
    assert set(runtime.pids) == {"scheduler", "rank-1", "detokenizer"}


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
async def test_a_stage_that_is_killed_is_replaced_and_streams_continue(
    runtime: Runtime, expected: list[list[int]], name: str
) -> None:
    before = runtime.pids
    streams = Streams(runtime, *STREAMS)
    await streams.under_way()

    os.kill(before[name], signal.SIGKILL)

    assert await streams.ended() == expected
    await until(lambda: all(runtime.pids[other] != before[other] for other in RANKS))


@pytest.mark.slow
async def test_stages_on_two_machines(model: Path) -> None:
    alone = await Runtime.start(tiny_config(model, runner="eager"))
    expected = await Streams(alone, 4, 60).ended()
    await alone.close()
    cluster = await Cluster.start(two_nodes(model, free_port(), tp=1, pp=2))

    assert await Streams(cluster.runtime, 4, 60).ended() == expected
    await cluster.close()


PROMPTS = [[5, 9, 20, 31], [7] * 29, [11, 12, 13]]
SAMPLED = {"temperature": 0.8, "max_new_tokens": 24, "ignore_eos": True, "sampling_seed": 3}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_native_stages_have_the_same_bits(dtype: str, tmp_path: Path) -> None:
    model = str(write_random_model(tmp_path, context_len=256))

    def answers(**more: object) -> list[Any]:
        flags = {"device": "cpu", "threads": 1, "max_total_tokens": 4096, "dtype": dtype}
        with Engine(model_path=model, **flags, **more) as engine:
            replies = engine.generate(
                input_ids=PROMPTS, sampling_params=SAMPLED, return_logprob=True
            )
        return [(r["output_ids"], r["meta_info"]["output_token_logprobs"]) for r in replies]

    one = await asyncio.to_thread(answers)
    assert await asyncio.to_thread(answers, pp_size=2) == one
