"""Stores of every kind, with real servers behind them."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sylvan.runtime.storage.manifest import GroupLayout, Manifest

REDIS = shutil.which("valkey-server") or shutil.which("redis-server")


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """A real server on a free port of loopback; gives its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [REDIS, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
    server = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL)
    try:
        for _ in range(500):
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.01)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.kill()
        server.wait()


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
