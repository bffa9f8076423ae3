"""A directory accessed through a NIXL plug-in: `nixl:///DIR[?plugin=POSIX]`.

NIXL moves bytes between memory and files with asynchronous system I/O (`POSIX`),
or GPUDirect Storage (`GDS`, `GDS_MT`). Index, limits and layout are those of a plain directory,
so `nixl:///DIR` and `/DIR` are the same store. Its package is `nixl`.
"""

from __future__ import annotations

import importlib
import itertools
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.storage.api import Buffer, StoreError, StoreKind, StoreLimits, spread
from sylvan.runtime.storage.backends.file import FileStore

PLUGINS = ("POSIX", "GDS", "GDS_MT")
_PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")
_POLL_S = 0.0001


class NixlFiles:
    """Implements `PageFiles` with NIXL transfers; each thread has its own agent.

    Args:
        api: NIXL's module `_api`.
        plugin: The plug-in.
        timeout_s: Timeout of a transfer.
    """

    def __init__(self, api: Any, plugin: str, timeout_s: float) -> None:
        self._api, self._plugin, self._timeout_s = api, plugin, timeout_s
        self._own = threading.local()
        self._stuck: list[Any] = []  # buffers that a timed-out transfer may still write to
        self._numbers = itertools.count()

    def read_into(self, path: Path, parts: Sequence[Buffer]) -> int:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            found = np.empty(size, np.uint8)
            if size:
                self._move("READ", found, descriptor)
        finally:
            os.close(descriptor)
        spread(found.data, parts)
        return size

    def write(self, path: Path, record: bytes) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            if record:
                self._move("WRITE", np.frombuffer(record, np.uint8), descriptor)
        finally:
            os.close(descriptor)

    def _move(self, direction: str, memory: NDArray[np.uint8], descriptor: int) -> None:
        """Move all bytes of `memory` from or to the start of a file.

        Raises:
            StoreError: NIXL fails, or times out.
        """
        try:
            over = self._transfer(direction, memory, descriptor)
        except Exception as error:  # NIXL's exceptions have no common class
            raise StoreError(f"NIXL's {self._plugin}: {error or type(error).__name__}") from error
        if not over:
            raise StoreError(f"NIXL's {self._plugin} took over {self._timeout_s} s for a page")

    def _transfer(self, direction: str, memory: NDArray[np.uint8], descriptor: int) -> bool:
        """Run a transfer; return whether it finished in time."""
        agent = self._agent()
        registered = [
            agent.register_memory([(at, memory.nbytes, target, "")], kind)
            for at, target, kind in ((memory.ctypes.data, 0, "DRAM"), (0, descriptor, "FILE"))
        ]
        here, there = (each.trim() for each in registered)
        handle = agent.initialize_xfer(direction, here, there, agent.name)
        if not self._ends(agent, handle):
            self._stuck.append((memory, handle, registered))
            return False
        agent.release_xfer_handle(handle)
        for each in registered:
            agent.deregister_memory(each)
        return True

    def _ends(self, agent: Any, handle: Any) -> bool:
        """Wait for a transfer; return whether it finished in time."""
        state, until = agent.transfer(handle), time.monotonic() + self._timeout_s
        while state == "PROC":
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_S)
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise OSError(f"the transfer ended as {state}")
        return True

    def _agent(self) -> Any:
        agent = getattr(self._own, "agent", None)
        if agent is None:
            name = f"sylvan-{os.getpid()}-{next(self._numbers)}"
            config = self._api.nixl_agent_config(backends=[self._plugin])
            self._own.agent = agent = self._api.nixl_agent(name, config)
        return agent


def place_of(url: str) -> tuple[Path, str]:
    """Return the directory and plug-in of a URL.

    Raises:
        ConfigError: It names no directory, or has an unknown plug-in or option.
    """
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.strip("/"):
        raise ConfigError(f"tiers.storage={url}: a directory is written nixl:///absolute/path")
    query = parse_qs(parts.query)
    plugin = query.pop("plugin", ["POSIX"])[-1].upper()
    if query:
        raise ConfigError(f"tiers.storage={url}: the one option is plugin")
    if plugin not in PLUGINS:
        raise ConfigError(f"tiers.storage={url}: plugin is one of {', '.join(PLUGINS)}")
    return Path(unquote(parts.path)), plugin


def _api(url: str) -> Any:
    errors: list[str] = []
    for package in _PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError as error:
            errors.append(str(error))
    raise ConfigError(f"tiers.storage={url} needs another package: pip install nixl ({errors[0]})")


def _check(url: str, limits: StoreLimits) -> None:
    root, _ = place_of(url)
    if root.exists() and not root.is_dir():
        raise ConfigError(f"tiers.storage={url}: {str(root)!r} is not a directory")
    _api(url)


def _open(url: str, limits: StoreLimits) -> FileStore:
    _check(url, limits)
    root, plugin = place_of(url)
    files = NixlFiles(_api(url), plugin, limits.timeout_s)
    store = FileStore(root, limits, files=files)
    probe = root / f".probe-{os.getpid()}"
    try:
        files.write(probe, b"probe")  # the plug-in's own dependencies may be missing
    finally:
        probe.unlink(missing_ok=True)
    return store


STORE = StoreKind(open=_open, check=_check)
