"""Prefill and decode workers that speak gRPC, as pairs."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest

from sylvan.rpc import scheduler_pb2 as pb
from tests.support.cluster import gateway, until
from tests.support.grpc_workers import garbage
from tests.support.scripted import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("scripted"))


DONE = pb.GenerateResponse(
    complete=pb.GenerateComplete(output_ids=[70, 71], finish_reason="stop", prompt_tokens=3)
)


@asynccontextmanager
async def grpc_pairs(folder, prefills, decodes):
    """A gateway in front of recording workers; each is (what it was asked, how it fails)."""
    async with AsyncExitStack() as stack:
        urls = [
            await stack.enter_async_context(garbage(DONE, asked=asked, fail=fail))
            for asked, fail in (*prefills, *decodes)
        ]
        settings = {
            "workers__prefill_urls": (f"{urls[0]}#9001", *urls[1 : len(prefills)]),
            "workers__decode_urls": tuple(urls[len(prefills) :]),
            "tokens__tokenizer": str(folder),
            "routing__policy": "round_robin",
            "wait": len(urls),
        }
        yield await stack.enter_async_context(gateway(**settings))


async def test_pairs_meet_in_one_room(folder):
    prefill, decode = [], []
    async with grpc_pairs(folder, [(prefill, None)], [(decode, None)]) as front:
        for stream in (False, True):
            reply = await front.post("/generate", {"text": "abc", "stream": stream})
            assert reply.status_code == 200, reply.text
        await until(lambda: all(w.load == 0 for w in front.runtime.registry.workers))
    assert [m.disaggregated_params for m in prefill] == [m.disaggregated_params for m in decode]
    first, second = (m.disaggregated_params for m in decode)
    assert (first.bootstrap_host, first.bootstrap_port) == ("127.0.0.1", 9001)
    assert 0 <= first.bootstrap_room < 2**31
    assert first.bootstrap_room != second.bootstrap_room
    assert prefill[0].tokenized == decode[0].tokenized


@pytest.mark.parametrize("fail", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE])
async def test_another_prefill_worker_is_tried_when_one_fails(folder, fail):
    bad, good, decode = [], [], []
    async with grpc_pairs(folder, [(bad, fail), (good, None)], [(decode, None)]) as front:
        replies = [await front.post("/generate", {"text": "abc"}) for _ in range(3)]
        await until(lambda: all(w.load == 0 for w in front.runtime.registry.workers))
    assert [reply.status_code for reply in replies] == [200] * 3
    assert len(bad) >= 1
    assert len(good) >= 1


async def test_a_refusal_of_a_prefill_worker_ends_the_wait_for_the_decode_worker(folder):
    decode = []
    fail = grpc.StatusCode.INVALID_ARGUMENT
    async with grpc_pairs(folder, [([], fail)], [(decode, "hold")]) as front:
        reply = await front.post("/generate", {"text": "abc"})
        await until(lambda: all(w.load == 0 for w in front.runtime.registry.workers))
    assert reply.status_code == 400
    assert "it does not work" in reply.text


async def test_log_probabilities_of_prompts_are_refused_by_pairs(folder):
    async with grpc_pairs(folder, [([], None)], [([], None)]) as front:
        body = {"text": "abc", "return_logprob": True, "logprob_start_len": 0}
        reply = await front.post("/generate", body)
    assert reply.status_code == 501
    assert "logprob_start_len" in reply.json()["error"]["message"]
