"""Rules about configurations, and the data that they check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sylvan.config.determinism import DeterminismBlocker, determinism_blocker
from sylvan.config.facts import AttentionFacts, DeviceFacts, Facts
from sylvan.config.fields import get
from sylvan.config.resolve import Resolved
from sylvan.config.tree import Config

MIN_CONTEXT = 64
"""Minimum size of the KV cache in tokens (or the model's context, if less)."""


@dataclass(frozen=True, slots=True)
class RuleCase:
    """The data that a rule checks."""

    resolved: Resolved
    facts: Facts

    @property
    def config(self) -> Config:
        """The resolved tree."""
        return self.resolved.config

    @property
    def device(self) -> DeviceFacts | None:
        """The chosen device, if it exists."""
        return self.facts.devices.get(self.config.device)

    @property
    def attention(self) -> AttentionFacts | None:
        """The chosen attention backend, if it exists."""
        return self.facts.attention.get(self.config.attention)

    @property
    def determinism_blocker(self) -> DeterminismBlocker | None:
        """The reason why results depend on the batch; None: they do not."""
        return determinism_blocker(self.config, self.facts)

    def given(self, path: str) -> object:
        """The value that the user gave; None: it was not given, or its origin is unknown."""
        decisions = self.resolved.decisions
        return get(self.config, path) if decisions and path not in decisions else None

    @property
    def missing_bytes(self) -> int:
        """Bytes of memory missing for the plan; 0 if it fits."""
        plan = self.resolved.plan
        least = min(MIN_CONTEXT, self.facts.model.context_len) * plan.kv_bytes_per_token
        needed = plan.weight_bytes + plan.work_bytes + max(plan.kv_bytes, least)
        return max(0, needed - plan.budget_bytes)


@dataclass(frozen=True, slots=True)
class Rule:
    """An impossible combination. `message` may mention fields as `{cache.page_size}`."""

    name: str
    fields: tuple[str, ...]
    broken: Callable[[RuleCase], bool]
    message: str | Callable[[RuleCase], str]
