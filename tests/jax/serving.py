"""The real scheduler over step programs on JAX, with few buckets, so that little is compiled."""

from __future__ import annotations

from pathlib import Path

from tests.parity.serving import Serving

LIMITS = {"max_running_reqs": 4, "max_batch_tokens": 64}


def on_jax(path: Path, *, devices: int = 1, attention: str = "auto", **also: object) -> Serving:
    """With float32 rows."""
    options = {
        "device": "jax",
        "devices": devices,
        "attention": attention,
        "max_samples": 0,
        "dtype": "float32",
    }
    options |= also.pop("options", {})  # type: ignore[arg-type]
    return Serving(path, runner="auto", options=options, **LIMITS | also)


def on_cpu(path: Path, *, runner: str = "program", **also: object) -> Serving:
    """The native program, or with `auto` what is the nearest to it."""
    return Serving(path, runner=runner, options={"dtype": "float32"}, **LIMITS | also)
