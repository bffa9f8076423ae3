"""The adapters that clients can name: loaded and unloaded at run time, restored after restarts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from sylvan.protocol.adapters import AdapterInfo, decode_adapters
from sylvan.protocol.commands import LoadAdapter
from sylvan.protocol.errors import CapacityError, ConfigError, RequestError
from sylvan.protocol.malformed import MALFORMED
from sylvan.protocol.messages import Command, RegisterAdapter, UnloadAdapter
from sylvan.runtime.tokenizer.adapter_spool import CONFIG, WEIGHTS, AdapterSpool
from sylvan.runtime.tokenizer.router import ReplicaRouter
from sylvan.runtime.tokenizer.types import ServedModelInfo
from sylvan.utils.threads import call_in_thread

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 600.0
MAX_NAME_CHARS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSettings:
    """The operator's settings for adapters."""

    enabled: bool = False
    base: str = ""
    allowed_dirs: tuple[str, ...] = ()
    state_file: str | None = None


class _State(msgspec.Struct, kw_only=True):
    """Contents of the state file.

    `adapters` are not in the configuration; `unloaded` are configured but not served.
    """

    adapters: list[AdapterInfo] = []
    unloaded: list[str] = []


@dataclass(slots=True)
class _Known:
    """Adapters by name; `configured` are the names in the configuration."""

    adapters: dict[str, AdapterInfo] = field(default_factory=dict[str, AdapterInfo])
    configured: set[str] = field(default_factory=set[str])
    unloaded: set[str] = field(default_factory=set[str])


class Adapters:
    """Registry of adapters by name, across all replicas.

    A restarted replica registers all adapters before it gets requests. Belongs to the event
    loop of the API process.

    Args:
        router: Sends commands to the replicas.
        settings: The operator's settings.
    """

    def __init__(self, router: ReplicaRouter, settings: AdapterSettings) -> None:
        self._router, self._settings = router, settings
        self._known: _Known | None = None
        self._tenants: Mapping[str, frozenset[str]] = {}
        self._lock = asyncio.Lock()
        kept = settings.state_file
        self._spool = AdapterSpool(Path(f"{kept}.adapters") if kept is not None else None)
        self._left: list[AdapterInfo] = []  # unloaded, but perhaps still read by running requests
        for client in router.clients:
            client.reminders.append(self._registrations)

    @property
    def enabled(self) -> bool:
        """Whether adapters are enabled."""
        return self._settings.enabled

    def limit(self, tenants: Mapping[str, Collection[str]]) -> None:
        """Let tenants use only the adapters of these names; others may use all."""
        self._tenants = {tenant: frozenset(names) for tenant, names in tenants.items()}

    def served(self, tenant: str | None = None) -> list[AdapterInfo]:
        """Return all adapters, or those a tenant may use, in load order."""
        known = self._known.adapters.values() if self._known else ()
        return [info for info in known if tenant is None or self._may_use(info.name, tenant)]

    def find(self, name: str, tenant: str) -> AdapterInfo | None:
        """Return a tenant's adapter by name or ID."""
        if self._known is None:
            return None
        info = self._known.adapters.get(name)
        if info is None and "@" in name:
            info = next((i for i in self._known.adapters.values() if i.id == name), None)
        return info if info is not None and self._may_use(info.name, tenant) else None

    def id_of(self, name: str | None, tenant: str) -> str | None:
        """Return the ID of the adapter that a tenant requests, if any.

        Raises:
            RequestError: The tenant has no adapter of that name.
        """
        if name is None:
            return None
        info = self.find(name, tenant)
        if info is None:
            raise RequestError(f"there is no adapter called {name[:200]!r}", param="lora_path")
        return info.id

    async def load(self, name: str, path: str, *, pinned: bool = False) -> AdapterInfo:
        """Load an adapter from a directory under a name.

        Raises:
            RequestError: The name is taken, or the adapter cannot be served; nothing is loaded.
            CapacityError: A scheduler is restarting, or did not answer in time.
        """
        self._check_allowed(path)
        async with self._lock:
            return await self._load(name, path, pinned=pinned)

    async def load_tensors(
        self, name: str, config: Mapping[str, Any], weights: bytes, *, pinned: bool = False
    ) -> AdapterInfo:
        """Load an adapter from its configuration and a safetensors file.

        Raises:
            RequestError, CapacityError: see `load`.
        """
        async with self._lock:
            self._check_name(name)
            await self._delete_unused_files()
            folder = await call_in_thread(self._spool.write, config, weights)
            try:
                return await self._load(name, str(folder), pinned=pinned)
            except BaseException:
                await call_in_thread(self._spool.remove, str(folder))
                raise

    async def unload(self, name: str, *, abort: bool = False) -> AdapterInfo:
        """Unload an adapter; its running requests finish, or are aborted with `abort`.

        Raises:
            RequestError: There is none of that name.
            CapacityError: A scheduler is restarting, or did not answer in time.
        """
        async with self._lock:
            known = self._state()
            info = known.adapters.get(name)
            if info is None:
                raise RequestError(
                    f"lora_name: there is no adapter called {name[:200]!r}", param="lora_name"
                )
            del known.adapters[name]
            try:
                await self._router.control(UnloadAdapter(id=info.id, abort=abort))
            except BaseException:
                known.adapters[name] = info
                raise
            if name in known.configured:
                known.unloaded.add(name)
            await self._save()
            if self._spool.holds(info.path):
                self._left.append(info)
                with contextlib.suppress(CapacityError):  # delete it later
                    await self._delete_unused_files()
            return info

    def close(self) -> None:
        """Delete the files of uploaded adapters, unless the next start needs them."""
        self._spool.close()

    # ---- inside

    def _may_use(self, name: str, tenant: str) -> bool:
        allowed = self._tenants.get(tenant)
        return allowed is None or name in allowed

    def _state(self) -> _Known:
        if not self._settings.enabled or self._known is None:
            raise RequestError("LoRA is off; start the server with --enable-lora", status=400)
        return self._known

    def _check_name(self, name: str) -> None:
        known = self._state()
        bad = not name.isprintable() or not 0 < len(name) <= MAX_NAME_CHARS
        if bad or name == self._settings.base:
            raise RequestError(
                f"lora_name must have 1 to {MAX_NAME_CHARS} printable characters, and must not be "
                "that of the model",
                param="lora_name",
            )
        if name in known.adapters:
            raise RequestError(
                f"lora_name: an adapter called {name!r} is served already; unload it first",
                param="lora_name",
            )

    def _check_allowed(self, path: str) -> None:
        allowed = [Path(folder).resolve() for folder in self._settings.allowed_dirs]
        if "\0" in path:
            raise RequestError("lora_path must not have a null character", param="lora_path")
        folder = Path(path)
        found = [each.resolve() for each in (folder, folder / CONFIG, folder / WEIGHTS)]
        if allowed and not all(any(f.is_relative_to(a) for a in allowed) for f in found):
            raise RequestError(
                f"lora_path: {path[:500]!r} is not in one of lora.allowed_dirs", param="lora_path"
            )

    async def _load(self, name: str, path: str, *, pinned: bool) -> AdapterInfo:
        self._check_name(name)
        replies = await self._router.control_each(LoadAdapter(name, path, pinned), LOAD_TIMEOUT_S)
        failed = next((reply for _, reply in replies if not reply.ok), None)
        bodies = [reply.body for _, reply in replies if reply.ok and reply.body]
        if failed is not None or not bodies:
            for body in bodies:  # of other replicas
                await self._router.control(UnloadAdapter(id=body["id"]))
            message, status = (failed.message, failed.status) if failed else ("not loaded", 500)
            raise RequestError(message, param="lora_path", status=status)
        body = bodies[0]
        info = AdapterInfo(
            name=name,
            id=body["id"],
            path=path,
            rank=body["rank"],
            num_bytes=body["num_bytes"],
            pinned=pinned,
        )
        known = self._state()
        known.adapters[name] = info
        await self._save()
        return info

    def _registrations(self, facts: ServedModelInfo) -> Sequence[Command]:
        """Return commands that register later adapters at a restarted scheduler."""
        text = facts.extra.pop("adapters", None)
        if not isinstance(text, str):
            return ()
        has = decode_adapters(text)
        if self._known is None:
            self._known = self._first(has)
        ids = {info.id for info in has}
        wanted = {info.id: info for info in self._known.adapters.values()}
        return [
            *_registered(info for info in wanted.values() if info.id not in ids),
            *(UnloadAdapter(id=gone) for gone in ids - wanted.keys()),
        ]

    def _first(self, has: Sequence[AdapterInfo]) -> _Known:
        state = _read_state(self._settings.state_file)
        known = _Known(configured={info.name for info in has})
        known.unloaded = set(state.unloaded) & known.configured
        known.adapters = {info.name: info for info in has if info.name not in known.unloaded}
        for info in state.adapters:
            known.adapters.setdefault(info.name, info)
        self._spool.sweep({info.path for info in known.adapters.values()})
        return known

    async def _save(self) -> None:
        path, known = self._settings.state_file, self._state()
        if path is None:
            return
        added = [
            info
            for name, info in known.adapters.items()
            if name not in known.configured or name in known.unloaded
        ]
        state = _State(adapters=added, unloaded=sorted(known.unloaded))
        try:
            await call_in_thread(_write_whole, Path(path), msgspec.json.encode(state))
        except OSError:
            logger.exception("lora.state_file %s cannot be written", path)

    async def _delete_unused_files(self) -> None:
        """Delete files of unloaded adapters without running requests."""
        served = {info.id for info in self._state().adapters.values()}
        for info in tuple(self._left):
            if info.id not in served:  # otherwise it was loaded again from elsewhere
                replies = await self._router.control_each(UnloadAdapter(id=info.id))
                if any(
                    not reply.ok or (reply.body or {}).get("num_requests") for _, reply in replies
                ):
                    continue
            self._left.remove(info)
            await call_in_thread(self._spool.remove, info.path)


def _registered(adapters: Iterable[AdapterInfo]) -> list[Command]:
    return [
        RegisterAdapter(id=i.id, path=i.path, num_bytes=i.num_bytes, pinned=i.pinned)
        for i in adapters
    ]


def _read_state(path: str | None) -> _State:
    """Read the state file of the last run.

    Raises:
        ConfigError: The file exists but is unreadable.
    """
    if path is None or not Path(path).exists():
        return _State()
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=_State)
    except (OSError, *MALFORMED) as error:
        raise ConfigError(f"lora.state_file={path}: cannot be read: {error}") from None


def _write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
