"""Registers this server with gateways, and unregisters it at shutdown."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import msgspec

from sylvan.config.tree import ServerConfig
from sylvan.protocol.malformed import MALFORMED
from sylvan.utils.tasks import settled

logger = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT_S = 5.0


class RegistrationRefusedError(Exception):
    """A gateway rejected this server."""


class _Added(msgspec.Struct):
    worker_id: str


class _RegistrationView(msgspec.Struct):
    status: str


class _Shown(msgspec.Struct):
    id: str
    url: str
    job_status: _RegistrationView | None = None


class _List(msgspec.Struct):
    workers: list[_Shown]


def _decoded(answer: httpx.Response, kind: type[T]) -> T:
    """Decode a gateway's answer.

    Raises:
        RegistrationRefusedError: The answer is malformed.
    """
    try:
        return msgspec.json.decode(answer.content, type=kind)
    except MALFORMED as error:
        raise RegistrationRefusedError(f"it does not answer as a gateway does: {error}") from error


@dataclass(slots=True)
class _GatewayEntry:
    """A gateway; `worker_id` is empty while this server is not registered there."""

    gateway: str
    worker_id: str = ""
    logged_error: str = ""  # last error that was logged


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistrationInfo:
    """A server's registration at gateways.

    Attributes:
        gateways: Addresses of the gateways.
        url: This server's address as seen by the gateways.
        api_key: Key of this server; None: none.
        operator_key: Operator key of the gateways; None: none.
        interval_s: Seconds between checks whether they still know this server.
    """

    gateways: Sequence[str]
    url: str
    api_key: str | None = None
    operator_key: str | None = field(default=None, repr=False)
    interval_s: float = 5.0

    @classmethod
    def from_config(cls, server: ServerConfig, url: str) -> RegistrationInfo:
        """Read the configuration of a server that listens at `url`."""
        return cls(
            gateways=server.register,
            url=server.register_url or url,
            api_key=server.api_key.reveal() if server.api_key else None,
            operator_key=server.register_key.reveal() if server.register_key else None,
        )


class Registration:
    """Keeps this server registered with gateways; use it as an async context manager.

    A gateway that was unreachable, or forgot this server, is notified again. On exit, all gateways
    are notified that the server stops, so they send it nothing new.
    """

    def __init__(self, info: RegistrationInfo) -> None:
        self._info = info
        self._entries = [_GatewayEntry(gateway.rstrip("/")) for gateway in info.gateways]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Registration:
        if not self._entries:  # creating a client takes 0.1 s
            return self
        key = self._info.operator_key
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._http = httpx.AsyncClient(timeout=TIMEOUT_S, headers=headers, trust_env=False)
        self._tasks = [asyncio.create_task(self._maintain(entry)) for entry in self._entries]
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._entries:
            return
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        leaving = [self._unregister(entry) for entry in self._entries if entry.worker_id]
        await asyncio.gather(*leaving)
        await self._http.aclose()

    async def _maintain(self, entry: _GatewayEntry) -> None:
        while True:
            try:
                await self._check(entry)
                entry.logged_error = ""
            except (httpx.HTTPError, RegistrationRefusedError) as error:
                self._warn_once(entry, str(error) or type(error).__name__)
            await asyncio.sleep(self._info.interval_s)

    async def _check(self, entry: _GatewayEntry) -> None:
        """Register unless the gateway knows this server."""
        if entry.worker_id and await self._is_registered(entry):
            return
        info = self._info
        body: dict[str, Any] = {"url": info.url}
        if info.api_key is not None:
            body["api_key"] = info.api_key
        answer = await self._http.post(f"{entry.gateway}/workers", json=body)
        if answer.status_code == 409:  # added by an operator, or before a crash of this server
            entry.worker_id = await self._id_of(entry)
        elif answer.status_code == 202:
            entry.worker_id = _decoded(answer, _Added).worker_id
            logger.info("registered at %s as %s", entry.gateway, info.url)
        else:
            raise RegistrationRefusedError(f"status {answer.status_code}: {answer.text[:200]}")

    async def _is_registered(self, entry: _GatewayEntry) -> bool:
        answer = await self._http.get(f"{entry.gateway}/workers/{entry.worker_id}")
        if answer.status_code != 200:
            return False
        job = _decoded(answer, _Shown).job_status
        return job is None or job.status != "failed"

    async def _id_of(self, entry: _GatewayEntry) -> str:
        """Return the ID under which the gateway knows this server; empty if it does not."""
        answer = await self._http.get(f"{entry.gateway}/workers")
        answer.raise_for_status()
        known = _decoded(answer, _List).workers
        return next((worker.id for worker in known if worker.url == self._info.url), "")

    async def _unregister(self, entry: _GatewayEntry) -> None:
        work = self._http.delete(f"{entry.gateway}/workers/{entry.worker_id}")
        result = await settled(work)
        if isinstance(result, httpx.HTTPError):
            logger.warning("cannot notify %s that this server stops: %s", entry.gateway, result)
        elif isinstance(result, BaseException):
            raise result

    def _warn_once(self, entry: _GatewayEntry, why: str) -> None:
        if why != entry.logged_error:
            logger.warning("cannot register at %s: %s", entry.gateway, why)
            entry.logged_error = why
