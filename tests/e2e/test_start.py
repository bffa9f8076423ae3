"""A start leaves a load cache for the next one by default."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest

from sylvan.kernels import describe
from tests.e2e.conftest import Server, running
from tests.support.random_model import write_random_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled"),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc says what a process has loaded"),
]

BODY = {
    "input_ids": [65, 66, 67, 68],
    "sampling_params": {"max_new_tokens": 24, "ignore_eos": True, "sampling_seed": 3},
}


def loads_torch(pid: int) -> bool:
    """Whether a process or one of those that it has started has loaded PyTorch."""
    root = Path(f"/proc/{pid}")
    if "libtorch" in (root / "maps").read_text():
        return True
    children = [c for task in root.glob("task/*/children") for c in task.read_text().split()]
    return any(loads_torch(int(child)) for child in children)


def answer(server: Server, **more: object) -> list[int]:
    reply = httpx.post(f"{server.url}/generate", json=BODY | more, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()["output_ids"]


def test_the_second_start_of_the_same_command_needs_no_pytorch(tmp_path, monkeypatch):
    monkeypatch.delenv("SYLVAN_LOAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = str(write_random_model(tmp_path / "model"))
    with running(model, "--device", "cpu") as server:
        assert loads_torch(server.process.pid)
        first = answer(server)
    left = tmp_path / "cache/sylvan/load"
    assert sorted(file.suffix for file in left.iterdir()) == [".program", ".weights"]

    with running(model, "--device", "cpu") as server:
        assert answer(server) == first
        assert not loads_torch(server.process.pid)
        answer(server, return_logprob=True, logprob_start_len=0)
        assert loads_torch(server.process.pid), "log probabilities of a prompt need it"
        assert answer(server) == first

    with running(model, "--device", "cpu", "--load-cache", "none") as server:
        assert answer(server) == first
        assert loads_torch(server.process.pid)


def test_servers_that_start_together_share_what_they_leave(tmp_path, monkeypatch):
    monkeypatch.delenv("SYLVAN_LOAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = str(write_random_model(tmp_path / "model"))
    with running(model, "--device", "cpu", "--dp", "2") as server:
        first = [answer(server) for _ in range(4)]
    assert first == [first[0]] * 4
    left = tmp_path / "cache/sylvan/load"
    assert sorted(file.suffix for file in left.iterdir()) == [".program", ".weights"]

    with running(model, "--device", "cpu", "--dp", "2") as server:
        assert [answer(server) for _ in range(4)] == first
        assert not loads_torch(server.process.pid)
