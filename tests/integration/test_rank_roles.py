"""Prefill and decode servers of two ranks each: the answers of one server of two ranks."""

from __future__ import annotations

from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import Server, running
from tests.e2e.test_prefill_decode import FLAGS, PROMPT, Pair, free_port, generate
from tests.support.tiny import write_model

TWO = (*FLAGS, "--tp", "2", "--disagg.timeout-s", "20")
RANK = "sylvan.runtime.engine.rank_process"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module", params=["tcp", pytest.param("shm", marks=pytest.mark.slow)])
def pair(request, model):
    port = free_port()
    flags = (*TWO, "--disaggregation-transfer-backend", request.param)
    prefill = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port))
    with (
        running(model, *flags, *prefill) as first,
        running(model, *flags, "--disaggregation-mode", "decode") as second,
    ):
        yield Pair(first, second, port)


def agrees(pair: Pair, body: dict[str, Any]) -> None:
    prefill, decode = pair.ask("/generate", body)
    assert prefill.status_code == decode.status_code == 200, (prefill.text, decode.text)
    assert decode.json()["output_ids"] == pair.alone("/generate", body).json()["output_ids"]


@pytest.mark.slow
def test_ranks_hand_over_their_parts(pair):
    page_bytes = pair.counts(pair.decode)["num_bytes"]
    agrees(pair, generate(temperature=1.0, sampling_seed=7))
    agrees(pair, generate(PROMPT + "and another one", temperature=0))
    after = pair.counts(pair.decode)
    assert (after["done"], after["failed"], after["refused"]) == (2, 0, 0)
    assert after["num_bytes"] > page_bytes


@pytest.mark.slow
def test_a_server_of_one_rank_is_refused_by_name(pair, model):
    with running(model, *FLAGS, "--disaggregation-mode", "decode") as alone:
        other = Pair(pair.prefill, alone, pair.port)
        _, decode = other.ask("/generate", generate("x" * 100))
        assert decode.status_code == 503
        assert "shards" in decode.text
    agrees(pair, generate(PROMPT + "afterwards", temperature=0))


def ranks(server: Server) -> list[psutil.Process]:
    """Processes of ranks but the first."""
    every = psutil.Process(server.process.pid).children(recursive=True)
    return [each for each in every if RANK in " ".join(each.cmdline())]


@pytest.mark.slow
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_rank_that_dies_takes_no_request_with_it(pair, side):
    [lost] = ranks(getattr(pair, side))
    lost.kill()
    body = generate(PROMPT + side, temperature=0)
    _, decode = pair.ask("/generate", body)
    assert decode.status_code == 200, decode.text
    assert decode.json()["output_ids"] == pair.alone("/generate", body).json()["output_ids"]
    queues = httpx.get(pair.decode.url + "/v1/loads?include=all", timeout=60).json()
    found = queues["loads"][0]["disaggregation"]
    assert not any(count for name, count in found.items() if name.endswith("queue_reqs"))
