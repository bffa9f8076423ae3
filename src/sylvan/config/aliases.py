"""Other names for our fields: a few short ones, and the flags of SGLang.

An alias is a top-level name in flags, files and keywords; it maps to a path of the tree, converts
the value, or rejects it with a reason. Nothing is silently ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sylvan.config.hicache import extra_settings, storage_of
from sylvan.config.parse import SWITCH_WORDS
from sylvan.config.sglang_flags import NO_EFFECT, REFUSED

Pairs = Iterable[tuple[str, object]]


@dataclass(frozen=True, slots=True)
class Alias:
    """An alternative name for a field.

    Attributes:
        target: Path that it sets; "" if it sets none.
        convert: Maps the given value to (path, value) pairs; raises ValueError to reject it.
        is_switch: Whether it may be used without a value.
        takes_many: Whether it takes all words up to the next flag on the command line.
        repeats: Whether it may be repeated; its words accumulate.
        note: Shown to the user if the alias has no effect.
        lacks: The missing feature that it asks for; neutral values are accepted.
    """

    target: str
    convert: Callable[[object], Pairs]
    is_switch: bool = False
    takes_many: bool = False
    repeats: bool = False
    note: str = ""
    lacks: str = ""


def aliases() -> Mapping[str, Alias]:
    """All aliases by Python name: `mem_fraction_static`."""
    return _ALL


def own_names() -> frozenset[str]:
    """Aliases that SGLang does not have."""
    return frozenset({"kv_memory", "overlap", "policy", "record"})


def _renamed(target: str) -> Alias:
    return Alias(target, lambda value: ((target, value),))


def _words(target: str) -> Alias:
    """A list whose items are words of the command line."""

    def convert(value: object) -> Pairs:
        yield target, [str(item) for item in _listed(value)]

    return Alias(target, convert, takes_many=True)


def _switch(target: str, value: object) -> Alias:
    """A switch that sets `value`; if given as false, the default stays."""
    return Alias(target, lambda on: ((target, value),) if is_on(on) else (), is_switch=True)


def _refused(feature: str, *neutral: object, takes_many: bool = False) -> Alias:
    """A feature that does not exist; values that do not request it are accepted."""

    def convert(value: object) -> Pairs:
        found = " ".join(map(str, _listed(value))) if takes_many else plain_text(value)
        if found not in {plain_text(item) for item in (*neutral, None)}:
            raise ValueError(f"not supported yet: {feature}")
        return ()

    return Alias("", convert, takes_many=takes_many, lacks=feature)


def _refused_switch(feature: str) -> Alias:
    def convert(value: object) -> Pairs:
        if is_on(value):
            raise ValueError(f"not supported yet: {feature}")
        return ()

    return Alias("", convert, is_switch=True, lacks=feature)


def _needless(reason: str, *, is_switch: bool = True, takes_many: bool = False) -> Alias:
    return Alias("", lambda _: (), is_switch=is_switch, takes_many=takes_many, note=reason)


def _without_target(table: Mapping[str, str], *, refuse: bool) -> Iterator[tuple[str, Alias]]:
    """Aliases without a target, from a table of `sglang_flags`."""
    for reason, words in table.items():
        for word in words.split():
            name, is_value, default = word.partition("=")
            many, name = name.endswith("*"), name.removesuffix("*")
            if not refuse:
                yield name, _needless(reason, is_switch=not is_value, takes_many=many)
            elif is_value:
                yield name, _refused(reason, default, "[]", takes_many=many)
            else:
                yield name, _refused_switch(reason)


def is_on(value: object) -> bool:
    """Whether the word after a switch means yes.

    Raises:
        ValueError: it means neither yes nor no.
    """
    if isinstance(value, bool):
        return value
    if value is None:
        return False
    if isinstance(value, str) and value.lower() in SWITCH_WORDS:
        return value.lower() in ("true", "on", "yes", "1")
    raise ValueError(f"expected true | false, got {value!r}")


def plain_text(value: object) -> str:
    """A value in lower case."""
    return str(value).lower()


def _chunk(value: object) -> Pairs:
    """SGLang disables chunking with -1, we with 0."""
    yield "scheduler.chunk_tokens", 0 if plain_text(value) == "-1" else value


def _fraction(value: object) -> Pairs:
    """A value under this name is always a share, so 1 is out of range rather than one byte."""
    try:
        share = float(str(value))
    except ValueError:
        share = 0.0
    if not 0.0 < share < 1.0:
        raise ValueError(f"expected a share of memory between 0 and 1, got {value!r}")
    yield "cache.memory", share


def _kv_dtype(value: object) -> Pairs:
    text = plain_text(value)
    yield "cache.dtype", "model" if text == "auto" else {"fp8": "fp8_e4m3"}.get(text, value)


def _adapters(value: object) -> Pairs:
    """`name=DIR`, `DIR`, or {"lora_name": ..., "lora_path": ..., "pinned": ...}; one or many."""
    found = [_adapter(item) for item in _listed(value)]
    yield "lora.adapters", {name: path for name, path, _ in found}
    if pinned := tuple(name for name, _, pinned in found if pinned):
        yield "lora.pinned", pinned


def _listed(value: object) -> Sequence[object]:
    if isinstance(value, Mapping):
        table = cast("Mapping[str, str]", value)
        if "lora_path" in table:
            return [table]
        return [f"{name}={path}" for name, path in table.items()]
    if isinstance(value, (list, tuple)):
        return cast("Sequence[object]", value)
    return str(value).split()


def _adapter(item: object) -> tuple[str, str, bool]:
    if isinstance(item, str) and item.lstrip().startswith("{"):
        item = json.loads(item)
    if isinstance(item, Mapping):
        record = cast("Mapping[str, Any]", item)
        return record["lora_name"], record["lora_path"], bool(record.get("pinned"))
    name, sign, path = str(item).partition("=")
    return (name, path, False) if sign else (name.rstrip("/").rpartition("/")[2], name, False)


def _collector(value: object) -> Pairs:
    """SGLang's endpoint has no scheme."""
    text = str(value)
    yield "observe.trace_endpoint", text if "://" in text else f"http://{text}"


def _role(value: object) -> Pairs:
    if plain_text(value) not in ("null", "none"):
        yield "disagg.role", value


def _algorithm(value: object) -> Pairs:
    """Accept algorithm names in capitals."""
    name = plain_text(value).replace("_", "-")
    yield "speculative.algorithm", "nextn" if name == "mtp" else name


def _storage(value: object) -> Pairs:
    if plain_text(value) not in ("", "null", "none"):
        yield "tiers.storage", storage_of(value)


def _placement(value: object) -> Pairs:
    """A file; SGLang also accepts inline JSON."""
    if plain_text(value) in ("trivial", ""):
        return
    if str(value).lstrip().startswith("{"):
        raise ValueError("put the JSON into a file")
    yield "parallel.expert_placement", value


def _exchange(value: object) -> Pairs:
    """A library that exchanges rows of experts; SGLang's `none` is the default."""
    if plain_text(value) not in ("none", "null"):
        yield "parallel.expert_exchange", value


def _gigabytes(value: object) -> Pairs:
    """10^9 bytes; 0 leaves the size to a ratio."""
    try:
        number = float(plain_text(value))
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e9:
        raise ValueError(f"expected a number of gigabytes, got {value!r}")
    if number:
        yield "tiers.host_bytes", round(number * 1e9)


def _megabytes(value: object) -> Pairs:
    """2^20 bytes; SGLang's 0 is no limit, and there is always one here."""
    text = plain_text(value)
    if not text.isdecimal() or not 0 < int(text) < 1 << 20:
        raise ValueError(f"expected megabytes above 0, got {value!r}")
    yield "media.item_bytes", int(text) << 20


def _workers(value: object) -> Pairs:
    """0 leaves the number to the default."""
    if plain_text(value) != "0":
        yield "media.workers", value


def _storage_settings(value: object) -> Pairs:
    """SGLang's table of store settings; a nested section turns tiers on."""
    if value not in (None, "", "null"):
        yield from ((f"tiers.{name}", item) for name, item in extra_settings(value).items())


def _kv_events(value: object) -> Pairs:
    """SGLang's JSON table; publisher `null` means none."""
    table = json.loads(value) if isinstance(value, str) else value
    match table:
        case Mapping():
            settings = dict(cast("Mapping[str, object]", table))
        case _:
            raise ValueError(f"expected a JSON object, got {value!r}")
    publisher, form = settings.pop("publisher", "null"), settings.pop("format", "default")
    if publisher not in ("null", "zmq", None):
        raise ValueError(f"publisher: expected null | zmq, got {publisher!r}")
    if form != "default":
        raise ValueError(f"format: only default is supported, got {form!r}")
    if publisher == "zmq":
        yield "kv_events", {}
        yield from ((f"kv_events.{name}", value) for name, value in settings.items())


_SHORT = {
    "host": "server.host",
    "port": "server.port",
    "record": "observe.record",
    "uds": "server.uds",
    "register": "server.register",
    "grpc_port": "server.grpc_port",
    "register_key": "server.register_key",
    "api_key": "server.api_key",
    "page_size": "cache.page_size",
    "kv_memory": "cache.memory",
    "policy": "scheduler.policy",
    "overlap": "scheduler.overlap",
    "log_level": "observe.log_level",
    "chat_template": "text.chat_template",
}

_RENAMED = {
    "model_path": "model",
    "tokenizer_path": "tokenizer",
    "context_length": "context_len",
    "random_seed": "seed",
    "max_total_tokens": "cache.max_tokens",
    "radix_eviction_policy": "cache.eviction",
    "schedule_policy": "scheduler.policy",
    "schedule_conservativeness": "scheduler.conservativeness",
    "max_running_requests": "scheduler.max_running_reqs",
    "max_queued_requests": "scheduler.max_waiting_reqs",
    "max_prefill_tokens": "scheduler.max_batch_tokens",
    "priority_scheduling_preemption_threshold": "scheduler.preempt_threshold",
    "watchdog_timeout": "scheduler.hang_timeout_s",
    "max_mamba_cache_size": "cache.max_states",
    "log_requests_level": "observe.log_requests_level",
    "log_requests_format": "observe.log_requests_format",
    "otlp_service_name": "observe.trace_service",
    "extra_metric_labels": "observe.metric_labels",
    "file_storage_path": "server.data_dir",
    "admin_api_key": "server.admin_api_key",
    "dp_size": "server.replicas",
    "data_parallel_size": "server.replicas",
    "dp": "server.replicas",
    "fastapi_root_path": "server.root_path",
    "ssl_certfile": "server.ssl_certfile",
    "ssl_keyfile": "server.ssl_keyfile",
    "ssl_keyfile_password": "server.ssl_keyfile_password",
    "ssl_ca_certs": "server.ssl_ca_certs",
    "tool_call_parser": "text.tool_parser",
    "reasoning_parser": "text.reasoning_parser",
    "sampling_defaults": "text.sampling_defaults",
    "stream_interval": "text.stream_interval",
    "preferred_sampling_params": "text.preferred_sampling_params",
    "default_chat_template_kwargs": "text.default_chat_template_kwargs",
    "attention_backend": "attention",
    "grammar_backend": "grammar.backend",
    "max_loras_per_batch": "lora.max_per_batch",
    "max_lora_rank": "lora.max_rank",
    "max_loaded_loras": "lora.max_loaded",
    "lora_eviction_policy": "lora.eviction",
    "speculative_draft_model_path": "speculative.draft_model",
    "speculative_draft_model": "speculative.draft_model",
    "pp_size": "parallel.pp",
    "pipeline_parallel_size": "parallel.pp",
    "pp": "parallel.pp",
    "pp_max_micro_batch_size": "parallel.pp_batch",
    "pp_async_batch_depth": "parallel.pp_ahead",
    "tp_size": "parallel.tp",
    "tensor_parallel_size": "parallel.tp",
    "tp": "parallel.tp",
    "dist_timeout": "parallel.join_timeout_s",
    "attn_dp_size": "parallel.attention_dp",
    "ep_size": "parallel.ep",
    "expert_parallel_size": "parallel.ep",
    "ep": "parallel.ep",
    "moe_dense_tp_size": "parallel.moe_dense_tp",
    "ep_num_redundant_experts": "parallel.redundant_experts",
    "placement": "parallel.placement",
    "eplb_rebalance_num_iterations": "parallel.rebalance_steps",
    "nnodes": "parallel.nodes",
    "node_rank": "parallel.node_rank",
    "dist_init_addr": "parallel.address",
    "nccl_init_addr": "parallel.address",
    "speculative_num_steps": "speculative.num_steps",
    "speculative_eagle_topk": "speculative.topk",
    "speculative_num_draft_tokens": "speculative.num_draft_tokens",
    "speculative_ngram_max_trie_depth": "speculative.max_match",
    "speculative_ngram_external_corpus_path": "speculative.corpus",
    "speculative_ngram_external_corpus_max_tokens": "speculative.corpus_tokens",
    "disaggregation_transfer_backend": "disagg.transfer",
    "disaggregation_bootstrap_port": "disagg.bootstrap_port",
    "hicache_ratio": "tiers.host_ratio",
    "hicache_write_policy": "tiers.write_policy",
    "hicache_storage_prefetch_policy": "tiers.prefetch",
}

_LISTS = {
    "log_requests_target": "observe.log_requests_target",
    "tokenizer_metrics_allowed_custom_labels": "observe.custom_labels",
    "bucket_time_to_first_token": "observe.ttft_buckets",
    "bucket_inter_token_latency": "observe.token_buckets",
    "bucket_e2e_request_latency": "observe.e2e_buckets",
    "prompt_tokens_buckets": "observe.prompt_token_buckets",
    "generation_tokens_buckets": "observe.output_token_buckets",
    "uvicorn_access_log_exclude_prefixes": "observe.access_log_exclude",
    "encoder_urls": "media.encoder_urls",
    "allowed_media_domains": "media.allowed_hosts",
}

_SWITCHES: Mapping[str, tuple[str, object]] = {
    "is_embedding": ("task", "vectors"),
    "encoder_only": ("media.encoder_only", True),
    "language_only": ("media.encoder_backend", "none"),
    "language_model_only": ("media.encoder_backend", "none"),
    "disable_radix_cache": ("cache.prefix", "none"),
    "disable_overlap_schedule": ("scheduler.overlap", "off"),
    "disable_custom_all_reduce": ("parallel.backend", "nccl"),
    "disable_cuda_graph": ("runner", "eager"),
    "disable_priority_preemption": ("scheduler.preempt_threshold", None),
    "log_requests": ("observe.log_requests", True),
    "enable_trace": ("observe.trace", True),
    "speculative_adaptive": ("speculative.adaptive", True),
    "enable_deterministic_inference": ("deterministic", True),
    "incremental_streaming_output": ("text.incremental_stream", True),
    "enable_cache_report": ("text.cache_report", True),
    "stream_response_default_include_usage": ("text.stream_include_usage", True),
    "enable_lora": ("lora", {}),
    "enable_hierarchical_cache": ("tiers", {}),
    "enable_hicache": ("tiers", {}),
    "enable_pdmux": ("pdmux", {}),
    "enable_dp_attention": ("parallel.attention_dp", "auto"),
    "use_ray": ("parallel.placement", "ray"),
    "enable_eplb": ("parallel.rebalance", True),
    "enable_pd_role_switch": ("disagg.switchable", True),
}

_REFUSED: Mapping[str, tuple[object, ...]] = {
    "base_gpu_id": ("choosing a GPU by number (set CUDA_VISIBLE_DEVICES)", 0),
    "cpu_offload_gb": ("weights in host memory", 0),
    "tokenizer_mode": ("slow tokenizers", "auto"),
    "tokenizer_worker_num": ("several tokenizer processes", 1),
    "detokenizer_worker_num": ("several detokenizer processes", 1),
    "revision": ("downloads of models", "main"),
    "download_dir": ("downloads of models",),
    "model_impl": ("choosing the model's implementation", "auto", "sglang"),
    "json_model_override_args": ("changes to the model's config.json", "{}", {}),
    "num_continuous_decode_steps": ("several decode steps in one", 1),
    "sampling_backend": ("choosing the sampler (each device has one)", "pytorch", "auto"),
}

_REFUSED_SWITCHES = {
    "skip_tokenizer_init": "serving without a tokenizer",
    "enable_torch_compile": "torch.compile",
    "enable_custom_logit_processor": "custom logit processors",
    "enable_return_hidden_states": "returning hidden states",
    "allow_auto_truncate": "truncating prompts that are too long",
    "grpc_mode": "gRPC instead of HTTP (--grpc-port serves both)",
}

_NEEDLESS = {
    "enable_multimodal": "models that take images, videos or sounds are always served with them",
    "enable_mixed_chunk": "batches always mix prompts and generation",
    "sleep_on_idle": "an idle server always sleeps",
    "disable_cuda_graph_padding": "there is no such padding",
    "enable_p2p_check": "there is nothing to check",
    "skip_server_warmup": "the server is ready without a warm-up",
    "enable_priority_scheduling": "request priorities are always used",
    "enable_metrics": "/metrics is always served",
    "enable_memory_saver": "memory can always be released",
    "disaggregation_decode_enable_radix_cache": "a cached prefix is never transferred again",
    "disaggregation_enable_kv_checksum": "transferred pages always have checksums",
    "enable_response_store": "responses are stored unless server.response_store_size is 0",
}

_NEEDLESS_VALUES = {
    "cuda_graph_max_bs": "graphs are captured up to the largest batch",
    "decode_log_interval": "steps are counted in metrics, not logged",
    "hicache_io_backend": "each device has a single way to copy pages",
    "hicache_mem_layout": "a page in a store has one layout",
    "hicache_storage_prefetch_retry_poll_interval": "failed prefetches are not retried",
    "hicache_storage_prefetch_retry_max_attempts": "failed prefetches are not retried",
}

_ALL: Mapping[str, Alias] = {
    **dict(_without_target(NO_EFFECT, refuse=False)),
    **dict(_without_target(REFUSED, refuse=True)),
    **{name: _renamed(path) for name, path in (_SHORT | _RENAMED).items()},
    **{name: _words(path) for name, path in _LISTS.items()},
    "otlp_traces_endpoint": Alias("observe.trace_endpoint", _collector),
    **{name: _switch(*args) for name, args in _SWITCHES.items()},
    **{name: _refused(str(args[0]), *args[1:]) for name, args in _REFUSED.items()},
    **{name: _refused_switch(feature) for name, feature in _REFUSED_SWITCHES.items()},
    **{name: _needless(reason) for name, reason in _NEEDLESS.items()},
    **{name: _needless(reason, is_switch=False) for name, reason in _NEEDLESS_VALUES.items()},
    "chunked_prefill_size": Alias("scheduler.chunk_tokens", _chunk),
    "init_expert_location": Alias("parallel.expert_placement", _placement),
    "moe_a2a_backend": Alias("parallel.expert_exchange", _exchange),
    "deepep_mode": _refused(
        "the kernels of DeepEP for few rows (the normal ones serve prompts and decoding)",
        *("auto", "normal"),
    ),
    "mem_fraction_static": Alias("cache.memory", _fraction),
    "kv_cache_dtype": Alias("cache.dtype", _kv_dtype),
    "lora_paths": Alias("lora.adapters", _adapters, takes_many=True),
    "disaggregation_mode": Alias("disagg.role", _role),
    "kv_events_config": Alias("kv_events", _kv_events),
    "speculative_algorithm": Alias("speculative.algorithm", _algorithm),
    "hicache_size": Alias("tiers.host_bytes", _gigabytes),
    "media_url_max_file_size_mb": Alias("media.item_bytes", _megabytes),
    "mm_processor_worker_num": Alias("media.workers", _workers),
    "hicache_storage_backend": Alias("tiers.storage", _storage),
    "hicache_storage_backend_extra_config": Alias("tiers", _storage_settings),
}
