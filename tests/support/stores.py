"""Stores of every kind, backed by real servers."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sylvan.runtime.storage.manifest import GroupLayout, Manifest

REDIS = shutil.which("valkey-server") or shutil.which("redis-server")


MOTO = importlib.util.find_spec("moto") and importlib.util.find_spec("s3fs")
MOONCAKE = importlib.util.find_spec("mooncake")
NIXL = importlib.util.find_spec("nixl_cu12") or importlib.util.find_spec("nixl_cu13")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def listening(command: list[str], *ports: int) -> Iterator[subprocess.Popen]:
    """Run a server; yield once it listens on these loopback ports."""
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while not all(map(_listens, ports)):
            assert server.poll() is None, f"{command} ended"
            assert time.monotonic() < until
            time.sleep(0.01)
        yield server
    finally:
        server.kill()
        server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return not probe.connect_ex(("127.0.0.1", port))


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Run a real server on a free loopback port; yield its URL."""
    with redis_process(folder) as (url, _):
        yield url


@contextmanager
def redis_process(folder: Path) -> Iterator[tuple[str, subprocess.Popen]]:
    """As `redis_server`, with its process."""
    port = free_port()
    command = [REDIS, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
    with listening([*map(str, command)], port) as server:
        yield f"redis://127.0.0.1:{port}/0", server


@contextmanager
def s3_server() -> Iterator[tuple[str, subprocess.Popen]]:
    """Run an object store; yield its endpoint, and its process."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with listening(command, port) as server:
        yield f"http://127.0.0.1:{port}", server


@contextmanager
def mooncake_master() -> Iterator[tuple[str, subprocess.Popen]]:
    """Run a master of Mooncake's store; yield the URL of a client that lends it memory."""
    port, admin = free_port(), free_port()
    program = Path(MOONCAKE.origin).parent / "mooncake_master"
    flags = {"rpc_port": port, "metrics_port": admin}
    flags |= {"rpc_address": "127.0.0.1", "metrics_host": "127.0.0.1"}
    command = [str(program), *(f"--{name}={value}" for name, value in flags.items())]
    with listening(command, port, admin) as master:
        options = f"segment=64MiB&buffer=16MiB&admin=127.0.0.1:{admin}"
        yield f"mooncake://127.0.0.1:{port}/KEY?{options}", master


def manifest(**changes) -> Manifest:
    values = {
        "version": "0",
        "weights": "w",
        "tokenizer": "t",
        "dtype": "float32",
        "quantization": "",
        "kv_dtype": "model",
        "runner": "program",
        "attention": "native",
        "context_len": 128,
        "page_size": 16,
        "groups": (GroupLayout("full", "full", 64),),
    }
    return Manifest(**values | changes)


def name_of(number: int, space: int = 0, kind: str = "kv") -> str:
    return f"{space:016x}/{number:064x}.{kind}"
