"""A real scheduler, its executor and the tiers below, in this process."""

from __future__ import annotations

import time
from pathlib import Path

from sylvan.config.tree import CacheConfig, TiersConfig
from sylvan.runtime.engine.build import build_scheduler
from tests.support.kv import request
from tests.support.tiny import tiny_config

PROMPT = [(3 * i) % 200 + 5 for i in range(200)]


class Served:
    """A scheduler that was built from a configuration."""

    def __init__(self, folder: Path, storage: Path | str | None, **changes) -> None:
        ranks = changes.pop("ranks", None)
        tiers = {"prefetch_min_tokens": 16} | changes.pop("tiers", {})
        config = tiny_config(
            folder,
            tiers=TiersConfig(storage=None if storage is None else str(storage), **tiers),
            cache=CacheConfig(
                page_size=16, max_tokens=changes.pop("max_tokens", 2048), max_states=12
            ),
            **changes,
        )
        self.outputs: list = []
        self.built = build_scheduler(config, self.outputs.extend, ranks=ranks)

    def ask(self, prompt=PROMPT, new: int = 8, **fields) -> tuple[list[int], int]:
        """Return ids, and the number of prompt tokens from the cache."""
        self.begin(prompt, new, **fields)
        self.settle()
        assert self.built.scheduler.audit() == 0
        return self.ids, self.outputs[-1].usage.cached_tokens

    def begin(self, prompt=PROMPT, new: int = 8, **fields) -> None:
        self.outputs.clear()
        self.built.scheduler.add(request("a", prompt, new=new, **fields))

    @property
    def ids(self) -> list[int]:
        return [token for out in self.outputs for token in out.token_ids]

    @property
    def counts(self) -> dict:
        return self.built.stores.describe()["counts"]

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.built.close()

    def settle(self) -> None:
        """Wait until the request is answered, and nothing is on its way to the store."""
        until = time.monotonic() + 120
        while not self.built.scheduler.idle:
            assert time.monotonic() < until
            if not self.built.scheduler.step():
                time.sleep(0.001)
