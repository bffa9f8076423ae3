"""What `sylvan serve` tells the person who started it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sylvan.cli.settings import Settings
from sylvan.config.fields import size_text
from sylvan.config.tree import Config, ServerConfig

QUESTION = "What is 17 + 25?"


def address(server: ServerConfig, port: int) -> str:
    """URL under which a client on this machine reaches the server."""
    scheme = "https" if server.ssl_certfile else "http"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(server.host, server.host)
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{scheme}://{host}:{port}"


def decisions_text(settings: Settings) -> str:
    """The decisions that matter for speed and memory, one a line."""
    config, plan = settings.resolved.config, settings.resolved.plan
    scheduler = config.scheduler
    overlap = "overlapped" if scheduler.overlap == "on" else "one after the other"
    rows = [
        ("device", f"{config.device}, {config.threads} threads, {config.dtype}, {config.runner}"),
        ("attention", f"{config.attention}, pages of {plan.page_size} tokens"),
        ("context", f"{config.context_len} tokens"),
        ("steps", f"{scheduler.max_batch_tokens} tokens, {scheduler.policy}, {overlap}"),
        ("weights", size_text(plan.weight_bytes)),
        ("KV cache", f"{size_text(plan.kv_bytes)}, {plan.num_tokens:,} tokens"),
    ]
    return "\n".join(f"  {name:10} {text}" for name, text in rows)


def greeting(config: Config, name: str, url: str, seconds: float) -> str:
    """How to talk to a server that is ready."""
    if config.server.uds:
        where, curl = f"unix:{config.server.uds}", f"curl --unix-socket {config.server.uds}"
        url = "http://localhost"
    else:
        where, curl = url, "curl"
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.server.api_key else ""
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": QUESTION}]})
    lines = [
        f"Sylvan serves {name} at {where} (ready after {seconds:.1f} s)",
        "",
        f"  {curl} {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\",
        f"    -d '{body}'",
    ]
    if not config.server.uds:
        lines += ["", f"  sylvan chat --url {url}", f"  documentation: {url}/docs"]
    return "\n".join(lines)


@contextmanager
def loading(text: str) -> Iterator[None]:
    """Show that something goes on, if a person is watching."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(text, total=None)
        yield


@contextmanager
def counting(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show how far something has come, if a person is watching: give (done, total) as it goes."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(text, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
