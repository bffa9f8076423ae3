"""How fast a scheduler generates."""

from __future__ import annotations

import msgspec

from sylvan.protocol.messages import Load


class Throughput:
    """Tokens generated a second from one telling of the load to the next."""

    def __init__(self, now_s: float) -> None:
        self._told_s = now_s
        self._tokens = 0
        self._rate = self._last = 0.0

    def told(self, load: Load, now_s: float) -> Load:
        """`load` with its rates; what comes next counts from here on."""
        if now_s > self._told_s:
            self._rate = (load.generated_tokens - self._tokens) / (now_s - self._told_s)
            self._tokens, self._told_s = load.generated_tokens, now_s
            self._last = self._rate or self._last
        rates = {"gen_throughput": self._rate, "last_gen_throughput": self._last}
        return msgspec.structs.replace(load, **rates)
