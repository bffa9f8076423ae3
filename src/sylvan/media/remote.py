"""Sends items to servers that run only the encoder (`media.encoder_only`)."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from sylvan.config.values import Secret
from sylvan.media.messages import EncodeItem, PreparedItem, PrepareItem
from sylvan.protocol.errors import CapacityError, ConfigError, RequestError
from sylvan.transport.api import MessageError
from sylvan.transport.codec import MessageDecoder, MessageEncoder

logger = logging.getLogger(__name__)

PATH = "/encode_item"
TYPE = "application/msgpack"
MAX_ANSWER_BYTES = 1 << 30
_CONNECT_S = 5.0


class RemoteEncoders:
    """The encoders of other servers.

    Args:
        urls: Their addresses.
        key: Their key.
        timeout_s: Seconds that one of them may take for an item.

    Raises:
        ConfigError: An address is none.
    """

    def __init__(self, urls: Sequence[str], key: Secret | None, timeout_s: float) -> None:
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ConfigError(f"media.encoder_urls: {url!r} is not an http or https address")
        self._urls, self._key, self._timeout_s = tuple(urls), key, timeout_s
        self._client: Any = None  # of httpx, which is imported with the first item
        self._encoder = MessageEncoder(limit=None)
        self._decoder = MessageDecoder[PreparedItem](PreparedItem)

    async def encode(self, item: PrepareItem, tenant: str, path: str) -> PreparedItem:
        """Return an item's tokens and vectors.

        Args:
            item: The item.
            tenant: Tenant of the request.
            path: Path of the item in the body.

        Raises:
            RequestError: The item is invalid; the message names the path.
            CapacityError: No server answers.
        """
        import httpx

        scope = hashlib.sha256(tenant.encode()).hexdigest()
        body = self._encoder.encode(EncodeItem(item=item, scope=scope))
        for url in self._preferred_servers(item.data):
            try:
                found = await self._ask(url, body)
            except (httpx.HTTPError, MessageError, _RefusedError) as error:
                logger.warning("encoder %s: %s", url, error or type(error).__name__)
                continue
            if found.error:
                raise RequestError(f"{path}: {found.error}.", param=path)
            return found
        raise CapacityError(f"none of {len(self._urls)} encoder servers answers")

    async def close(self) -> None:
        """Close all connections."""
        if self._client is not None:
            await self._client.aclose()

    def _preferred_servers(self, data: bytes) -> list[str]:
        """Return the servers in the order in which to try them; equal items yield the same order.

        Rendezvous hashing: adding or removing a server moves few items to another first server.
        """
        item = hashlib.sha256(data).digest()
        return sorted(self._urls, key=lambda url: hashlib.sha256(item + url.encode()).digest())

    async def _ask(self, url: str, body: bytes) -> PreparedItem:
        if self._client is None:
            import httpx

            timeout = httpx.Timeout(self._timeout_s, connect=_CONNECT_S)
            self._client = httpx.AsyncClient(timeout=timeout, trust_env=False)
        headers = {"content-type": TYPE}
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key.reveal()}"
        target = url.rstrip("/") + PATH
        parts: list[bytes] = []
        size = 0
        async with self._client.stream("POST", target, content=body, headers=headers) as answer:
            if answer.status_code != 200:
                raise _RefusedError(f"status {answer.status_code}")
            async for part in answer.aiter_raw():
                size += len(part)
                if size > MAX_ANSWER_BYTES:
                    raise _RefusedError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
                parts.append(part)
        return self._decoder.decode(b"".join(parts))


class _RefusedError(Exception):
    """A server did not encode an item; the message says why."""
