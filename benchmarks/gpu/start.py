"""Measures the start of a fresh server, without and with compiled kernels in the Triton cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from importlib.resources import files
from pathlib import Path

from kernels import Bench
from shapes import Shape

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def cold_and_warm(bench: Bench, folder: Path, shape: Shape) -> None:
    """Start twice in a row with a Triton cache that is empty at first."""
    path = shape.write(folder / f"start-{shape.name}")
    for name in _TOKENIZER:
        shutil.copy(str(files("sylvan.assets.sapling") / name), path)
    cache = folder / "triton"
    for what in ("cold", "warm"):
        name = f"{shape.name}: fresh server to ready, {what} Triton cache"
        if bench.report.fits(name, bench.needs(60 if what == "cold" else 30)):
            bench.report.add("start", name, _seconds(bench, path, cache), "s")


def _seconds(bench: Bench, path: Path, cache: Path) -> float:
    code = "import sys; from sylvan.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve", str(path), "--until-eof", "--server.port", "0"]
    command += ["--load-format", "dummy", "--device", bench.platform.facts.name]
    if bench.tiny:
        command += ["--cache.max-tokens", "4096"]
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    begun = time.perf_counter()
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        limit = threading.Timer(max(1.0, bench.report.left()), server.kill)
        limit.start()
        assert server.stdout is not None
        last = ""
        try:
            for line in server.stdout:
                if " serves " in line and "http://" in line:
                    return time.perf_counter() - begun
                last = line.strip() or last
            raise RuntimeError(f"the server did not start: {last}")
        finally:
            limit.cancel()
            assert server.stdin is not None
            server.stdin.close()  # it ends with its input
