"""However the API process ends, its children, sockets and shared memory end with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from sylvan.transport.workspace import sweep
from tests.support.tiny import write_model

PATIENCE_S = 30
ROOT = Path(__file__).parents[2]

SCRIPT = """
import asyncio, json, sys
from contextlib import aclosing
from pathlib import Path
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.engine.runtime import Runtime
from sylvan.runtime.tokenizer.types import GenerateInput
from sylvan.transport import workspace
from tests.support.tiny import ENDLESS, tiny_config

workspace._default_parent = lambda: Path(sys.argv[2])  # which no other engine sweeps

async def main():
    runtime = await Runtime.start(tiny_config(Path(sys.argv[1])))
    sampling = SamplingParams(max_new_tokens=ENDLESS, ignore_eos=True)
    async with aclosing(runtime.manager.generate(GenerateInput(text="a", sampling=sampling))) as s:
        await anext(s)
        about = {"pids": list(runtime.pids.values()), "path": str(runtime._backends[0].workspace)}
        print(json.dumps(about), flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


@dataclass
class Parent:
    """A program with a running engine, and what it left in the system."""

    process: subprocess.Popen[bytes]
    children: list[psutil.Process]
    path: Path

    def is_gone(self) -> bool:
        _, alive = psutil.wait_procs(self.children, timeout=PATIENCE_S)
        return not alive


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Parent]:
    command = [sys.executable, "-c", SCRIPT, str(write_model(tmp_path / "model"))]
    with (
        tempfile.TemporaryDirectory(prefix="orphans-") as folder,  # of a short name, for sockets
        subprocess.Popen([*command, folder], stdout=subprocess.PIPE, cwd=ROOT) as process,
    ):
        assert process.stdout is not None
        about = json.loads(process.stdout.readline())
        children = [psutil.Process(pid) for pid in about["pids"]]
        yield Parent(process, children, Path(about["path"]))
        process.kill()
        for child in psutil.wait_procs(children, timeout=PATIENCE_S)[1]:
            child.kill()


@pytest.mark.slow
def test_a_killed_parent_leaves_no_children_and_no_files(parent: Parent) -> None:
    assert parent.path.is_dir()
    assert parent.path.stat().st_mode & 0o777 == 0o700

    parent.process.kill()

    assert parent.is_gone()
    assert not parent.path.exists()


@pytest.mark.slow
def test_children_that_were_stopped_die_too_once_they_continue(parent: Parent) -> None:
    for child in parent.children:
        child.suspend()

    parent.process.kill()
    parent.process.wait()
    for child in parent.children:
        child.resume()

    assert parent.is_gone()
    assert not parent.path.exists()


@pytest.mark.slow
def test_leftovers_is_swept_by_the_next_engine(parent: Parent) -> None:
    for process in [*parent.children, parent.process]:
        os.kill(process.pid, signal.SIGSTOP)
    for process in [*parent.children, parent.process]:
        process.kill()
    parent.process.wait()
    assert parent.is_gone()
    assert parent.path.is_dir()

    sweep(parent.path.parent)

    assert not parent.path.exists()


@pytest.mark.slow
def test_a_living_engine_is_not_swept(parent: Parent) -> None:
    sweep(parent.path.parent)

    assert parent.path.is_dir()
