"""What holds for all tests."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Nothing here measures time: a slow machine must not fail a test. In CI a run is repeatable.
settings.register_profile(
    "sylvan",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=os.environ.get("CI") == "true",
)
settings.load_profile("sylvan")
