"""Metrics of schedulers, from their last heartbeats, and constants of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from sylvan.protocol.messages import SchedulerLoad
from sylvan.runtime.tokenizer.manager import TokenizerManager
from sylvan.runtime.tokenizer.scheduler_client import SchedulerClient
from sylvan.runtime.tokenizer.types import ServedModelInfo

Value = Callable[[SchedulerLoad, ServedModelInfo], float]

RANK_LABELS = {"tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
"""A scheduler is identified by its first rank."""


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _capacity(load: SchedulerLoad, facts: ServedModelInfo) -> int:
    return load.max_total_num_tokens or facts.max_total_tokens


def _usage(load: SchedulerLoad, facts: ServedModelInfo) -> float:
    return _share(load.num_used_tokens, _capacity(load, facts))


def _used_tokens(load: SchedulerLoad) -> int:
    """Return the tokens of KV memory used by requests or the prefix cache."""
    return load.num_used_tokens + load.num_cached_tokens


_GAUGES: Mapping[str, tuple[str, Value]] = {
    "num_running_reqs": ("Running requests", lambda n, _: n.num_running_reqs),
    "num_queue_reqs": ("Waiting requests", lambda n, _: n.num_waiting_reqs),
    "num_grammar_queue_reqs": (
        "Requests waiting for their grammar to be compiled",
        lambda n, _: n.num_grammar_reqs,
    ),
    "num_paused_reqs": (
        "Requests paused until /continue_generation",
        lambda n, _: n.num_running_reqs if n.paused else 0,
    ),
    "num_used_tokens": ("Tokens of KV that requests hold", lambda n, _: n.num_used_tokens),
    "kv_used_tokens": ("Tokens of KV that requests hold", lambda n, _: n.num_used_tokens),
    "kv_evictable_tokens": (
        "Tokens of KV that the prefix cache holds and no request uses",
        lambda n, _: n.num_cached_tokens,
    ),
    "kv_available_tokens": (
        "Free tokens of KV memory",
        lambda n, f: max(0, _capacity(n, f) - _used_tokens(n)),
    ),
    "max_total_num_tokens": ("Tokens that the KV memory can hold", _capacity),
    "token_usage": ("Share of the KV memory that requests hold", _usage),
    "full_token_usage": (
        "Share of the KV memory of full-attention layers that requests hold",
        _usage,
    ),
    "swa_token_usage": (
        "Share of the KV memory of sliding-window layers in use",
        lambda n, _: _share(n.swa_used_tokens, n.swa_total_tokens),
    ),
    "mamba_usage": (
        "Share of the slots of recurrent state in use",
        lambda n, _: _share(n.mamba_used_states, n.mamba_total_states),
    ),
    "decode_sum_seq_lens": (
        "Tokens, prompts included, of all running requests",
        lambda n, _: n.decode_sum_seq_lens,
    ),
    "cache_hit_rate": (
        "Share of prompt tokens that came from the cache, since the start",
        lambda n, _: _share(n.cached_prompt_tokens, n.cached_prompt_tokens + n.computed_tokens),
    ),
    "gen_throughput": ("Tokens generated per second", lambda n, _: n.gen_throughput),
    "utilization": (
        "Running requests, as a share of the most that may run",
        lambda n, f: _share(n.num_running_reqs, f.max_running_reqs),
    ),
    "new_token_ratio": (
        "Share of its limit that a request is expected to generate",
        lambda n, _: n.new_token_ratio,
    ),
    "context_len": (
        "Largest number of tokens of a prompt and its output",
        lambda _, f: f.context_len,
    ),
    "page_size": ("Tokens per page of KV", lambda _, f: f.page_size),
    "num_pages": ("Pages of KV memory", lambda n, f: _capacity(n, f) // max(1, f.page_size)),
    "weight_memory_usage_gb": ("GB of weights", lambda _, f: _gb(f, "weight_bytes")),
    "kv_cache_memory_usage_gb": ("GB of KV memory", lambda _, f: _gb(f, "kv_bytes")),
    "is_cuda_graph": (
        "1 if steps run as captured graphs",
        lambda _, f: float(f.extra.get("runner") == "graph"),
    ),
    "num_retracted_reqs": (
        "Requests retracted because KV memory ran out",
        lambda n, _: n.retractions,
    ),
    "generated_tokens": ("Tokens generated", lambda n, _: n.generated_tokens),
    "spec_accept_length": (
        "Mean tokens per request and verifying step",
        lambda n, _: n.accept_length,
    ),
    "spec_accept_rate": ("Share of draft tokens that were accepted", lambda n, _: n.accept_rate),
    "spec_verified_drafts": ("Drafts verified", lambda n, _: n.verified_drafts),
    "spec_proposed_tokens": ("Draft tokens verified", lambda n, _: n.proposed_draft_tokens),
    "spec_accepted_tokens": ("Draft tokens accepted", lambda n, _: n.accepted_draft_tokens),
    "spec_seconds_saved": (
        "Estimated seconds saved by drafts; below 0: they cost more than they saved",
        lambda n, _: n.draft_seconds_saved,
    ),
    "lora_pool_slots_used": (
        "Slots on the device that hold a LoRA adapter",
        lambda n, _: n.lora_slots_used,
    ),
    "lora_pool_slots_total": (
        "Slots for LoRA adapters on the device",
        lambda n, _: n.lora_slots_total,
    ),
    "lora_pool_utilization": (
        "Share of the device's LoRA slots that hold an adapter",
        lambda n, _: n.lora_utilization,
    ),
    "lora_adapters": ("LoRA adapters that requests may name", lambda n, _: n.lora_adapters),
    "lora_host_copies": ("LoRA adapters in host memory", lambda n, _: n.lora_copies),
    "encoder_cache_entries": (
        "Encoded images, videos and sounds in the cache",
        lambda n, _: n.encoder_entries,
    ),
    "encoder_cache_size_mb": (
        "MB of vectors in the cache of encoded images, videos and sounds",
        lambda n, _: n.encoder_bytes / 1e6,
    ),
    "encoder_vector_bytes": (
        "Bytes of vectors in the cache of encoded images, videos and sounds",
        lambda n, _: n.encoder_bytes,
    ),
    "grammar_tries": (
        "Rollbacks of outputs that violated their schema",
        lambda n, _: n.grammar_tries,
    ),
    "grammar_taken_back_tokens": (
        "Tokens rolled back because outputs violated their schema",
        lambda n, _: n.grammar_taken_back,
    ),
    "targets_set": ("Requests with a latency target", lambda n, _: n.targets_set),
    "targets_met": ("Requests that met their latency target", lambda n, _: n.targets_met),
    "repaired_pages": ("Leaked pages of KV that were freed", lambda n, _: n.repaired_pages),
    "repaired_locks": (
        "Wrong locks of prefix-tree nodes that were repaired",
        lambda n, _: n.repaired_locks,
    ),
    "repaired_states": (
        "Leaked slots of recurrent state that were freed",
        lambda n, _: n.repaired_states,
    ),
}

_POOLS: Mapping[str, tuple[str, Value]] = {
    "swa_used_tokens": (
        "Tokens of KV of sliding-window layers in use",
        lambda n, _: n.swa_used_tokens,
    ),
    "swa_available_tokens": (
        "Free tokens of the KV memory of sliding-window layers",
        lambda n, _: n.swa_total_tokens - n.swa_used_tokens,
    ),
    "max_total_num_tokens_swa": (
        "Tokens that the KV memory of sliding-window layers can hold",
        lambda n, _: n.swa_total_tokens,
    ),
    "mamba_used_tokens": ("Slots of recurrent state in use", lambda n, _: n.mamba_used_states),
    "mamba_available_tokens": (
        "Free slots of recurrent state",
        lambda n, _: n.mamba_total_states - n.mamba_used_states,
    ),
}
"""Metrics of memory that few models have; omitted for other models."""

_BUCKETS: Mapping[str, tuple[str, Value]] = {
    "bucket_waste": (
        "Share of the computed rows that were padding, since the start",
        lambda n, _: n.bucket_waste,
    ),
    "recompilations": (
        "Functions compiled while serving; should stay 0",
        lambda n, _: n.recompilations,
    ),
}
"""Metrics of devices whose steps are padded to compiled functions; omitted for others."""

_COUNTERS: Mapping[str, tuple[str, Value]] = {
    "num_retracted_requests": (
        "Requests retracted because KV memory ran out",
        lambda n, _: n.retractions,
    ),
    "num_retracted_input_tokens": (
        "Prompt tokens of retracted requests",
        lambda n, _: n.retracted_input_tokens,
    ),
    "num_retracted_output_tokens": (
        "Output tokens of retracted requests",
        lambda n, _: n.retracted_output_tokens,
    ),
    "evicted_tokens": ("Tokens evicted from the prefix cache", lambda n, _: n.evicted_tokens),
    "num_grammar": ("Grammars that requests named", lambda n, _: n.grammars),
    "num_grammar_cache_hit": (
        "Grammars that were compiled already",
        lambda n, _: n.grammar_cache_hits,
    ),
    "num_grammar_aborted": ("Grammars that were refused", lambda n, _: n.grammars_refused),
    "num_grammar_timeout": (
        "Grammars that took too long to compile",
        lambda n, _: n.grammar_timeouts,
    ),
    "grammar_compilation_seconds": (
        "Time spent compiling grammars",
        lambda n, _: n.grammar_seconds,
    ),
    "encoder_items": ("Images, videos and sounds encoded", lambda n, _: n.encoded_items),
    "encoder_reused_items": (
        "Images, videos and sounds not encoded, because the cache had them",
        lambda n, _: n.image_hits + n.video_hits + n.audio_hits,
    ),
    "scheduler_idle_seconds": (
        "Time in which the scheduler had no requests",
        lambda n, _: n.idle_seconds,
    ),
    "scheduler_bubble_seconds": (
        "Time in which requests waited and no step was running; the overhead of the scheduler",
        lambda n, _: n.bubble_seconds,
    ),
    "scheduler_process_cpu_seconds": (
        "Processor time of the scheduler's process",
        lambda n, _: n.cpu_seconds,
    ),
    "scheduler_steps": ("Steps that computed something", lambda n, _: n.steps),
}

_LABELLED: Mapping[str, tuple[str, str, Mapping[str, Value]]] = {
    "realtime_tokens": (
        "Tokens computed in prefill, taken from the cache, or generated",
        "mode",
        {
            "prefill_compute": lambda n, _: n.prefill_tokens,
            "prefill_cache": lambda n, _: n.cached_prompt_tokens,
            "decode": lambda n, _: n.generated_tokens,
        },
    ),
    "encoder_cache_total_files": (
        "Images, videos and sounds of requests",
        "modality",
        {
            "image": lambda n, _: n.image_items,
            "video": lambda n, _: n.video_items,
            "audio": lambda n, _: n.audio_items,
        },
    ),
    "encoder_cache_hit_files": (
        "Images, videos and sounds of requests that the cache had",
        "modality",
        {
            "image": lambda n, _: n.image_hits,
            "video": lambda n, _: n.video_hits,
            "audio": lambda n, _: n.audio_hits,
        },
    ),
    "forward_execution_seconds": (
        "Time in which a step was running",
        "category",
        {"forward": lambda n, _: n.forward_seconds},
    ),
}


def _gb(facts: ServedModelInfo, name: str) -> float:
    return float(facts.extra.get(name) or 0) / 1e9


class LoadMetrics(Collector):
    """One series per scheduler; with several, distinguished by `dp_rank`.

    Args:
        engine: The engine with the schedulers.
        prefix: Prefix of metric names.
        labels: Label names and values of all series.
    """

    def __init__(self, engine: TokenizerManager, prefix: str, labels: Mapping[str, str]) -> None:
        self._engine, self._prefix = engine, prefix
        self._labels = {**labels, **RANK_LABELS}

    def collect(self) -> Iterator[Metric]:
        clients = self._engine.router.clients
        many = ("dp_rank",) if len(clients) > 1 else ()
        names = [*self._labels, *many]
        rows = [(self._values(client, many), *self._facts(client)) for client in clients]
        tables = (
            _GAUGES,
            _POOLS if _has_pools(clients) else {},
            _BUCKETS if any(c.load.bucket_padded_rows for c in clients) else {},
        )
        for name, (doc, value) in (item for table in tables for item in table.items()):
            gauge = GaugeMetricFamily(self._prefix + name, doc, labels=names)
            for values, load, facts in rows:
                gauge.add_metric(values, value(load, facts))
            yield gauge
        for name, (doc, value) in _COUNTERS.items():
            counter = CounterMetricFamily(self._prefix + name, doc, labels=names)
            for values, load, facts in rows:
                counter.add_metric(values, value(load, facts))
            yield counter
        for name, (doc, label, parts) in _LABELLED.items():
            counter = CounterMetricFamily(self._prefix + name, doc, labels=[*names, label])
            for values, load, facts in rows:
                for part, value in parts.items():
                    counter.add_metric([*values, part], value(load, facts))
            yield counter

    def _values(self, client: SchedulerClient, many: tuple[str, ...]) -> list[str]:
        return [*self._labels.values(), *(str(client.replica) for _ in many)]

    def _facts(self, client: SchedulerClient) -> tuple[SchedulerLoad, ServedModelInfo]:
        return client.load, client.facts or self._engine.facts


def _has_pools(clients: tuple[SchedulerClient, ...]) -> bool:
    return any(c.load.swa_total_tokens or c.load.mamba_total_states for c in clients)
