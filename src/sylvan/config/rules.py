"""What a rule about a configuration is, and what it judges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sylvan.config.exact import DeterminismBlocker, obstacle
from sylvan.config.facts import AttentionFacts, DeviceFacts, Facts
from sylvan.config.fields import get
from sylvan.config.resolve import Resolved
from sylvan.config.tree import Config

MIN_CONTEXT = 64
"""A server that cannot hold so many tokens (or the model's context, if less) is of no use."""


@dataclass(frozen=True, slots=True)
class RuleCase:
    """What a rule judges."""

    resolved: Resolved
    facts: Facts

    @property
    def config(self) -> Config:
        """The resolved tree."""
        return self.resolved.config

    @property
    def device(self) -> DeviceFacts | None:
        """The device chosen, if it exists."""
        return self.facts.devices.get(self.config.device)

    @property
    def attention(self) -> AttentionFacts | None:
        """The attention backend chosen, if it exists."""
        return self.facts.attention.get(self.config.attention)

    @property
    def obstacle(self) -> DeterminismBlocker | None:
        """What is in the way of the same bits always."""
        return obstacle(self.config, self.facts)

    def asked(self, path: str) -> object:
        """What somebody chose; None: nobody did, or all is resolved so that none can tell."""
        decisions = self.resolved.decisions
        return get(self.config, path) if decisions and path not in decisions else None

    @property
    def missing_bytes(self) -> int:
        """How much more memory the plan needs than is free; 0 if none."""
        plan = self.resolved.plan
        least = min(MIN_CONTEXT, self.facts.model.context_len) * plan.kv_bytes_per_token
        needed = plan.weight_bytes + plan.work_bytes + max(plan.kv_bytes, least)
        return max(0, needed - plan.budget_bytes)


@dataclass(frozen=True, slots=True)
class Rule:
    """One impossible combination. `message` may name fields as `{cache.page_size}`."""

    name: str
    fields: tuple[str, ...]
    broken: Callable[[RuleCase], bool]
    message: str | Callable[[RuleCase], str]
