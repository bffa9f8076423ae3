"""Builds the pass-through to servers of the OpenAI API."""

from __future__ import annotations

import asyncio
import platform
from contextlib import AsyncExitStack
from dataclasses import dataclass

from sylvan.config.route import RouteConfig
from sylvan.gateway.flow.admission import GatewayAdmission
from sylvan.gateway.observe.metrics import GatewayMetrics
from sylvan.gateway.openai.catalog import Catalog
from sylvan.gateway.openai.history.background import Background
from sylvan.gateway.openai.history.history import History
from sylvan.gateway.openai.history.owners import Owners
from sylvan.gateway.openai.history.store import HistoryStore
from sylvan.gateway.openai.router import PassThrough, PassThroughParts
from sylvan.gateway.openai.upstreams import Upstreams
from sylvan.gateway.security.clients import Clients
from sylvan.gateway.upstream.http import HttpUpstream
from sylvan.utils.clock import Clock


@dataclass(frozen=True, kw_only=True, slots=True)
class PassThroughBuilder:
    """Dependencies of the pass-through.

    Attributes:
        config: Settings of the gateway.
        upstreams: Upstream servers and fallback models.
        http: HTTP client.
        clients: Tenants' budgets.
        metrics: Prometheus metrics.
        clock: Monotonic clock, for durations.
        wall: Wall clock, in seconds since the Unix epoch.
        process: Name of this process among the gateway's processes.
    """

    config: RouteConfig
    upstreams: Upstreams
    http: HttpUpstream
    clients: Clients
    metrics: GatewayMetrics
    clock: Clock
    wall: Clock
    process: str

    def build(self, stack: AsyncExitStack) -> PassThrough:
        """Build the router; register its clean-up with `stack`.

        Raises:
            ConfigError: The history store cannot be opened.
        """
        config, history = self.config, self._history()
        catalog = Catalog(self.upstreams, self.http)
        polling = asyncio.create_task(catalog.run())
        stack.callback(polling.cancel)
        if history is not None:
            stack.push_async_callback(history.close)
        return PassThrough(
            PassThroughParts(
                catalog=catalog,
                upstream=self.http,
                admission=GatewayAdmission(config.limits, self.clock),
                clients=self.clients,
                keeps_credentials=self.clients.open,
                metrics=self.metrics,
                limits=config.limits,
                max_body_bytes=config.server.max_body_bytes,
                clock=self.clock,
                history=history,
            )
        )

    def _history(self) -> History | None:
        providers = self.config.providers
        if providers is None or providers.history == "none":
            return None
        maker = f"{platform.node()}:{self.config.server.port}:{self.process}"
        store = HistoryStore(providers, self.metrics.history, self.wall, maker)
        return History(
            store=store,
            background=Background(store, self.wall),
            owners=Owners(by_key=self.clients.open),
            max_body_bytes=self.config.server.max_body_bytes,
            wall=self.wall,
        )
