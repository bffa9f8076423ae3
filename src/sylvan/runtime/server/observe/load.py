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


def _occupied(load: SchedulerLoad) -> int:
    """Return the tokens of KV memory used by requests or the prefix cache."""
    return load.num_used_tokens + load.num_cached_tokens


_GAUGES: Mapping[str, tuple[str, Value]] = {
    "num_running_reqs": ("Requests that run", lambda n, _: n.num_running_reqs),
    "num_queue_reqs": ("Requests that wait", lambda n, _: n.num_waiting_reqs),
    "num_grammar_queue_reqs": ("Of these, for a grammar", lambda n, _: n.num_grammar_reqs),
    "num_paused_reqs": (
        "Requests that wait for /continue_generation",
        lambda n, _: n.num_running_reqs if n.paused else 0,
    ),
    "num_used_tokens": ("Tokens of KV that requests hold", lambda n, _: n.num_used_tokens),
    "kv_used_tokens": ("Tokens of KV that requests hold", lambda n, _: n.num_used_tokens),
    "kv_evictable_tokens": ("Tokens of KV that only cache", lambda n, _: n.num_cached_tokens),
    "kv_available_tokens": (
        "Tokens of KV that are free",
        lambda n, f: max(0, _capacity(n, f) - _occupied(n)),
    ),
    "max_total_num_tokens": ("Tokens that fit into the KV memory", _capacity),
    "token_usage": ("Share of the KV memory that requests hold", _usage),
    "full_token_usage": ("The same, of layers that see everything", _usage),
    "swa_token_usage": (
        "The same, of layers with a window",
        lambda n, _: _share(n.swa_used_tokens, n.swa_total_tokens),
    ),
    "mamba_usage": (
        "Share of the slots of recurrent state that are used",
        lambda n, _: _share(n.mamba_used_states, n.mamba_total_states),
    ),
    "decode_sum_seq_lens": ("Tokens of all running requests", lambda n, _: n.decode_sum_seq_lens),
    "cache_hit_rate": (
        "Share of prompt tokens that came from the cache, since the start",
        lambda n, _: _share(n.cached_prompt_tokens, n.cached_prompt_tokens + n.computed_tokens),
    ),
    "gen_throughput": ("Tokens generated a second", lambda n, _: n.gen_throughput),
    "utilization": (
        "Running requests, of those that may run",
        lambda n, f: _share(n.num_running_reqs, f.max_running_reqs),
    ),
    "new_token_ratio": (
        "Share of its limit that a request is expected to generate",
        lambda n, _: n.new_token_ratio,
    ),
    "context_len": ("Longest prompt plus output", lambda _, f: f.context_len),
    "page_size": ("Tokens of a page of KV", lambda _, f: f.page_size),
    "num_pages": ("Pages of KV", lambda n, f: _capacity(n, f) // max(1, f.page_size)),
    "weight_memory_usage_gb": ("GB of weights", lambda _, f: _gb(f, "weight_bytes")),
    "kv_cache_memory_usage_gb": ("GB of KV memory", lambda _, f: _gb(f, "kv_bytes")),
    "is_cuda_graph": (
        "Whether steps are captured graphs",
        lambda _, f: float(f.extra.get("runner") == "graph"),
    ),
    "num_retracted_reqs": ("Requests that lost their memory", lambda n, _: n.retractions),
    "generated_tokens": ("Tokens generated", lambda n, _: n.generated_tokens),
    "spec_accept_length": (
        "Tokens of a step that verifies guesses",
        lambda n, _: n.accept_length,
    ),
    "spec_accept_rate": ("Share of guesses that were right", lambda n, _: n.accept_rate),
    "spec_verified_drafts": ("Slices whose guesses were verified", lambda n, _: n.verified_drafts),
    "spec_proposed_tokens": ("Guesses that were verified", lambda n, _: n.proposed_draft_tokens),
    "spec_accepted_tokens": ("Of these, the right ones", lambda n, _: n.accepted_draft_tokens),
    "spec_seconds_won": (
        "Seconds that guesses saved, about; below 0: that they cost",
        lambda n, _: n.draft_seconds_saved,
    ),
    "lora_pool_slots_used": ("Slots with an adapter", lambda n, _: n.lora_slots_used),
    "lora_pool_slots_total": ("Slots for adapters", lambda n, _: n.lora_slots_total),
    "lora_pool_utilization": ("Share of slots with an adapter", lambda n, _: n.lora_utilization),
    "lora_adapters": ("Adapters that may be asked for", lambda n, _: n.lora_adapters),
    "lora_host_copies": ("Adapters in host memory", lambda n, _: n.lora_copies),
    "encoder_cache_entries": ("Items that are encoded", lambda n, _: n.encoder_entries),
    "encoder_cache_size_mb": ("MB of their vectors", lambda n, _: n.encoder_bytes / 1e6),
    "encoder_vector_bytes": ("Bytes of their vectors", lambda n, _: n.encoder_bytes),
    "grammar_tries": ("Outputs that went back to their schema", lambda n, _: n.grammar_tries),
    "grammar_taken_back_tokens": ("Tokens taken back then", lambda n, _: n.grammar_taken_back),
    "targets_set": ("Requests with a latency target", lambda n, _: n.targets_set),
    "targets_met": ("Of these, those that met it", lambda n, _: n.targets_met),
    "repaired_pages": ("Lost pages that were taken back", lambda n, _: n.repaired_pages),
    "repaired_locks": ("Lost locks that were taken back", lambda n, _: n.repaired_locks),
    "repaired_states": ("Lost states that were taken back", lambda n, _: n.repaired_states),
}

_POOLS: Mapping[str, tuple[str, Value]] = {
    "swa_used_tokens": ("Tokens of layers with a window", lambda n, _: n.swa_used_tokens),
    "swa_available_tokens": (
        "Tokens of layers with a window that fit",
        lambda n, _: n.swa_total_tokens - n.swa_used_tokens,
    ),
    "max_total_num_tokens_swa": (
        "Tokens that fit into the memory of layers with a window",
        lambda n, _: n.swa_total_tokens,
    ),
    "mamba_used_tokens": ("Slots of recurrent state in use", lambda n, _: n.mamba_used_states),
    "mamba_available_tokens": (
        "Slots of recurrent state that are free",
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
    "num_retracted_requests": ("Requests that lost their memory", lambda n, _: n.retractions),
    "num_retracted_input_tokens": ("Their prompt tokens", lambda n, _: n.retracted_input_tokens),
    "num_retracted_output_tokens": ("Their outputs", lambda n, _: n.retracted_output_tokens),
    "evicted_tokens": ("Tokens that left the prefix cache", lambda n, _: n.evicted_tokens),
    "num_grammar": ("Grammars asked for", lambda n, _: n.grammars),
    "num_grammar_cache_hit": ("Of these, compiled already", lambda n, _: n.grammar_cache_hits),
    "num_grammar_aborted": ("Of these, refused", lambda n, _: n.grammars_refused),
    "num_grammar_timeout": ("Of these, not ready in time", lambda n, _: n.grammar_timeouts),
    "grammar_compilation_seconds": ("Time that compiling took", lambda n, _: n.grammar_seconds),
    "encoder_items": ("Images, videos and sounds encoded", lambda n, _: n.encoded_items),
    "encoder_reused_items": (
        "Requests for one that was known",
        lambda n, _: n.image_hits + n.video_hits + n.audio_hits,
    ),
    "scheduler_idle_seconds": ("Time without work", lambda n, _: n.idle_seconds),
    "scheduler_bubble_seconds": (
        "Time with work and without a step under way: what the scheduler costs",
        lambda n, _: n.bubble_seconds,
    ),
    "scheduler_process_cpu_seconds": ("Processor time", lambda n, _: n.cpu_seconds),
    "scheduler_steps": ("Steps that computed something", lambda n, _: n.steps),
}

_LABELLED: Mapping[str, tuple[str, str, Mapping[str, Value]]] = {
    "realtime_tokens": (
        "Tokens by what was done for them",
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
        "Of these, those that were encoded already",
        "modality",
        {
            "image": lambda n, _: n.image_hits,
            "video": lambda n, _: n.video_hits,
            "audio": lambda n, _: n.audio_hits,
        },
    ),
    "forward_execution_seconds": (
        "Time in which a step was under way",
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
