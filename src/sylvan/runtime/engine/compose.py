"""Builds a scheduler with its cache and capabilities over an existing executor. Loads no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol

from sylvan.config import Config
from sylvan.config.check import check
from sylvan.config.fields import replaced
from sylvan.config.resolve import resolve
from sylvan.protocol.messages import Inspection
from sylvan.runtime.cache.build import caches_by_rank, kv_cache
from sylvan.runtime.cache.by_rank import KVMemory
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.cache.manager import KVCacheManager
from sylvan.runtime.cache.radix import RadixCache
from sylvan.runtime.cache.residency import Tier, TierPolicy
from sylvan.runtime.cache.types import Place
from sylvan.runtime.engine.engine_core import Emit, Inspect
from sylvan.runtime.engine.facts import gather_facts
from sylvan.runtime.executor.api import Executor, ExecutorCaps
from sylvan.runtime.features.explain.control import CacheExplain
from sylvan.runtime.features.flight_recorder.control import FlightRecorder
from sylvan.runtime.features.flight_recorder.recording import Recorder, SchedulerSetup
from sylvan.runtime.features.grammar.build_control import GrammarParts, grammar_parts
from sylvan.runtime.features.grammar.vocabulary import Vocabulary
from sylvan.runtime.features.kv_events.control import KVEvents
from sylvan.runtime.features.kv_events.publisher import KVEventPublisher
from sylvan.runtime.features.standard import standard_capabilities
from sylvan.runtime.sched.capability import Capability, Hooks
from sylvan.runtime.sched.limits import SchedulerDeps, SchedulerLimits
from sylvan.runtime.sched.policies import schedule_policy
from sylvan.runtime.sched.scheduler import Scheduler
from sylvan.utils.machine import inspect_machine

logger = logging.getLogger(__name__)


class TierParts(Protocol):
    """Parts of KV tiers that a cache needs; see `features.tiers.build.TiersParts`."""

    @property
    def tiers(self) -> Sequence[Tier]:
        """The tiers, nearest first."""
        ...

    def policy(self, groups: Sequence[KVGroup]) -> TierPolicy:
        """Writes to the tiers, and loads from them."""
        ...

    def control(self, cache: KVCacheManager) -> Capability:
        """Build the control half."""
        ...


def resolved(config: Config) -> Config:
    """Return the configuration with `auto` resolved and checked; a resolved one is unchanged.

    Raises:
        ConfigError: The model is unreadable, or settings conflict.
    """
    needed = (config.device, config.context_len, config.cache.max_tokens, config.scheduler.overlap)
    if "auto" not in needed:
        return config
    facts = gather_facts(config)
    result = resolve(config, facts)
    check(result, facts)
    return result.config


def effective_config(config: Config, runner: str, *, exact: bool) -> Config:
    """Return the configuration with the values of its best-effort settings that took effect.

    These are `deterministic` and `parallel.same_bits`.

    Args:
        config: Resolved.
        runner: Name of the step runner.
        exact: Whether its results never depend on the batch.
    """
    same = exact and config.parallel.same_bits is True
    config = replaced(config, {"parallel.same_bits": same})
    if config.deterministic == "auto":
        return replaced(config, {"deterministic": exact})
    if not config.deterministic or exact:
        return config
    logger.warning(
        "deterministic=false: results of runner %s depend on the batch",
        runner,
    )
    return replaced(config, {"deterministic": False})


def compose_scheduler(
    config: Config,
    executor: Executor,
    emit: Emit,
    over: Callable[[KVMemory], tuple[Capability, ...]],
    publisher: KVEventPublisher | None = None,
    tiers: TierParts | None = None,
) -> tuple[Scheduler, Inspect]:
    """Build the scheduler of a resolved configuration over an existing executor.

    `over` builds capabilities over the cache.
    """
    settings, caps = config.scheduler, executor.caps
    prefix = "none" if caps.bidirectional or caps.fills else config.cache.prefix
    below = () if tiers is None else tiers.tiers
    policy = None if tiers is None else tiers.policy(caps.kv_groups)
    eviction = config.cache.eviction
    if caps.attention_dp > 1:
        cache = caches_by_rank(caps.kv_groups, caps.attention_dp, prefix, eviction)
    else:
        cache = kv_cache(caps.kv_groups, prefix, eviction, below, policy)
    capabilities = over(cache)
    if tiers is not None and isinstance(cache, KVCacheManager):
        capabilities = (*capabilities, tiers.control(cache))
    standard = standard_capabilities(
        cache, makes_vectors=caps.makes_vectors, pools_all=caps.pools_all
    )
    explain = CacheExplain(cache.tree) if isinstance(cache.tree, RadixCache) else None
    if explain:
        capabilities = (explain, *capabilities)
    if publisher is not None and isinstance(cache.tree, RadixCache):
        medium = "CPU" if config.device == "cpu" else "GPU"
        media = {Place.DEVICE: medium, Place.HOST: "CPU_PINNED"}
        capabilities = (*capabilities, KVEvents(cache.tree, publisher, media))
    parts = SchedulerDeps(
        cache=cache,
        executor=executor,
        policy=schedule_policy(settings.policy),
        emit=emit,
        capabilities=(*standard, *capabilities),
        seed=config.seed or 0,
        tenant_weights=settings.tenant_weights,
    )
    limits = scheduler_limits(config, caps)
    if config.observe.record is not None:
        setup = SchedulerSetup(
            kv_groups=caps.kv_groups,
            prefix=prefix,
            eviction=config.cache.eviction,
            policy=settings.policy,
            seed=parts.seed,
            limits=asdict(limits),
            questions=Hooks(parts.capabilities).questions,
            tenant_weights=settings.tenant_weights,
            lockstep=caps.lockstep,
            stages=caps.stages,
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


def _no_answer(command: Inspection) -> None:
    """Answer nothing: there is no prefix cache."""


def scheduler_limits(config: Config, caps: ExecutorCaps) -> SchedulerLimits:
    """Return the limits of a resolved configuration."""
    settings = config.scheduler
    max_batch_tokens = number(settings.max_batch_tokens)
    chunk_tokens = number(settings.chunk_tokens)
    return SchedulerLimits(
        max_batch_tokens=max_batch_tokens,
        chunk_tokens=chunk_tokens or max_batch_tokens,
        max_running_reqs=number(settings.max_running_reqs),
        max_waiting_reqs=settings.max_waiting_reqs,
        inflight=max(settings.inflight, caps.stages + config.parallel.pp_ahead),
        stage_batch=config.parallel.pp_batch,
        queue_timeout_s=settings.queue_timeout_s,
        conservativeness=settings.conservativeness,
        preemption_threshold=settings.preempt_threshold,
        whole_prompts=chunk_tokens == 0 or caps.bidirectional,
    )


def grammar_of(config: Config, vocab_size: int) -> GrammarParts:
    """Build grammars, except their worker half."""
    return grammar_parts(
        config.grammar,
        lambda: _vocabulary(config, vocab_size),
        vocab_size,
        free_core=number(config.threads) < inspect_machine().cores,
    )


def _vocabulary(config: Config, vocab_size: int) -> Vocabulary:
    """Read the tokenizer's vocabulary; its library is imported for grammar requests only."""
    from sylvan.runtime.engine.text import load_tokenizer
    from sylvan.runtime.features.grammar.text import vocabulary_of

    return vocabulary_of(load_tokenizer(config), vocab_size)


def number(value: int | str) -> int:
    """Return a setting of a resolved configuration."""
    assert isinstance(value, int), "a resolved configuration has no auto"
    return value
