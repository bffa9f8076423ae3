"""Measures generation throughput."""

from __future__ import annotations

import msgspec

from sylvan.protocol.messages import SchedulerLoad


class ThroughputMeter:
    """Tokens generated per second between one report of the load and the next."""

    def __init__(self, now_s: float) -> None:
        self._reported_s = now_s
        self._tokens = 0
        self._rate = self._last = 0.0

    def with_rates(self, load: SchedulerLoad, now_s: float) -> SchedulerLoad:
        """Return `load` with the rates since the last call."""
        if now_s > self._reported_s:
            self._rate = (load.generated_tokens - self._tokens) / (now_s - self._reported_s)
            self._tokens, self._reported_s = load.generated_tokens, now_s
            self._last = self._rate or self._last
        rates = {"gen_throughput": self._rate, "last_gen_throughput": self._last}
        return msgspec.structs.replace(load, **rates)
