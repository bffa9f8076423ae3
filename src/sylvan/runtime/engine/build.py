"""From a configuration to a scheduler with all its parts: the composition root."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from sylvan.config import Config
from sylvan.config.check import check
from sylvan.config.checkpoint import model_dir
from sylvan.config.fields import replaced
from sylvan.config.load import dump
from sylvan.config.plan import useful_tokens
from sylvan.config.resolve import resolve
from sylvan.kernels import describe
from sylvan.protocol.errors import ConfigError
from sylvan.protocol.messages import Inspection
from sylvan.runtime.cache.build import kv_cache
from sylvan.runtime.cache.radix import RadixCache
from sylvan.runtime.engine.composition import Composition, Emit, Inspect
from sylvan.runtime.engine.facts import gather_facts
from sylvan.runtime.engine.progress import LoggedProgress, Progress
from sylvan.runtime.executor.api import Executor, ExecutorCaps
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.facts import ModelFacts, read_facts
from sylvan.runtime.executor.options import ExecutorParts, LocalOptions
from sylvan.runtime.features.explain.control import CacheExplain
from sylvan.runtime.features.flight_recorder.control import FlightRecorder
from sylvan.runtime.features.flight_recorder.recording import Recorder, Setup
from sylvan.runtime.features.grammar.build import Grammar, build_grammar
from sylvan.runtime.features.grammar.vocabulary import Vocabulary
from sylvan.runtime.features.kv_events.control import KVEvents
from sylvan.runtime.features.kv_events.publisher import KVEventPublisher
from sylvan.runtime.features.lora.build import LoraServing
from sylvan.runtime.features.speculation.build import build_speculation
from sylvan.runtime.features.speculation.control import Speculation
from sylvan.runtime.features.speculation.model import DraftModel
from sylvan.runtime.features.speculation.together import ModelSpeculation
from sylvan.runtime.features.standard import STANDARD_WORKERS, standard_capabilities
from sylvan.runtime.models.pooling import PoolingWish
from sylvan.runtime.sched.capability import Capability, Hooks
from sylvan.runtime.sched.limits import Limits, Parts
from sylvan.runtime.sched.policies import schedule_policy
from sylvan.runtime.sched.scheduler import Scheduler
from sylvan.utils.machine import inspect_machine

logger = logging.getLogger(__name__)


def resolved(config: Config) -> Config:
    """The configuration without `auto`, checked; one that is resolved already stays as it is.

    Raises:
        ConfigError: the model cannot be read, or rules are broken.
    """
    needed = (config.device, config.context_len, config.cache.max_tokens, config.scheduler.overlap)
    if "auto" not in needed:
        return config
    facts = gather_facts(config)
    result = resolve(config, facts)
    check(result, facts)
    return result.config


def build_scheduler(config: Config, emit: Emit, progress: Progress | None = None) -> Composition:
    """Load the model and wire everything that serves it.

    Args:
        config: May still hold `auto`.
        emit: Takes the outputs of each step.
        progress: Told of the bytes that are loaded; None: lines of the log tell of them.

    Raises:
        ConfigError: something cannot be served; one clear sentence.
    """
    config = resolved(config)
    if config.device == "cpu" and (lack := describe().reasons.get("none")):
        logger.warning("no native kernels, PyTorch computes, several times slower: %s", lack)
    torch.set_num_threads(_number(config.threads))
    path = model_dir(config.model)
    trusted = config.trust_remote_code
    vocab_size = read_facts(path, config.dtype, config.quantization, trusted=trusted).vocab_size
    grammar = build_grammar(
        config.grammar,
        lambda: _vocabulary(config, vocab_size),
        vocab_size,
        free_core=_number(config.threads) < inspect_machine().cores,
    )
    lora = LoraServing(config.lora) if config.lora else None
    workers = (*STANDARD_WORKERS, lambda site: grammar.worker, *([lora.worker] if lora else ()))
    executor, model = build_executor(
        path,
        _options(config),
        progress=progress or LoggedProgress(config.quantization),
        parts=ExecutorParts(workers),
    )
    if model.num_pages:  # of the device's memory, which is known only now
        tokens = (model.num_pages - 1) * _number(config.cache.page_size)
        config = replaced(config, {"cache.max_tokens": tokens})
    config = _in_force(config, model)
    publisher = KVEventPublisher(config.kv_events) if config.kv_events else None
    capabilities: tuple[Capability, ...] = (grammar.control, *([lora.control] if lora else ()))
    speculation = draft = None
    if config.speculative is not None:
        if not executor.caps.draft_chains:
            raise ConfigError(
                f"speculative.algorithm={config.speculative.algorithm}: steps of runner "
                f"{model.runner} verify no guesses for this model; leave it out"
            )
        draft = _draft_model(config)
        speculation = build_speculation(config.speculative, model.vocab_size, draft)
        capabilities = (*capabilities, speculation)
    scheduler, inspect = compose_scheduler(config, executor, emit, capabilities, publisher)

    def close() -> None:
        executor.close()
        if draft is not None:
            draft.close()
        if publisher is not None:
            publisher.close()
        grammar.close()

    return Composition(
        scheduler,
        facts={
            "context_len": _number(config.context_len),
            "vocab_size": model.vocab_size,
            "max_total_tokens": scheduler.load().max_total_num_tokens,
            "page_size": _number(config.cache.page_size),
            "max_running_reqs": _number(config.scheduler.max_running_reqs),
            "architecture": model.architecture,
            "dtype": model.dtype,
            "runner": model.runner,
            "deterministic": bool(config.deterministic),
            "task": config.task,
            "vector_size": model.vector_size or model.num_labels,
            "num_parameters": model.num_parameters,
            "weight_bytes": model.weight_bytes,
            "kv_bytes": model.kv_bytes,
            "state_bytes": model.num_states * model.state_bytes,
            "weight_version": config.weight_version,
            "adapters": lora.load(executor) if lora else None,
        },
        state=lambda: _state(config, grammar, model, speculation),
        inspect=inspect,
        executor=executor,
        close=close,
        num_grammar_reqs=grammar.num_waiting,
        weight_version=config.weight_version,
        lora=lora,
    )


def _draft_model(config: Config) -> DraftModel | None:
    """The model that writes ahead, with as much memory in tokens as the one that is served."""
    given = config.speculative
    if given is None or given.draft_model is None:
        return None
    path = model_dir(given.draft_model)
    facts = read_facts(path, config.dtype, None, trusted=config.trust_remote_code)
    options = replace(
        _options(config),
        context_len=min(facts.context_len, _number(config.context_len)),
        quantization=None,
        attention="auto",
        runner="auto",
        deterministic=False,
        load_format="auto",
        max_samples=0,
        embed=None,
        headless=False,
    )
    executor, facts = build_executor(path, options)
    return DraftModel(
        executor,
        limits=replace(_limits(config, executor.caps), preemption_threshold=None),
        context_len=min(facts.context_len, _number(config.context_len)),
    )


def _in_force(config: Config, model: ModelFacts) -> Config:
    """The configuration with `deterministic` as it came out: it was wanted where it can be had."""
    if config.deterministic == "auto":
        return replaced(config, {"deterministic": model.exact})
    if not config.deterministic or model.exact:
        return config
    logger.warning(
        "deterministic=false: runner %s serves this model, and its bits depend on the batch",
        model.runner,
    )
    return replaced(config, {"deterministic": False})


def compose_scheduler(
    config: Config,
    executor: Executor,
    emit: Emit,
    capabilities: tuple[Capability, ...] = (),
    publisher: KVEventPublisher | None = None,
) -> tuple[Scheduler, Inspect]:
    """The scheduler of a resolved configuration over an executor that is there already."""
    settings, caps = config.scheduler, executor.caps
    prefix = "none" if caps.both_ways else config.cache.prefix
    cache = kv_cache(caps.kv_groups, prefix, config.cache.eviction)
    standard = standard_capabilities(
        cache, makes_vectors=caps.makes_vectors, pools_all=caps.pools_all
    )
    explain = CacheExplain(cache.tree) if isinstance(cache.tree, RadixCache) else None
    if explain:
        capabilities = (explain, *capabilities)
    if publisher is not None and isinstance(cache.tree, RadixCache):
        medium = "CPU" if config.device == "cpu" else "GPU"
        capabilities = (*capabilities, KVEvents(cache.tree, publisher, medium))
    parts = Parts(
        cache=cache,
        executor=executor,
        policy=schedule_policy(settings.policy),
        emit=emit,
        capabilities=(*standard, *capabilities),
        seed=config.seed or 0,
        tenant_weights=settings.tenant_weights,
    )
    limits = _limits(config, caps)
    if config.observe.record is not None:
        setup = Setup(
            kv_groups=caps.kv_groups,
            prefix=prefix,
            eviction=config.cache.eviction,
            policy=settings.policy,
            seed=parts.seed,
            limits=asdict(limits),
            questions=Hooks(parts.capabilities).questions,
            tenant_weights=settings.tenant_weights,
            lockstep=caps.lockstep,
            max_samples=caps.max_samples,
            draft_chains=caps.draft_chains,
            draft_trees=caps.draft_trees,
            num_slots=caps.max_running_reqs,
            makes_vectors=caps.makes_vectors,
            pools_all=caps.pools_all,
        )
        flight = FlightRecorder(Recorder(Path(config.observe.record), setup))
        parts = replace(
            parts,
            clock=flight.clock(parts.clock),
            capabilities=(*parts.capabilities, flight),
        )
    return Scheduler(parts, limits), explain.answer if explain else _no_answer


def _vocabulary(config: Config, vocab_size: int) -> Vocabulary:
    """Of the tokenizer, whose library is imported for requests with a grammar only."""
    from sylvan.runtime.engine.text import load_tokenizer
    from sylvan.runtime.features.grammar.text import vocabulary_of

    return vocabulary_of(load_tokenizer(config), vocab_size)


def _no_answer(command: Inspection) -> None:
    """Without a prefix cache there is nothing to tell."""


def _limits(config: Config, caps: ExecutorCaps) -> Limits:
    settings = config.scheduler
    max_batch_tokens = _number(settings.max_batch_tokens)
    chunk_tokens = _number(settings.chunk_tokens)
    return Limits(
        max_batch_tokens=max_batch_tokens,
        chunk_tokens=chunk_tokens or max_batch_tokens,
        max_running_reqs=_number(settings.max_running_reqs),
        max_waiting_reqs=settings.max_waiting_reqs,
        inflight=settings.inflight,
        queue_timeout_s=settings.queue_timeout_s,
        conservativeness=settings.conservativeness,
        preemption_threshold=settings.preempt_threshold,
        whole_prompts=chunk_tokens == 0 or caps.both_ways,
    )


def _options(config: Config) -> LocalOptions:
    size = _number(config.cache.page_size)
    running = _number(config.scheduler.max_running_reqs)
    may_fall_back = config.runner == "program" and config.runner_fallback is True
    return LocalOptions(
        page_size=size,
        num_pages=-(-_number(config.cache.max_tokens) // size) + 1,
        max_batch_tokens=_number(config.scheduler.max_batch_tokens),
        max_running_reqs=running,
        context_len=_number(config.context_len),
        dtype=config.dtype,
        device=config.device,
        kv_dtype=config.cache.dtype,
        fill=config.device != "cpu" and config.cache.memory == "auto",
        most_pages=useful_tokens(_number(config.context_len), running, size) // size + 1,
        # told to choose, the executor serves what the step program cannot some other way
        attention="auto" if may_fall_back else config.attention,
        runner="auto" if may_fall_back else config.runner,
        deterministic=config.deterministic is True and not may_fall_back,
        load_format=config.load_format,
        trusted=config.trust_remote_code,
        quantization=config.quantization,
        overlap=config.scheduler.overlap == "on",
        max_samples=config.speculative.most_samples(running) if config.speculative else 0,
        num_states=_number(config.cache.max_states),
        embed=_wish(config),
        headless=config.task == "embed",
        seed=config.seed or 0,
    )


def _wish(config: Config) -> PoolingWish | None:
    if config.task == "generate":
        return None
    return PoolingWish(mode=config.embedding.pooling, normalize=config.embedding.normalize)


def _state(
    config: Config,
    grammar: Grammar,
    model: ModelFacts,
    speculation: Speculation | ModelSpeculation | None,
) -> Mapping[str, Any]:
    loads = {name: load_E.tolist() for name, load_E in model.expert_load.items()}
    experts = {"expert_load": loads} if loads else {}
    drafts = {"speculation": asdict(speculation.counts)} if speculation else {}
    return {"config": dump(config), "grammar": asdict(grammar.stats())} | experts | drafts


def _number(value: int | str) -> int:
    assert isinstance(value, int), "a resolved configuration has no auto"
    return value
