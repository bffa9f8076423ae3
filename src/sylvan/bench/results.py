"""Stored results: figures, settings, and origin."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

from sylvan import __version__
from sylvan.bench.outcome import RequestRecord
from sylvan.protocol.errors import ConfigError
from sylvan.utils.clock import unix_time
from sylvan.utils.machine import inspect_machine

Result = Mapping[str, Any]


def origin() -> dict[str, Any]:
    """Return machine and software of the client."""
    machine = inspect_machine()
    return {
        "date": datetime.fromtimestamp(unix_time(), UTC).isoformat(timespec="seconds"),
        "client": f"sylvan {__version__}",
        "commit": commit(),
        "python": platform.python_version(),
        "cpu": machine.cpu_name,
        "cores": machine.cores,
        "memory_bytes": machine.total_bytes,
    }


def commit() -> str | None:
    """Return the commit of the source checkout, with `+` if there are local changes.

    None if Sylvan was installed from a package.
    """
    here = Path(__file__).parent
    try:
        words = ["git", "-C", str(here), "describe", "--always", "--abbrev=12", "--dirty=+"]
        words += ["--exclude", "*"]
        run = partial(subprocess.run, capture_output=True, text=True, timeout=10, check=True)
        run(["git", "-C", str(here), "ls-files", "--error-unmatch", __file__])
        return str(run(words).stdout).strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def details(outcomes: Sequence[RequestRecord]) -> dict[str, list[Any]]:
    """Return the details of each request, under the names of SGLang's files."""
    return {
        "input_lens": [each.prompt_tokens for each in outcomes],
        "output_lens": [each.output_tokens for each in outcomes],
        "cached_lens": [each.cached_tokens for each in outcomes],
        "sent": [each.sent_s for each in outcomes],
        "latencies": [each.latency_s for each in outcomes],
        "ttfts": [each.ttft_s for each in outcomes],
        "itls": [each.gaps_s for each in outcomes],
        "generated_texts": [each.text for each in outcomes],
        "errors": [each.error for each in outcomes],
    }


def check_writable(name: str, setting: str) -> None:
    """Check before a long measurement that its file can be written.

    Raises:
        ConfigError: It cannot be written.
    """
    path = Path(name).expanduser()
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{setting}: {name} cannot be written")


def append(name: str, result: Result) -> None:
    """Append a line to a JSONL file.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        with Path(name).expanduser().open("a") as file:
            file.write(json.dumps(result) + "\n")
    except OSError as error:
        raise ConfigError(f"result.file: {name}: {error.strerror}") from error


def read_all(name: str, tag: str | None = None) -> list[dict[str, Any]]:
    """Return all runs in a file, or those with a tag.

    Raises:
        ConfigError: The file is unreadable, has another format, or contains none.
    """
    try:
        lines = Path(name).expanduser().read_text().splitlines()
        found = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} is not a file of results: {error}") from error
    chosen = [
        cast("dict[str, Any]", each)
        for each in found
        if isinstance(each, dict) and (tag is None or cast("Result", each).get("tag") == tag)
    ]
    if not chosen:
        raise ConfigError(f"{name} holds no results" + (f" with the tag {tag!r}" if tag else ""))
    return chosen
