"""An engine whose processes are all suspended for a while, as by a laptop that sleeps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.tiny import write_model

HANG_TIMEOUT_S = 3.0
CHECKS_S = 2.5  # in which a watchdog that is wrong ends a process
PATIENCE_S = 60
ROOT = Path(__file__).parents[2]

SCRIPT = f"""
import asyncio, json, sys
from contextlib import aclosing
from pathlib import Path
import msgspec
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.engine.runtime import Runtime
from sylvan.runtime.tokenizer.types import GenerateInput
from tests.support.tiny import tiny_config

async def answer(runtime):
    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True)
    async with aclosing(runtime.manager.generate(GenerateInput(text="a", sampling=sampling))) as s:
        return sum([len(delta.token_ids) async for delta in s])

async def main():
    config = tiny_config(Path(sys.argv[1]))
    scheduler = msgspec.structs.replace(config.scheduler, hang_timeout_s={HANG_TIMEOUT_S})
    runtime = await Runtime.start(msgspec.structs.replace(config, scheduler=scheduler))
    while True:
        print(json.dumps({{"pids": runtime.pids, "tokens": await answer(runtime)}}), flush=True)
        if not await asyncio.to_thread(sys.stdin.readline):
            break
        await asyncio.sleep({CHECKS_S})
    await runtime.close()

asyncio.run(main())
"""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SCRIPT, str(write_model(tmp_path / "model"))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        children = []
        try:
            yield process
            children = psutil.Process(process.pid).children(recursive=True)
            assert process.stdin is not None
            process.stdin.close()
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            for child in psutil.wait_procs(children, timeout=PATIENCE_S)[1]:
                child.kill()


def report(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


@pytest.mark.slow
def test_healthy_processes_survive_a_suspension_longer_than_the_hang_timeout(
    engine: subprocess.Popen[str],
) -> None:
    before = report(engine)
    pids = [engine.pid, *before["pids"].values()]

    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(HANG_TIMEOUT_S + 0.5)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)

    assert engine.stdin is not None
    engine.stdin.write("again\n")
    engine.stdin.flush()
    assert report(engine) == {"pids": before["pids"], "tokens": 8}
