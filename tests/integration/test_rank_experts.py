"""Experts divided among processes: served by programs, whatever the placement."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from sylvan import Engine
from sylvan.config.tree import ParallelConfig
from sylvan.kernels import describe
from sylvan.runtime.engine.runtime import Runtime
from tests.integration.test_ranks import PROMPTS, RANKS
from tests.parity.checkpoints import write
from tests.parity.families import FAMILIES
from tests.parity.serving import Serving
from tests.support.streams import Streams, until
from tests.support.tiny import MODEL, tiny_config, write_model

EP2 = ParallelConfig(tp=2, ep=2, redundant_experts=2, join_timeout_s=60.0)
STREAMS = 32, 120
MODEL_OF_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixtral")
    write(FAMILIES["mixtral"](), 7, path)
    return path


def answers(model: Path, **more: object) -> tuple[list[list[int]], list[list[float]]]:
    """Ids, and log probabilities to the last bit."""
    flags = {"device": "cpu", "threads": 1, "max_total_tokens": 4096, "tp_size": 2, "ep_size": 2}
    with Engine(model_path=str(model), dtype="float32", **flags, **more) as engine:
        replies = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True)
    found = [[entry[0] for entry in r["meta_info"]["output_token_logprobs"]] for r in replies]
    return [r["output_ids"] for r in replies], found


@pytest.mark.slow
def test_processes_with_different_experts_answer_as_one(model: Path, tmp_path: Path) -> None:
    expected = Serving(model).generate(PROMPTS, max_new_tokens=12)
    loads = tmp_path / "loads.json"
    loads.write_text(json.dumps({"logical_count": [[90, 3, 1, 40, 2, 80, 1, 1]] * 3}))

    plain, bits = answers(model)
    placed, same = answers(model, ep_num_redundant_experts=2, init_expert_location=str(loads))

    assert plain == placed == expected
    assert same == bits or not describe().variant, "who has an expert changes no bit"


@pytest.mark.slow
def test_a_server_has_experts_in_groups_and_says_how_busy_they_are(model: Path) -> None:
    flags = {"device": "cpu", "threads": 1, "max_total_tokens": 4096, "tp_size": 2, "ep_size": 2}
    more = {"ep_num_redundant_experts": 2, "dtype": "float32"}
    expected = Serving(model).generate(PROMPTS, max_new_tokens=12)
    with Engine(model_path=str(model), **flags, **more) as engine:
        found = [
            r["output_ids"] for r in engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
        ]
        loads = engine.get_server_info()["expert_load"]
    assert found == expected
    rows = sum(map(len, PROMPTS)) + 2 * 11  # the last token of each is not run
    assert {sum(load) for load in loads.values()} == {2 * rows}


@pytest.mark.slow
def test_experts_are_moved_every_few_steps(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = {"device": "cpu", "threads": 1, "max_total_tokens": 4096, "tp_size": 2, "ep_size": 2}
    more = {"ep_num_redundant_experts": 2, "dtype": "float32", "log_level": "info"}
    every = {"enable_eplb": True, "eplb_rebalance_num_iterations": 3}
    expected = Serving(model).generate(PROMPTS, max_new_tokens=12)
    with Engine(model_path=str(model), **flags, **more, **every) as engine:
        replies = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    assert [reply["output_ids"] for reply in replies] == expected
    assert capfd.readouterr().err.count("experts moved") >= 2


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("experts"))
    (folder / "config.json").write_text(json.dumps(MODEL | MODEL_OF_EXPERTS))
    return folder


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def runtime(made_up: Path) -> AsyncIterator[Runtime]:
    runtime = await Runtime.start(tiny_config(made_up, parallel=EP2))
    yield runtime
    await runtime.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def undisturbed(made_up: Path) -> list[list[int]]:
    alone = await Runtime.start(tiny_config(made_up))
    found = await Streams(alone, *STREAMS).ended()
    await alone.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_rank_that_is_killed_is_replaced_and_streams_continue(
    runtime: Runtime, undisturbed: list[list[int]], name: str
) -> None:
    before = runtime.pids
    streams = Streams(runtime, *STREAMS)
    await streams.under_way()

    os.kill(before[name], signal.SIGKILL)

    assert await streams.ended() == undisturbed
    await until(lambda: all(runtime.pids[other] != before[other] for other in RANKS))
