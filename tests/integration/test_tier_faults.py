"""Storage that is full, read-only, hung, gone or full of garbage: requests compute instead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.storage.api import StoreLimits
from sylvan.runtime.storage.find import open_store
from sylvan.runtime.storage.maintenance import verify
from tests.support.stores import REDIS, redis_process
from tests.support.tier_servers import PROMPT, Served
from tests.support.tiny import write_model

OTHERS = [[(7 * token + number) % 200 + 5 for token in PROMPT] for number in range(4)]
PROMPTS = [PROMPT, *OTHERS]
FOREVER = StoreLimits()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def wanted(model) -> list[list[int]]:
    """Answers of a server without a store."""
    with Served(model, None) as plain:
        return [plain.ask(prompt)[0] for prompt in PROMPTS]


@contextmanager
def file_system(folder: Path, size: str) -> Iterator[None]:
    """A file system of its own, which only root may make."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def test_a_full_disk_costs_hits_only(model, wanted, tmp_path):
    folder = tmp_path / "disk"
    with file_system(folder, "400k"), Served(model, folder / "kv") as served:
        for prompt, answer in zip(PROMPTS, wanted, strict=True):
            assert served.ask(prompt)[0] == answer
        served.settle()
        counts = served.counts
        assert counts["lost_pages"] > 0
        assert counts["errors"] > 0
        assert not [*(folder / "kv" / "incoming").iterdir()], "what did not fit is not left there"
        remount(folder, "size=64m")
        with Served(model, folder / "kv") as again:
            for prompt, answer in zip(PROMPTS, wanted, strict=True):
                assert again.ask(prompt)[0] == answer
            again.settle()
            assert again.counts["lost_pages"] == 0
            assert not any(again.counts["faults"].values()), "nothing was torn"
        with Served(model, folder / "kv") as third:
            assert third.ask(OTHERS[-1]) == (wanted[-1], 192)


def test_a_read_only_disk_is_refused_unless_its_hits_may_be_done_without(model, wanted, tmp_path):
    folder = tmp_path / "disk"
    with file_system(folder, "64m"):
        with Served(model, folder / "kv") as first:
            assert first.ask()[0] == wanted[0]
        remount(folder, "ro")
        with pytest.raises(ConfigError, match=r"tiers\.storage=.*Fix it.*best_effort"):
            Served(model, folder / "kv")
        with Served(model, folder / "kv", tiers={"prefetch": "best_effort"}) as without:
            assert without.ask() == (wanted[0], 0)
        remount(folder, "rw")
        with Served(model, folder / "kv") as again:
            assert again.ask() == (wanted[0], 192)


@pytest.mark.skipif(REDIS is None, reason="neither valkey-server nor redis-server is installed")
class TestRedis:
    def test_a_server_that_hangs_is_not_waited_for(self, model, wanted, tmp_path):
        with redis_process(tmp_path) as (url, server):
            where = f"{url}?socket_timeout=0.5"
            with Served(model, where) as served:
                assert served.ask()[0] == wanted[0]
                served.settle()
                server.send_signal(signal.SIGSTOP)
                try:
                    for prompt, answer in zip(PROMPTS, wanted, strict=True):
                        assert served.ask(prompt)[0] == answer
                    assert served.counts["errors"] >= 3
                    began = time.monotonic()
                    served.built.scheduler.flush_cache()
                    assert served.ask() == (wanted[0], 0), "it is left alone by now"
                    assert time.monotonic() - began < 30
                finally:
                    server.send_signal(signal.SIGCONT)
            with Served(model, where) as again:
                assert again.ask() == (wanted[0], 192)

    def test_a_server_that_dies_is_done_without(self, model, wanted, tmp_path):
        with redis_process(tmp_path) as (url, server), Served(model, url) as served:
            assert served.ask()[0] == wanted[0]
            served.settle()
            server.kill()
            server.wait()
            served.built.scheduler.flush_cache()
            for prompt, answer in zip(PROMPTS, wanted, strict=True):
                assert served.ask(prompt)[0] == answer
            assert served.counts["errors"] > 0

    def test_garbage_is_not_used(self, model, wanted, tmp_path):
        with redis_process(tmp_path) as (url, _):
            with Served(model, url) as served:
                assert served.ask()[0] == wanted[0]
            store = open_store(url, FOREVER)
            pages = [*store.pages()]
            for number, page in enumerate(pages):
                record = store.read(page.name)
                assert record is not None
                garbage = (os.urandom(len(record)), b"", record[:-1], record + b"x", b"SYKV")
                store.write(page.name, garbage[number % len(garbage)])
            with Served(model, url) as again:
                assert again.ask() == (wanted[0], 0)
                assert sum(again.counts["faults"].values()) >= 1
            store.clear()
            store.write_manifest(os.urandom(100))
            with pytest.raises(ConfigError, match="manifest cannot be read"):
                Served(model, url)
            store.close()


def test_two_servers_write_one_store(model, wanted, tmp_path):
    """Their steps alternate, so that each finds what the other is just writing."""
    with Served(model, tmp_path / "kv") as one, Served(model, tmp_path / "kv") as two:
        for prompt, answer in zip(PROMPTS, wanted, strict=True):
            for served in (one, two):
                served.begin(prompt)
            while not (one.built.scheduler.idle and two.built.scheduler.idle):
                if not one.built.scheduler.step() | two.built.scheduler.step():
                    time.sleep(0.001)
            assert one.ids == two.ids == answer
    found = open_store(str(tmp_path / "kv"), FOREVER)
    checked = verify(found)
    assert checked.good >= len(PROMPTS) * 12
    assert not checked.wrong
    found.close()
    with Served(model, tmp_path / "kv") as third:
        assert third.ask() == (wanted[0], 192)
        assert [third.ask(prompt)[0] for prompt in PROMPTS] == wanted


SERVER = """
import sys
from pathlib import Path
from tests.integration.test_tier_faults import PROMPTS
from tests.support.tier_servers import Served
served = Served(Path(sys.argv[1]), sys.argv[2])
print("up", flush=True)
for turn in range(1000):
    for prompt in PROMPTS:
        served.ask([(token + 11 * turn) % 200 + 5 for token in prompt] if turn else prompt)
"""


@pytest.mark.slow
def test_a_server_that_is_killed_while_it_writes_leaves_no_wrong_byte(model, wanted, tmp_path):
    for num_pages in (3, 20):
        command = [sys.executable, "-c", SERVER, str(model), str(tmp_path / "kv")]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=os.getcwd())
        assert server.stdout is not None
        assert server.stdout.readline() == b"up\n"
        until = time.monotonic() + 300
        while len([*(tmp_path / "kv" / "pages").glob("*/*/*")]) < num_pages:
            assert time.monotonic() < until
        server.kill()
        server.wait()
        server.stdout.close()
        with Served(model, tmp_path / "kv") as served:
            for prompt, answer in zip(PROMPTS, wanted, strict=True):
                assert served.ask(prompt)[0] == answer
            assert not any(served.counts["faults"].values())
        store = open_store(str(tmp_path / "kv"), FOREVER)
        assert not verify(store).wrong
        store.close()
