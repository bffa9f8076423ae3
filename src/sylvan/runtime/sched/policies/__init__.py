"""Scheduling policies: the order of waiting requests. One file per policy, by name."""

from __future__ import annotations

import sys
from collections.abc import Callable

from sylvan.runtime.sched.policies.api import PolicyContext, SchedulePolicy
from sylvan.utils import plugins


def schedule_policy(name: str) -> Callable[[PolicyContext], SchedulePolicy]:
    """Return the factory of the policy `name` (dashes equal underscores).

    Raises:
        ConfigError: no such policy.
    """
    return plugins.load(sys.modules[__name__], name.replace("-", "_")).build
