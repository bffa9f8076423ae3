"""Counts what XLA compiles while serving, by JAX's own events."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from sylvan.runtime.executor.xla.sizes import BucketUse

_COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def counted_compilations(use: BucketUse) -> Iterator[None]:
    """Context in which every compilation of XLA is added to `use.recompiled`."""

    def heard(event: str, seconds: float, **about: object) -> None:
        del seconds, about
        use.recompiled += event == _COMPILED

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
