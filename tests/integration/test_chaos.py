"""Streams under `--chaos` say what they say without it, byte for byte."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.engine.runtime import Runtime
from sylvan.runtime.tokenizer.types import GenerateInput
from tests.support.tiny import tiny_config, write_model

DEADLINE_S = 240
CHAOS = {
    "kill-scheduler": "0.05",
    "stop-scheduler": "0.05",
    "stop": "500ms",
    "ipc-delay": "20ms",
    "seed": "2123",  # kills once, after three seconds, and never again within a hundred
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def inputs():
    long = {"max_new_tokens": 100, "ignore_eos": True, "sampling_seed": 7}
    each = [{"temperature": 0.0}, {"temperature": 1.0, "n": 3}, {"stop": ("zq",)}]
    return [
        GenerateInput(text=f"prompt {i}", stream=True, sampling=SamplingParams(**long, **params))
        for i, params in enumerate(each)
    ]


async def said(runtime, inp):
    texts = [""] * inp.sampling.n
    async with aclosing(runtime.manager.generate(inp)) as deltas:
        async for delta in deltas:
            texts[delta.index] += delta.text
            finish = delta.finish
            assert finish is None or finish.type != "abort", finish
    return texts


async def all_said(runtime):
    return await asyncio.gather(*(said(runtime, inp) for inp in inputs()))


@pytest.mark.slow
async def test_streams_under_chaos_are_the_same_byte_for_byte(model):
    async with asyncio.timeout(DEADLINE_S):
        calm = await Runtime.start(tiny_config(model))
        expected = await all_said(calm)
        await calm.close()

        wild = await Runtime.start(tiny_config(model, chaos=CHAOS))
        pid = wild.pids["scheduler"]
        rounds = 0
        while wild.pids["scheduler"] == pid:
            assert await all_said(wild) == expected
            rounds += 1
        assert await all_said(wild) == expected
        assert rounds
        await wild.close()
