"""The real scheduler over step programs on JAX, with few buckets, so that little is compiled."""

from __future__ import annotations

from pathlib import Path

from tests.parity.serving import Serving

LIMITS = {"max_running_reqs": 4, "max_batch_tokens": 64}


def on_jax(
    path: Path,
    *,
    devices: int = 1,
    groups: int = 1,
    attention: str = "auto",
    serve: type[Serving] = Serving,
    **also: object,
) -> Serving:
    """With float32 rows."""
    options = {
        "device": "jax",
        "devices": devices,
        "data_groups": groups,
        "attention": attention,
        "max_samples": 0,
        "dtype": "float32",
    }
    options |= also.pop("options", {})  # type: ignore[arg-type]
    return serve(path, runner="auto", options=options, **LIMITS | also)


def on_cpu(
    path: Path, *, runner: str = "program", serve: type[Serving] = Serving, **also: object
) -> Serving:
    """The native program, or with `auto` what is the nearest to it."""
    return serve(path, runner=runner, options={"dtype": "float32"}, **LIMITS | also)
