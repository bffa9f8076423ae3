"""What holds for all tests."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from sylvan.config.env import calm_threads

calm_threads()  # as in the processes of a server; before anything imports PyTorch
# Nothing here measures time: a slow machine must not fail a test. In CI a run is repeatable.
settings.register_profile(
    "sylvan",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=os.environ.get("CI") == "true",
)
settings.load_profile("sylvan")
