"""Reports the model, the settings and the load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge
from starlette.responses import Response

from sylvan.api.native import LoadsQuery, RecentQuery
from sylvan.api.version import VERSION
from sylvan.config.values import Secret
from sylvan.protocol.messages import GetState
from sylvan.runtime.server.context import Context
from sylvan.runtime.server.endpoint import Call, json_response
from sylvan.runtime.tokenizer.scheduler_client import SchedulerClient
from sylvan.runtime.tokenizer.types import ServedModelInfo

_HIDDEN = "key", "password", "secret", "token_file"


async def model_info(call: Call[None]) -> Response:
    """Describe the model."""
    settings, facts = call.context.settings, call.context.engine.facts
    return json_response(
        {
            "model_path": facts.model_path,
            "served_model_name": settings.served_model_name,
            "tokenizer_path": facts.model_path,
            "is_generation": facts.is_generation,
            "preferred_sampling_params": dict(settings.text.preferred_sampling_params) or None,
            "weight_version": call.context.engine.router.weight_version,
            "load_format": settings.shown.get("load_format", "auto"),
            "reasoning_parser": call.context.parsers.reasoning_name,
            "tool_call_parser": call.context.parsers.tool_name,
            "disaggregation_mode": call.context.role.current or "null",
            "has_image_understanding": "image" in facts.media_tokens,
            "has_audio_understanding": "audio" in facts.media_tokens,
            "model_type": facts.model_type,
            "architectures": [facts.architecture] if facts.architecture else [],
            "max_model_len": facts.context_len,
        }
    )


async def server_info(call: Call[None]) -> Response:
    """Return resolved settings and the state of each scheduler, without secrets."""
    context = call.context
    facts = context.engine.facts
    replies = await context.engine.router.control_each(GetState())
    scheduler_info = {
        "max_total_num_tokens": facts.max_total_tokens,
        "max_req_input_len": facts.max_request_tokens - 1,
        "context_length": facts.context_len,
        "page_size": facts.page_size,
        "max_running_requests": facts.max_running_reqs,
    }
    return json_response(
        {
            **public(dict(context.settings.shown)),
            **_loaded_values(facts),
            "model_path": facts.model_path,
            "tokenizer_path": facts.model_path,
            "dp_size": len(context.engine.router.clients),
            "served_model_name": context.settings.served_model_name,
            "host": context.settings.host,
            "port": _port(call),
            "version": VERSION,
            "frontend": "python",
            "startup_time": context.started,
            "state": context.engine.state,
            **scheduler_info,
            "scheduler_info": scheduler_info,
            "internal_states": [
                _internal_state(context, client, reply.body or {}) for client, reply in replies
            ],
        }
    )


def _internal_state(
    context: Context, client: SchedulerClient, state: Mapping[str, Any]
) -> dict[str, Any]:
    facts = client.facts or context.engine.facts
    drafted = client.load.verified_drafts > 0
    return {
        **state,
        **_load(context, client),
        "world_size": 1,
        "startup_time": context.started,
        "effective_max_running_requests_per_dp": facts.max_running_reqs,
        "memory_usage": _memory(facts),
        "disaggregation_mode": context.role.current or "null",
        **({"avg_spec_accept_length": client.load.accept_length} if drafted else {}),
    }


def _port(call: Call[None]) -> int:
    """Return the listening port; with port 0, the one that the system chose."""
    _, port = call.request.scope.get("server") or ("", None)
    return port if isinstance(port, int) else call.context.settings.server.port


def _loaded_values(facts: ServedModelInfo) -> dict[str, Any]:
    """Return values that were known only after loading the model."""
    names = {"deterministic": "deterministic", "runner": "effective_runner"}
    return {names[name]: value for name, value in facts.extra.items() if name in names}


def _memory(facts: ServedModelInfo) -> dict[str, float]:
    """Return GB of weights and KV memory, and the KV capacity in tokens."""
    gb = {name: float(facts.extra.get(f"{name}_bytes") or 0) / 1e9 for name in ("weight", "kv")}
    return {
        "weight": gb["weight"],
        "kvcache": gb["kv"],
        "token_capacity": facts.max_total_tokens,
    }


async def loads(call: Call[None]) -> Response:
    """Return the load of each scheduler at its last heartbeat, one entry per replica."""
    with call.context.accounts.timed_loads():
        return _loads(call)


def _loads(call: Call[None]) -> Response:
    query: LoadsQuery = call.query
    context, now = call.context, call.context.wall()
    clients = context.engine.router.clients
    rows = [
        {"timestamp": now, "dp_rank": client.replica, **_load(context, client)}
        for client in clients
        if query.dp_rank in (None, client.replica)
    ]
    if query.format == "prometheus":
        return Response(_as_metrics(rows), media_type="text/plain; version=0.0.4")
    wanted = {name.strip() for name in query.include.split(",")}
    for row in rows:
        client = clients[row["dp_rank"]]
        for section, (name, describe) in _SECTIONS.items():
            if wanted & {section, "all"} and (found := describe(context, client)) is not None:
                row[name] = found
    body = {
        "timestamp": now,
        "version": VERSION,
        "accelerator": str(context.engine.facts.extra.get("device", "cpu")),
        "num_accelerators": len(clients),
        "loads": rows,
    }
    return json_response(body)


def _memory_section(context: Context, client: SchedulerClient) -> dict[str, Any]:
    memory = _memory(client.facts or context.engine.facts)
    return {
        "weight_gb": memory["weight"],
        "kv_cache_gb": memory["kvcache"],
        "token_capacity": memory["token_capacity"],
    }


def _lora_section(context: Context, client: SchedulerClient) -> dict[str, Any] | None:
    load = client.load
    if not load.lora_slots_total:
        return None
    return {
        "slots_used": load.lora_slots_used,
        "slots_total": load.lora_slots_total,
        "utilization": load.lora_utilization,
    }


def _spec_section(context: Context, client: SchedulerClient) -> dict[str, Any]:
    return {"accept_length": client.load.accept_length, "accept_rate": client.load.accept_rate}


def _disagg_section(context: Context, client: SchedulerClient) -> dict[str, Any] | None:
    load = client.load.disagg
    if load is None:
        return None
    return {
        "mode": context.role.current or load.mode,
        "prefill_bootstrap_queue_reqs": load.prefill_bootstrap_queue_reqs,
        "prefill_inflight_queue_reqs": load.prefill_inflight_queue_reqs,
        "decode_prealloc_queue_reqs": load.decode_prealloc_queue_reqs,
        "decode_transfer_queue_reqs": load.decode_transfer_queue_reqs,
        "decode_retracted_queue_reqs": load.decode_retracted_queue_reqs,
        "kv_transfer_speed_gb_s": load.last_speed_gb_s,
        "kv_transfer_latency_ms": load.last_latency_ms,
    }


def _queues(context: Context, client: SchedulerClient) -> dict[str, Any]:
    """Return the number of waiting requests by reason; paused ones have run before."""
    load = client.load
    return {
        "waiting": load.num_waiting_reqs,
        "grammar": load.num_grammar_reqs,
        "paused": load.num_running_reqs if load.paused else 0,
    }


_SECTIONS: Mapping[str, tuple[str, Callable[[Context, SchedulerClient], dict[str, Any] | None]]] = {
    "queues": ("queues", _queues),
    "memory": ("memory", _memory_section),
    "lora": ("lora", _lora_section),
    "spec": ("speculative", _spec_section),
    "disagg": ("disaggregation", _disagg_section),
}
"""Sections of `include`, with their names and contents."""


async def requests(call: Call[None]) -> Response:
    """List the newest requests: counts, finish reasons, and timings; no texts.

    A tenant sees only its own.
    """
    query: RecentQuery = call.query
    tenant = None if call.tenant.admin or not call.tenant.name else call.tenant.name
    return json_response(call.context.recent.view(tenant, query.limit))


async def metrics(call: Call[None]) -> Response:
    """Return Prometheus metrics."""
    return Response(call.context.accounts.exposition(), media_type="text/plain; version=0.0.4")


def public(value: Any) -> Any:
    """Return a copy of `value` without secrets."""
    if isinstance(value, Secret):
        return None
    if isinstance(value, dict):
        return {
            name: None if any(part in str(name) for part in _HIDDEN) else public(item)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [public(item) for item in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def _load(context: Context, client: SchedulerClient) -> dict[str, Any]:
    load, facts = client.load, client.facts or context.engine.facts
    capacity = load.max_total_num_tokens or facts.max_total_tokens
    seen = load.cached_prompt_tokens + load.computed_tokens
    return {
        "num_running_reqs": load.num_running_reqs,
        "num_waiting_reqs": load.num_waiting_reqs,
        "num_used_tokens": load.num_used_tokens,
        "num_cached_tokens": load.num_cached_tokens,
        "num_total_tokens": load.num_used_tokens,
        "num_active_tokens": load.decode_sum_seq_lens,
        "total_prefill_uncached_tokens": load.prefill_tokens,
        "max_total_num_tokens": capacity,
        "max_running_requests": facts.max_running_reqs,
        "token_usage": load.num_used_tokens / capacity if capacity else 0.0,
        "cache_hit_rate": load.cached_prompt_tokens / seen if seen else 0.0,
        "utilization": (
            load.num_running_reqs / facts.max_running_reqs if facts.max_running_reqs else 0.0
        ),
        "gen_throughput": load.gen_throughput,
        "last_gen_throughput": load.last_gen_throughput,
        "steps": load.steps,
        "computed_tokens": load.computed_tokens,
        "cached_prompt_tokens": load.cached_prompt_tokens,
        "generated_tokens": load.generated_tokens,
        "num_retractions": load.retractions,
        "verified_drafts": load.verified_drafts,
        "proposed_draft_tokens": load.proposed_draft_tokens,
        "accepted_draft_tokens": load.accepted_draft_tokens,
        "draft_seconds_saved": load.draft_seconds_saved,
        "targets_set": load.targets_set,
        "targets_met": load.targets_met,
        "repaired_pages": load.repaired_pages,
        "repaired_locks": load.repaired_locks,
        "repaired_states": load.repaired_states,
    }


def _as_metrics(rows: Sequence[Mapping[str, Any]]) -> bytes:
    registry = CollectorRegistry()
    names = [name for row in rows[:1] for name in row if name != "dp_rank"]
    for name in names:
        about = f"{name} at the last heartbeat"
        gauge = Gauge(f"sylvan_load_{name}", about, ["dp_rank"], registry=registry)
        for row in rows:
            gauge.labels(str(row["dp_rank"])).set(row[name])
    return prometheus_client.generate_latest(registry)
