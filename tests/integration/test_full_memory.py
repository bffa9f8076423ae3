"""No room where memory is shared: messages take another way, and a start that needs it says so."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from contextlib import aclosing

import pytest

from sylvan.kernels.native.library import load
from sylvan.kernels.native.ranks import SharedRanks
from sylvan.protocol.errors import ConfigError
from sylvan.protocol.requests import LogprobOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.engine.runtime import Runtime
from sylvan.runtime.tokenizer.types import GenerateInput
from sylvan.transport import workspace
from sylvan.transport.arrays import INLINE_MAX_BYTES
from tests.support.tiny import CONTEXT, tiny_config, write_model

pytestmark = pytest.mark.slow

DEADLINE_S = 120


@pytest.fixture
def small_memory(tmp_path_factory, monkeypatch):
    """4 MiB, where processes share memory."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root mounts a disk")
    folder = tmp_path_factory.mktemp("m")
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting is not permitted")
    monkeypatch.setattr(workspace, "_default_parent", lambda: folder)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder):
    """As another program does it; returns its file."""
    file = folder / "other"
    with file.open("wb", buffering=0) as stream:
        for size in (4096, 1):
            try:
                while True:
                    stream.write(bytes(size))
            except OSError:
                continue
    return file


async def answer(runtime):
    """Of a long prompt, with log probabilities: arrays that are too large for a message."""
    ids = [(7 * i) % 250 for i in range(CONTEXT - 100)]
    inp = GenerateInput(
        input_ids=ids,
        sampling=SamplingParams(max_new_tokens=5, temperature=0.0, ignore_eos=True),
        logprobs=LogprobOptions(start=0, top=2),
    )
    found, logprobs = [], 0
    async with aclosing(runtime.manager.generate(inp)) as deltas:
        async for delta in deltas:
            found += delta.token_ids
            if delta.prompt_logprobs is not None:
                logprobs += len(delta.prompt_logprobs.logprobs)
            assert delta.finish is None or delta.finish.type != "abort", delta.finish
    return found, logprobs


async def test_messages_take_another_way_while_there_is_no_room(small_memory, tmp_path):
    model = write_model(tmp_path)
    async with asyncio.timeout(DEADLINE_S):
        runtime = await Runtime.start(tiny_config(model))
        before = await answer(runtime)

        other = fill(small_memory)
        during = await answer(runtime)
        other.unlink()
        after = await answer(runtime)

        assert before == during == after
        assert 8 * before[1] > INLINE_MAX_BYTES  # of two alternatives, four bytes each
        await runtime.close()
        assert list(small_memory.iterdir()) == []


async def test_a_start_without_room_is_refused_with_the_reason(small_memory, tmp_path):
    model = write_model(tmp_path)
    fill(small_memory)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(ConfigError, match="No space left on device"):
            await Runtime.start(tiny_config(model))


def test_ranks_without_room_for_what_they_share_are_refused(small_memory):
    """Not ended by a signal when they write to it."""
    with pytest.raises(ConfigError, match=r"cannot share .* No space left on device"):
        SharedRanks(load(), small_memory / "ranks", 0, 4, 1.0, buffer_bytes=4 << 20)
