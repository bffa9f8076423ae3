"""Maps models to the upstream servers that serve them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sylvan.gateway.errors import UnknownModelError, UpstreamError
from sylvan.gateway.openai.upstreams import Upstreams, UpstreamSpec
from sylvan.gateway.upstream.http import HttpUpstream, Outgoing
from sylvan.protocol.malformed import MALFORMED

logger = logging.getLogger(__name__)

REFRESH_S = 60.0
RETRY_S = 2.0
TIMEOUT_S = 10.0
MAX_BYTES = 4 << 20


class _Card(msgspec.Struct):
    id: str


class _Cards(msgspec.Struct):
    data: list[_Card]


@dataclass(frozen=True, slots=True)
class CatalogTarget:
    """A server, and the server's name for the model."""

    upstream: UpstreamSpec
    model: str


class Catalog:
    """Knows which server serves a model; asks servers whose models are not configured.

    Args:
        upstreams: Upstream servers and fallback models.
        http: HTTP client.
    """

    def __init__(self, upstreams: Upstreams, http: HttpUpstream) -> None:
        self._upstreams = upstreams
        self._http = http
        self._listed: dict[str, tuple[str, ...]] = {}  # by address

    @property
    def models(self) -> Sequence[str]:
        """Names of all known models, without duplicates."""
        specs = self._upstreams.upstreams
        found = (name for spec in specs for name in self._names(spec))
        return tuple(dict.fromkeys((*found, *self._upstreams.fallbacks)))

    def targets(self, model: str) -> Sequence[CatalogTarget]:
        """Return the servers to try for a model: its own, then those of its fallback models.

        Raises:
            UnknownModelError: No server has it.
        """
        wanted = (model, *self._upstreams.fallbacks.get(model, ()))
        found = [target for name in wanted for target in self._of(name)]
        if not found:
            shown = ", ".join(self.models[:20]) or "none yet"
            raise UnknownModelError(f"The model {model[:200]!r} does not exist; there are {shown}.")
        return found

    async def run(self) -> None:
        """Poll servers for their models until cancelled."""
        unlisted = [spec for spec in self._upstreams.upstreams if not spec.models]
        while unlisted:
            good = await asyncio.gather(*map(self._ask, unlisted))
            await asyncio.sleep(REFRESH_S if all(good) else RETRY_S)

    async def _ask(self, spec: UpstreamSpec) -> bool:
        key = [] if spec.api_key is None else [("authorization", f"Bearer {spec.api_key}")]
        request = Outgoing(method="GET", url=spec.url, target="/models", headers=key)
        try:
            answer = await self._http.call(request, TIMEOUT_S, MAX_BYTES)
            cards: Any = msgspec.json.decode(answer.body, type=_Cards)
        except (UpstreamError, *MALFORMED) as error:
            if spec.url not in self._listed:
                logger.warning("the models of %s are not known yet: %s", spec.shown, error)
            return False
        self._listed[spec.url] = tuple(card.id for card in cards.data)
        return True

    def _of(self, name: str) -> list[CatalogTarget]:
        targets: list[CatalogTarget] = []
        for spec in self._upstreams.upstreams:
            if name in spec.aliases:
                targets.append(CatalogTarget(spec, spec.aliases[name]))
            elif name in self._listed.get(spec.url, ()):
                targets.append(CatalogTarget(spec, name))
        return targets

    def _names(self, spec: UpstreamSpec) -> Sequence[str]:
        return tuple(spec.aliases) or self._listed.get(spec.url, ())
