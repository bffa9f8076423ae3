"""`sylvan serve` on two machines (loopback): by hand, and by torchrun; each may be lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.e2e.conftest import running
from tests.e2e.test_prefill_decode import FLAGS, generate
from tests.support.nodes import free_port
from tests.support.tiny import write_model

SYLVAN = [sys.executable, "-m", "sylvan"]
BODY = generate(temperature=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny"))


@contextmanager
def node(model: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another machine than the first."""
    command = [*SYLVAN, "serve", model, "--quiet", "--until-eof", *FLAGS, *flags]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


def ids(url: str) -> list[int]:
    reply = httpx.post(url + "/generate", json=BODY, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()["output_ids"]


@pytest.mark.slow
def test_machines_come_and_go(model: str) -> None:
    with running(model, *FLAGS, "--runner", "eager") as alone:
        expected = ids(alone.url)
    shared = ("--tp", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}")
    port = free_port()
    with node(model, *shared, "--node-rank", "1") as other:
        with running(model, *FLAGS, *shared, "--node-rank", "0", port=port) as first:
            assert ids(first.url) == expected
            first.kill()  # the other one waits for it
        with running(model, *FLAGS, *shared, "--node-rank", "0", port=port) as again:
            assert ids(again.url) == expected
            other.kill()
            other.wait(60)
            with node(model, *shared, "--node-rank", "1"):
                assert ids(again.url) == expected


@pytest.mark.slow
def test_torchrun_says_which_machine_is_which(model: str) -> None:
    master, port = str(free_port()), free_port()
    code = (
        "import httpx, time\n"
        f"url = 'http://127.0.0.1:{port}'\n"
        "end = time.monotonic() + 120\n"
        "while time.monotonic() < end:\n"
        "    try:\n"
        "        httpx.get(url + '/ready', timeout=5).raise_for_status()\n"
        "        break\n"
        "    except httpx.HTTPError:\n"
        "        time.sleep(0.2)\n"
    )
    started = []
    for rank in range(2):
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
            *("--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", master),
            *("--nproc-per-node", "1", "-m", "sylvan", "serve", model, "--tp", "2", *FLAGS),
            *("--port", str(port)),
        ]
        started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
    try:
        subprocess.run([sys.executable, "-c", code], check=True, timeout=150)
        with running(model, *FLAGS, "--runner", "eager") as alone:
            assert ids(f"http://127.0.0.1:{port}") == ids(alone.url)
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)
