"""Informational gRPC methods."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp

from sylvan.api.version import VERSION
from sylvan.protocol.errors import RequestError
from sylvan.rpc import common_pb2 as common
from sylvan.rpc import scheduler_pb2 as pb
from sylvan.runtime.server.context import Context
from sylvan.runtime.server.native.info import public
from sylvan.runtime.tokenizer.scheduler_client import SchedulerClient

CHUNK_BYTES = 1 << 20
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json", "config.json"),
    *("tokenizer.model", "vocab.json", "merges.txt"),
)


def model_info(context: Context) -> pb.GetModelInfoResponse:
    """Describe the model."""
    settings, facts, tokenizer = context.settings, context.engine.facts, context.engine.tokenizer
    preferred = dict(settings.text.preferred_sampling_params)
    return pb.GetModelInfoResponse(
        model_path=facts.model_path,
        tokenizer_path=facts.model_path,
        is_generation=facts.is_generation,
        preferred_sampling_params=json.dumps(preferred) if preferred else "",
        weight_version="default",
        served_model_name=settings.served_model_name,
        max_context_length=facts.context_len,
        vocab_size=facts.vocab_size,
        model_type=facts.model_type,
        eos_token_ids=facts.eos_ids,
        bos_token_id=-1 if tokenizer.bos_id is None else tokenizer.bos_id,
        pad_token_id=-1,
        max_req_input_len=facts.max_request_tokens - 1,
        architectures=[facts.architecture] if facts.architecture else [],
        num_labels=facts.vector_size if facts.task == "classify" else 0,
    )


def server_info(context: Context) -> pb.GetServerInfoResponse:
    """Return settings and state, without secrets."""
    facts, load = context.engine.facts, context.engine.load()
    now = context.wall()
    started = Timestamp()
    started.FromDatetime(datetime.fromtimestamp(context.started, UTC))
    return pb.GetServerInfoResponse(
        server_args=_struct(public(dict(context.settings.shown))),
        scheduler_info=_struct(
            {
                "max_total_num_tokens": facts.max_total_tokens,
                "max_req_input_len": facts.max_request_tokens - 1,
                "max_running_requests": facts.max_running_reqs,
                "page_size": facts.page_size,
                "state": context.engine.state,
            }
        ),
        active_requests=context.engine.num_live,
        is_paused=load.paused,
        last_receive_timestamp=now - context.engine.heartbeat_age_s(),
        uptime_seconds=now - context.started,
        sglang_version=VERSION,
        server_type="sylvan",
        start_time=started,
        max_total_num_tokens=facts.max_total_tokens,
    )


def loads(context: Context, request: pb.GetLoadsRequest) -> pb.GetLoadsResponse:
    """Return the load of each scheduler at its last heartbeat.

    Raises:
        RequestError: There is no such rank.
    """
    clients = context.engine.router.clients
    rank = request.dp_rank if request.HasField("dp_rank") else None
    if rank is not None and rank not in range(len(clients)):
        message = f"dp_rank: there is no rank {rank}; ranks are 0 to {len(clients) - 1}"
        raise RequestError(message, param="dp_rank")
    rows = [_load(context, client) for client in clients if rank in (None, client.replica)]
    count = len(rows)
    return pb.GetLoadsResponse(
        timestamp=datetime.fromtimestamp(context.wall(), UTC).isoformat(),
        version=VERSION,
        dp_rank_count=len(clients),
        loads=rows,
        aggregate=pb.AggregateMetrics(
            total_running_reqs=sum(row.num_running_reqs for row in rows),
            total_waiting_reqs=sum(row.num_waiting_reqs for row in rows),
            total_reqs=sum(row.num_total_reqs for row in rows),
            avg_token_usage=sum(row.token_usage for row in rows) / count,
            avg_throughput=sum(row.gen_throughput for row in rows) / count,
            avg_utilization=sum(row.utilization for row in rows) / count,
        ),
    )


def _load(context: Context, client: SchedulerClient) -> pb.SchedulerLoad:
    load, facts = client.load, client.facts or context.engine.facts
    capacity = load.max_total_num_tokens or facts.max_total_tokens
    seen = load.cached_prompt_tokens + load.computed_tokens
    limit = facts.max_running_reqs
    extra = facts.extra
    return pb.SchedulerLoad(
        dp_rank=client.replica,
        num_running_reqs=load.num_running_reqs,
        num_waiting_reqs=load.num_waiting_reqs,
        num_total_reqs=load.num_running_reqs + load.num_waiting_reqs,
        num_used_tokens=load.num_used_tokens,
        max_total_num_tokens=capacity,
        token_usage=load.num_used_tokens / capacity if capacity else 0.0,
        gen_throughput=load.gen_throughput,
        cache_hit_rate=load.cached_prompt_tokens / seen if seen else 0.0,
        utilization=load.num_running_reqs / limit if limit else 0.0,
        max_running_requests=limit,
        memory=pb.MemoryMetrics(
            weight_gb=float(extra.get("weight_bytes") or 0) / 1e9,
            kv_cache_gb=float(extra.get("kv_bytes") or 0) / 1e9,
            token_capacity=capacity,
        ),
        queues=pb.QueueMetrics(
            waiting=load.num_waiting_reqs,
            grammar=load.num_grammar_reqs,
            paused=load.num_running_reqs if load.paused else 0,
            retracted=load.retractions,
        ),
        lora=pb.LoRAMetrics(
            slots_used=load.lora_slots_used,
            slots_total=load.lora_slots_total,
            utilization=load.lora_utilization,
        )
        if load.lora_slots_total
        else None,
    )


def tokenizer_chunks(folder: str) -> Iterator[common.GetTokenizerChunk]:
    """Yield a tokenizer's files as a ZIP archive, with identical bytes for identical files.

    Raises:
        RequestError: There are none (501): the tokenizer is part of another file.
    """
    found = [path for name in _TOKENIZER_FILES if (path := Path(folder) / name).is_file()]
    if not any(path.name.startswith(("tokenizer.", "vocab")) for path in found):
        raise RequestError("The tokenizer of this model has no files of its own.", status=501)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in found:
            archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes())
    data = buffer.getvalue()
    digest = hashlib.sha256(data).hexdigest()
    for start in range(0, len(data), CHUNK_BYTES):
        part = data[start : start + CHUNK_BYTES]
        last = start + CHUNK_BYTES >= len(data)
        yield common.GetTokenizerChunk(data=part, sha256=digest if last else "")


def _struct(value: dict[str, Any]) -> Struct:
    made = Struct()
    made.update(value)
    return made
