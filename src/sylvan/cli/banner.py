"""The start-up output of `sylvan serve`."""

from __future__ import annotations

import json

from sylvan.cli.settings import Settings
from sylvan.config.fields import size_text
from sylvan.config.plan import MemoryPlan
from sylvan.config.route import FrontConfig
from sylvan.config.tree import Config, ServerConfig

QUESTION = "What is 17 + 25?"


def address(server: ServerConfig | FrontConfig, port: int) -> str:
    """Return the URL of the server for clients on this machine."""
    scheme = "https" if server.ssl_certfile else "http"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(server.host, server.host)
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{scheme}://{host}:{port}"


def decisions_text(settings: Settings) -> str:
    """Return the decisions that matter for speed and memory, one per line."""
    config, plan = settings.resolved.config, settings.resolved.plan
    scheduler = config.scheduler
    overlap = "overlapped" if scheduler.overlap == "on" else "one after the other"
    rows = [
        ("device", f"{config.device}, {config.threads} threads, {config.dtype}, {config.runner}"),
        ("attention", f"{config.attention}, pages of {plan.page_size} tokens"),
        ("context", f"{config.context_len} tokens"),
        ("steps", f"{scheduler.max_batch_tokens} tokens, {scheduler.policy}, {overlap}"),
        ("answers", _bits(settings)),
        *([("drafted", _drafted(settings))] if config.speculative else []),
        ("weights", size_text(plan.weight_bytes)),
        ("KV cache", _cache(config, plan)),
    ]
    return "\n".join(f"  {name:10} {text}" for name, text in rows)


def _cache(config: Config, plan: MemoryPlan) -> str:
    text = f"{size_text(plan.kv_bytes)}, {plan.num_tokens:,} tokens"
    undecided = config.device != "cpu" and config.cache.memory == "auto"
    return f"about {text}; measured once the model is loaded" if undecided else text


def _bits(settings: Settings) -> str:
    exact = settings.resolved.config.deterministic is True
    decision = settings.resolved.decisions.get("deterministic")
    words = "the same bits" if exact else "bits may differ"
    return f"{words}, whatever else is batched" + (f" ({decision.reason})" if decision else "")


def _drafted(settings: Settings) -> str:
    given = settings.resolved.config.speculative
    assert given is not None
    decision = settings.resolved.decisions.get("speculative.algorithm")
    why = f" ({decision.reason})" if decision else ""
    return f"{given.algorithm}, up to {given.num_steps} tokens ahead{why}"


def greeting(config: Config, name: str, url: str, seconds: float, *, replicas: int = 1) -> str:
    """Return how to use a server that is ready."""
    if config.server.uds:
        where, curl = f"unix:{config.server.uds}", f"curl --unix-socket {config.server.uds}"
        url = "http://localhost"
    else:
        where, curl = url, "curl"
    beside = f"{replicas} replicas, " if replicas > 1 else ""
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.server.api_key else ""
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": QUESTION}]})
    lines = [
        f"Sylvan serves {name} at {where} ({beside}ready after {seconds:.1f} s)",
        "",
        f"  {curl} {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\",
        f"    -d '{body}'",
    ]
    if not config.server.uds:
        lines += ["", f"  sylvan chat --url {url}"]
    if not config.server.uds and replicas == 1:
        lines += [f"  web page: {url}/ui", f"  documentation: {url}/docs"]
    return "\n".join(lines)
