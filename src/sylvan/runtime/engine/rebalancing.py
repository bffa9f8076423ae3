"""Moves experts between ranks at intervals of steps."""

from __future__ import annotations

import logging

from sylvan.config.parallel import ParallelConfig
from sylvan.protocol.commands import BalanceExperts, CommandResult
from sylvan.runtime.engine.commands import Commands

logger = logging.getLogger(__name__)

OWN = -1
"""Number of commands that no client sent."""


class Rebalancing:
    """Requests `BalanceExperts` between steps; stops if it fails.

    Args:
        settings: Has `rebalance` and `rebalance_steps`; None: nothing is requested.
    """

    def __init__(self, settings: ParallelConfig | None) -> None:
        self._every = settings.rebalance_steps if settings and settings.rebalance else 0
        self._left = self._every

    def on_step(self, commands: Commands) -> None:
        """A step has computed something."""
        if not self._every:
            return
        self._left -= 1
        if self._left <= 0 and not commands.active:
            self._left = self._every
            commands.add(OWN, BalanceExperts())

    def on_done(self, result: CommandResult) -> None:
        """Experts were moved, or could not be."""
        if result.error:
            self._every = 0
            logger.warning("experts are not moved any more: %s", result.error)
        else:
            logger.info("experts moved: %s", result.body)
