"""Prompts computed between steps: the same answers, and requests that decode wait briefly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sylvan.config.sources import from_keywords, gather
from sylvan.kernels import describe
from sylvan.protocol.arrays import EMPTY_IDS
from sylvan.protocol.errors import ConfigError
from sylvan.protocol.messages import TokenOutput
from sylvan.protocol.requests import GenerateRequest, LogprobOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.engine.build import build_scheduler
from tests.support.tiny import write_model

pytestmark = pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")
LONG = 150


class Server:
    """A scheduler of this process."""

    def __init__(self, model: str, **options: Any) -> None:
        given = {"load_format": "dummy", "dtype": "float32", "threads": 1, **options}
        given |= {"model": model, "cache__page_size": 16, "log_level": "error"}
        given |= {"cache__max_tokens": 2048, "scheduler__chunk_tokens": 64}
        self.outputs: list[TokenOutput] = []
        self.built = build_scheduler(gather(from_keywords(given)).config, self.outputs.extend)
        self.scheduler = self.built.scheduler

    def add(self, rid: str, ids: list[int], new: int, **given: Any) -> None:
        sampling = SamplingParams(
            max_new_tokens=new, temperature=1.0, ignore_eos=True, sampling_seed=len(ids)
        )
        request = GenerateRequest(
            rid=rid,
            input_ids=np.array(ids, np.int32),
            output_ids=EMPTY_IDS,
            sampling=sampling,
            interval=1,
            **given,
        )
        self.scheduler.add(request)

    def run(self, most: int = 5000) -> dict[str, list[int]]:
        """Until nothing is left; the tokens of each request."""
        for _ in range(most):
            if self.scheduler.idle:
                break
            self.scheduler.step()
        assert self.scheduler.idle
        assert self.scheduler.audit() == 0
        found: dict[str, list[int]] = {}
        for output in self.outputs:
            found.setdefault(output.rid, []).extend(output.token_ids)
        return found

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.scheduler.step()

    def close(self) -> None:
        self.built.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def servers(model) -> Iterator[Any]:
    made: list[Server] = []

    def make(**options: Any) -> Server:
        made.append(Server(model, **options))
        return made[-1]

    yield make
    for server in made:
        server.close()


ON = {"pdmux__min_tokens": 32, "pdmux__wait_ms": 0.001}


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 60, length).tolist()


def mixed(server: Server) -> dict[str, list[int]]:
    """Long prompts that arrive while others decode, one of which shares a start."""
    for number in range(3):
        server.add(f"d{number}", prompt(9 + number, number), 60)
    server.steps(4)
    server.add("long", prompt(LONG, 7), 8)
    server.add("shares", [*prompt(LONG, 7)[:100], *prompt(30, 8)], 8)
    server.add("other", prompt(LONG + 13, 9), 8)
    server.add("short", prompt(12, 10), 8)
    return server.run()


def test_answers_are_those_without(servers):
    assert mixed(servers(**ON)) == mixed(servers())


def test_requests_that_decode_get_a_token_in_each_step(servers):
    server = servers(**ON)
    server.add("d", prompt(9, 0), 200)
    server.steps(4)
    server.add("long", prompt(LONG, 7), 4)
    seen = len(server.outputs)
    steps = 0
    while not any(output.rid == "long" for output in server.outputs):
        server.scheduler.step()
        steps += 1
    assert steps > 10  # an op a step: it waited for no more
    decoded = [output for output in server.outputs[seen:] if output.rid == "d"]
    assert sum(len(output.token_ids) for output in decoded) >= steps - 2


def test_an_aborted_prompt_leaves_no_page(servers):
    server = servers(**ON)
    server.add("d", prompt(9, 0), 80)
    server.steps(4)
    for number in range(6):
        server.add(f"long{number}", prompt(LONG, 20 + number), 4)
    server.steps(3)
    for number in range(5):
        server.scheduler.abort(f"long{number}")
    found = server.run()
    assert len(found["long5"]) == 4
    assert server.scheduler.load().num_running_reqs == 0


def test_log_probabilities_of_prompts_are_those_without(servers):
    def ask(server: Server) -> Any:
        server.add("d", prompt(9, 0), 40)
        server.steps(4)
        server.add("p", prompt(LONG, 7), 4, logprobs=LogprobOptions(start=0, top=1))
        return server.run()

    assert ask(servers(**ON)) == ask(servers())


def test_a_model_without_a_step_program_is_refused_by_name(servers):
    with pytest.raises(ConfigError, match="pdmux: prompts cannot be computed op by op"):
        servers(runner="eager", **ON)
